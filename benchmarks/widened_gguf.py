"""The weights of `benchmarks.widened` as GGUF files for llama.cpp, target and MTP drafter, with the bundle's own codes.

    python -m benchmarks.widened_gguf FILE [--drafter FILE] [--head-bits 4] [--size E2B|small]

Layers of the target are Q4_0 and those of the drafter Q8_0, quantised by the exporter: a weight of a GGUF file is a
weight of the bundle. Two differences stay. llama.cpp scores the whole vocabulary for every MTP token, as it makes no
use of the token clusters of Gemma 4's drafter. And it knows no tokenizer that splits text as the pair's does: the files
have the pair's tokens and merges, which give the right text for token ids, but prompts have to be token ids.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.e2b_gguf import (
    ARCHITECTURE,
    HEAD_KINDS,
    GgufTensor,
    describe,
    own_name,
    rope_divisors,
    tensor_kind,
    write_file,
)
from benchmarks.widened import SIZES, widened
from ondevice.bundle import TOKENIZER
from ondevice.bundle_format.tensor_table import DRAFTER_CENTROIDS, DRAFTER_ORDERING
from ondevice.bundle_format.weight_format import INT4, INT8
from ondevice_export.checkpoint.directory import Checkpoint
from ondevice_export.checkpoint.models import DrafterCheckpoint, TargetCheckpoint
from ondevice_export.quantize import quantize

try:
    import gguf
    from gguf import GGMLQuantizationType as Kind
except ModuleNotFoundError:
    raise SystemExit("a GGUF file is written by the gguf package: pip install gguf") from None

DRAFTER = "gemma4-assistant"
"""llama.cpp's name of the drafter's architecture, which gguf 0.19 does not know."""

_DRAFTER_NAMES = {
    "pre_projection.weight": "nextn.pre_projection.weight",
    "post_projection.weight": "nextn.post_projection.weight",
}
_UNREAD = (DRAFTER_CENTROIDS, DRAFTER_ORDERING)

CHUNK_WEIGHTS = 1 << 22
"""Weights that are quantised at a time."""


def write_target(path: Path, target: TargetCheckpoint, head_bits: int) -> None:
    """Write the target; an older file there is replaced."""
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[ARCHITECTURE])
    writer.add_name(target.checkout.id)
    describe(writer, target.config, target.config)
    add_tokens(writer, target)
    names = gguf.get_tensor_name_map(ARCHITECTURE, len(target.config.layers))
    tensors = []
    for name, shape in target.shapes.items():
        kind = tensor_kind(name, shape, Kind.Q4_0, HEAD_KINDS[head_bits])
        tensors.append(GgufTensor(own_name(name, names), shape, kind, partial(_data, target.checkpoint, name, kind)))
    write_file(writer, [rope_divisors(target.config), *tensors])


def write_drafter(path: Path, drafter: DrafterCheckpoint, target: TargetCheckpoint, head_bits: int) -> None:
    """Write the MTP drafter, for `--spec-type draft-mtp`; an older file there is replaced."""
    writer = gguf.GGUFWriter(path, DRAFTER)
    writer.add_name(drafter.checkout.id)
    describe(writer, drafter.config, target.config)
    writer.add_uint32(f"{DRAFTER}.embedding_length_out", target.config.hidden_size)
    writer.add_uint32(f"{DRAFTER}.nextn_predict_layers", len(drafter.config.layers))
    add_tokens(writer, target)
    names = gguf.get_tensor_name_map(ARCHITECTURE, len(drafter.config.layers))
    tensors = []
    for name, shape in drafter.shapes.items():
        if name not in _UNREAD:
            own = _DRAFTER_NAMES.get(name) or own_name(name, names)
            kind = tensor_kind(name, shape, Kind.Q8_0, HEAD_KINDS[head_bits])
            tensors.append(GgufTensor(own, shape, kind, partial(_data, drafter.checkpoint, name, kind)))
    write_file(writer, [rope_divisors(drafter.config), *tensors])


def add_tokens(writer: Any, target: TargetCheckpoint) -> None:
    """The pair's tokens and merges, and a name for every token that is not used."""
    read = json.loads((target.checkout.directory / TOKENIZER).read_text("utf-8"))
    control = {token["id"]: token["content"] for token in read["added_tokens"]}
    texts = {number: text for text, number in read["model"]["vocab"].items()} | control
    size = target.config.vocab_size
    kinds = gguf.TokenType
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([texts.get(number, f"<unused{number}>") for number in range(size)])
    writer.add_token_types(
        [
            kinds.CONTROL if number in control else kinds.NORMAL if number in texts else kinds.UNUSED
            for number in range(size)
        ]
    )
    merges = read["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    ids = target.token_ids
    writer.add_bos_token_id(ids["bos_token_id"])
    writer.add_eos_token_id(ids["eos_token_id"])
    writer.add_pad_token_id(ids["pad_token_id"])
    writer.add_add_bos_token(True)


def _data(checkpoint: Checkpoint, name: str, kind: Kind) -> Iterator[npt.NDArray[Any]]:
    """A tensor in llama.cpp's form, in chunks of rows."""
    if kind is Kind.F32:
        yield checkpoint.read(name)
        return
    height, width = checkpoint.shape(name)
    step = max(1, CHUNK_WEIGHTS // width)
    for start in range(0, height, step):
        yield blocks(checkpoint.rows(name, start, min(start + step, height)), kind)


def blocks(weights: npt.NDArray[np.float32], kind: Kind) -> npt.NDArray[np.uint8]:
    """Rows of weights as Q4_0 or Q8_0 with the exporter's codes: uint8[rows, width / 32, bytes of a block]."""
    form = {Kind.Q4_0: INT4, Kind.Q8_0: INT8}[kind]
    packed, scales, *_ = quantize(weights, form)
    codes = form.unpack(packed)
    if form == INT4:
        low, high = codes[..., :16], codes[..., 16:]
        stored = low | np.left_shift(high, np.uint8(4))
    else:  # from a zero point of 128 to int8
        stored = codes ^ np.uint8(128)
    return np.concatenate([scales.astype(np.float16)[..., None].view(np.uint8), stored], axis=-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--drafter", type=Path, metavar="FILE", help="write the MTP drafter to this file")
    parser.add_argument("--head-bits", type=int, choices=tuple(HEAD_KINDS), default=8)
    parser.add_argument("--size", choices=SIZES, default="E2B")
    arguments = parser.parse_args()
    with widened(arguments.size) as pair:
        write_target(arguments.file, pair.target, arguments.head_bits)
        if arguments.drafter is not None:
            write_drafter(arguments.drafter, pair.drafter, pair.target, arguments.head_bits)


if __name__ == "__main__":
    main()
