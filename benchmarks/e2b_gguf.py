"""The bundle of `e2b_shape` as a GGUF file, for llama.cpp: the same shapes, the same noise, blocks of the same bits.

    python -m benchmarks.e2b_gguf FILE [--head-bits 4] [--size 26B-A4B]

Matrices are Q4_0, the same as in the bundle: int4 in blocks of 32 with an fp16 scale. The head, which is also the token
embedding, is Q8_0 or Q4_0. The vocabulary has a size but no tokens: llama-bench draws token ids and needs no text.
About 2.8 GB. The `gguf` package writes it.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from benchmarks.e2b_shape import noise
from benchmarks.footprint import TARGETS
from benchmarks.shape import target_model
from ondevice.bundle_format.decoder import Layer
from ondevice.bundle_format.model_config import DrafterEntry, Target
from ondevice_export.families.gemma4 import DEFAULTS

try:
    import gguf
    from gguf import GGMLQuantizationType as Kind
except ModuleNotFoundError:
    raise SystemExit("a GGUF file is written by the gguf package: pip install gguf") from None

ARCHITECTURE = gguf.MODEL_ARCH.GEMMA4
HEAD = "model.embed_tokens.weight"
HEAD_KINDS = {4: Kind.Q4_0, 8: Kind.Q8_0}
STILL = 1e30
THETAS = DEFAULTS["rope_parameters"]
"""The rotary embeddings of Gemma 4."""
"""Divisor of the frequencies without rotation (llama.cpp, `Gemma4Model.generate_extra_tensors`)."""


_SCALES = {"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"}
"""Tensor names that the gguf package does not map."""


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a file.

    name, shape, kind : as llama.cpp knows it
    data : called when its turn comes; the bytes of the blocks, or float32, in pieces one after the other
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind
    data: Callable[[], Iterable[npt.NDArray[Any]]]

    @property
    def nbytes(self) -> int:
        block, size = gguf.GGML_QUANT_SIZES[self.kind]
        return int(np.prod(self.shape, dtype=np.int64)) // int(block) * int(size)

    def tofile(self, file: BinaryIO) -> None:
        """Write the data, as an array's method of this name does."""
        for piece in self.data():
            file.write(np.ascontiguousarray(piece).data)


def write_gguf(path: Path, head_bits: int, size: str = "E2B") -> None:
    """Write the random model; an older file there is replaced."""
    with tempfile.TemporaryDirectory() as directory:
        model = target_model(size, Path(directory))
    config = model.config
    names = gguf.get_tensor_name_map(ARCHITECTURE, len(config.layers))
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[ARCHITECTURE])
    writer.add_name(f"gemma-4-{size}-shape")
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(config.vocab_size)
    describe(writer, config, config)
    blocks = {kind: gguf.quantize(noise(), kind) for kind in (Kind.Q4_0, Kind.Q8_0)}
    tensors = []
    for name, shape in model.shapes.items():
        kind = tensor_kind(name, shape, Kind.Q4_0, HEAD_KINDS[head_bits])
        tensors.append(GgufTensor(own_name(name, names), shape, kind, partial(noise_of, shape, kind, blocks)))
    write_file(writer, [rope_divisors(config), *tensors])


def write_file(writer: Any, tensors: Sequence[GgufTensor]) -> None:
    """Write header, metadata and tensors, then close the file; `writer` is gguf's, with all metadata."""
    for tensor in tensors:
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.nbytes, tensor.kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in tensors:
        writer.write_tensor_data(tensor)
    writer.close()


def noise_of(shape: tuple[int, ...], kind: Kind, blocks: Mapping[Kind, npt.NDArray[Any]]) -> list[npt.NDArray[Any]]:
    """The noise in the form of a tensor; norms are ones."""
    if kind is Kind.F32:
        return [np.ones(shape, np.float32) if len(shape) == 1 else np.resize(noise(), shape)]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    return [np.resize(blocks[kind], int(np.prod(shape, dtype=np.int64)) // int(block) * int(size))]


def rope_divisors(config: Target | DrafterEntry) -> GgufTensor:
    """float32[head_dim / 2]: 1 for the full layers' frequencies that turn."""
    own = next(layer.attention for layer in config.layers if layer.attention.kind == "full")
    frequencies = config.frequencies()[own.rotary or 0]
    half, turning = len(frequencies), int(np.count_nonzero(frequencies))
    divisors = np.repeat(np.array([1, STILL], np.float32), [turning, half - turning])
    return GgufTensor("rope_freqs.weight", divisors.shape, Kind.F32, lambda: [divisors])


def own_name(name: str, names: Any) -> str:
    """llama.cpp's name of a tensor; `names` is gguf's map."""
    _, _, layer, part = [*name.split(".", 3), ""][:4]
    if part in _SCALES:
        return f"blk.{layer}.{_SCALES[part]}"
    own = names.get_name(name.removesuffix(".weight"))
    if own is None:
        raise SystemExit(f"{name}: gguf has no name for this tensor")
    return f"{own}.weight"


def tensor_kind(name: str, shape: tuple[int, ...], layers: Kind, head: Kind) -> Kind:
    """The form of a tensor: float32, or the blocks of the layers' matrices or the head's."""
    if len(shape) == 1 or name.endswith("router.proj.weight"):
        return Kind.F32
    return head if name == HEAD else layers


def _head_dim(layers: Sequence[Layer], kind: str) -> int:
    return next(layer.attention.head_dim for layer in layers if layer.attention.kind == kind)


def describe(writer: Any, config: Target | DrafterEntry, target: Target) -> None:
    """The metadata that llama.cpp's `llama_model_gemma4::load_arch_hparams` and its base class read.

    Args:
        config: of the model in the file: the target itself, or its drafter.
    """
    writer.add_context_length(target.context_length)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(len(config.layers))
    writer.add_feed_forward_length([layer.feed_forward.width for layer in config.layers])
    writer.add_head_count(config.layers[0].attention.heads)
    writer.add_head_count_kv([layer.attention.kv_heads for layer in config.layers])
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_sliding_window(target.window)
    writer.add_sliding_window_pattern([layer.attention.kind == "sliding" for layer in config.layers])
    if isinstance(config, Target):
        _describe_target(writer, config)
    else:
        writer.add_shared_kv_layers(len(config.layers))
    full, sliding = _head_dim(config.layers, "full"), _head_dim(config.layers, "sliding")
    writer.add_key_length(full)
    writer.add_value_length(full)
    writer.add_rope_dimension_count(full)
    writer.add_rope_freq_base(THETAS["full_attention"]["rope_theta"])
    writer.add_key_length_swa(sliding)
    writer.add_value_length_swa(sliding)
    writer.add_rope_dimension_count_swa(sliding)
    writer.add_rope_freq_base_swa(THETAS["sliding_attention"]["rope_theta"])


def _describe_target(writer: Any, config: Target) -> None:
    if (experts := config.layers[0].feed_forward.experts) is not None:
        writer.add_expert_count(experts.count)
        writer.add_expert_used_count(experts.top)
        writer.add_expert_feed_forward_length(experts.intermediate_size)
    writer.add_shared_kv_layers(len(config.layers) - config.first_shared_layer)
    writer.add_embedding_length_per_layer_input(0 if config.per_layer is None else config.per_layer.width)
    if config.softcap is not None:
        writer.add_final_logit_softcapping(config.softcap)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--head-bits", type=int, choices=(4, 8), default=8)
    parser.add_argument("--size", choices=TARGETS, default="E2B")
    arguments = parser.parse_args()
    write_gguf(arguments.file, arguments.head_bits, arguments.size)


if __name__ == "__main__":
    main()
