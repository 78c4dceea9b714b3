"""Write GGUF files for llama.cpp with the shapes or the weights of the bundles that are measured.

    python -m benchmarks.bundles.gguf_files shape FILE [--size E2B] [--head-bits 4]
    python -m benchmarks.bundles.gguf_files widened FILE [--drafter FILE] [--head-bits 4] [--size E2B|small]
    python -m benchmarks.bundles.gguf_files tower FILE

`shape` is the random bundle of `benchmarks.bundles.shape`: the same shapes, the same noise, blocks of the same bits.
Matrices are Q4_0, the same as in the bundle: int4 in blocks of 32 with an fp16 scale. The head, which is also the token
embedding, is Q8_0 or Q4_0. The vocabulary has a size but no tokens: llama-bench draws token ids and needs no text.

`widened` has the weights of `benchmarks.bundles.widened`, target and MTP drafter, with the bundle's own codes: layers
of the target are Q4_0 and those of the drafter Q8_0, quantised by the exporter. Two differences stay. llama.cpp scores
the whole vocabulary for every MTP token, as it makes no use of the token clusters of Gemma 4's drafter. And it knows no
tokenizer that splits text as the pair's does: the files have the pair's tokens and merges, which give the right text
for token ids, but prompts have to be token ids.

`tower` is E2B's vision tower for `--mmproj`, random in Q8_0, without the bounds of clipped linear layers; the names are
those of llama.cpp's `Gemma4VisionAudioModel`.

The `gguf` package writes them all.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from benchmarks.bundles.gemma4 import E2B_VISION, TARGETS
from benchmarks.bundles.random_checkpoints import noise
from benchmarks.bundles.shape import target_model
from benchmarks.bundles.widened import SIZES, widened
from benchmarks.command import command_line, run_command
from ondevice.bundle import TOKENIZER
from ondevice.bundle_format.decoder import Decoder
from ondevice.bundle_format.model_config import DrafterEntry, Target
from ondevice.bundle_format.tensor_table import DRAFTER_CENTROIDS, DRAFTER_ORDERING
from ondevice.bundle_format.weight_format import INT4, INT8
from ondevice_export.checkpoint import vision
from ondevice_export.checkpoint.directory import Checkpoint
from ondevice_export.checkpoint.models import DrafterCheckpoint, TargetCheckpoint
from ondevice_export.families.gemma4 import DEFAULTS
from ondevice_export.quantize import quantize

try:
    import gguf
    from gguf import GGMLQuantizationType as Kind
except ModuleNotFoundError:
    raise SystemExit("a GGUF file is written by the gguf package: pip install gguf") from None

ARCHITECTURE = gguf.MODEL_ARCH.GEMMA4
DRAFTER = "gemma4-assistant"
"""llama.cpp's name of the drafter's architecture, which gguf 0.19 does not know."""

HEAD = "model.embed_tokens.weight"
HEAD_KINDS = {4: Kind.Q4_0, 8: Kind.Q8_0}
THETAS = DEFAULTS["rope_parameters"]
"""The rotary embeddings of Gemma 4."""
STILL = 1e30
"""Divisor of the frequencies without rotation (llama.cpp, `Gemma4Model.generate_extra_tensors`)."""

CHUNK_WEIGHTS = 1 << 22
"""Weights that are quantised at a time."""

_SCALES = {"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"}
_DRAFTER_NAMES = {
    "pre_projection.weight": "nextn.pre_projection.weight",
    "post_projection.weight": "nextn.post_projection.weight",
}
"""Tensor names that the gguf package does not map, of a layer and of the drafter."""
_UNREAD = (DRAFTER_CENTROIDS, DRAFTER_ORDERING)

TOWER_NAMES = {
    "patch_embedder.input_proj.weight": "v.patch_embd.weight",
    "patch_embedder.position_embedding_table": "v.position_embd.weight",
    "embedding_projection.weight": "mm.input_projection.weight",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_out",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "ln1",
    "post_attention_layernorm": "attn_post_norm",
    "pre_feedforward_layernorm": "ln2",
    "post_feedforward_layernorm": "ffn_post_norm",
}
"""transformers' name within a layer or an embedder -> llama.cpp's."""


@dataclass(frozen=True)
class WrittenTensor:
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


def write_shape(path: Path, size: str, head_bits: int) -> None:
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
        tensors.append(WrittenTensor(own_name(name, names), shape, kind, partial(noise_of, shape, kind, blocks)))
    write_file(writer, [rope_divisors(config), *tensors])


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
        tensors.append(WrittenTensor(own_name(name, names), shape, kind, partial(_data, target.checkpoint, name, kind)))
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
            tensors.append(WrittenTensor(own, shape, kind, partial(_data, drafter.checkpoint, name, kind)))
    write_file(writer, [rope_divisors(drafter.config), *tensors])


def write_tower(path: Path) -> None:
    """Write the random tower; an older file there is replaced."""
    with tempfile.TemporaryDirectory() as directory:
        shapes = vision.checkpoint_shapes(E2B_VISION, target_model("E2B", Path(directory)).config, clipped=False)
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_name("gemma-4-E2B-shape")
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_vision_projector_type("gemma4v")
    writer.add_vision_image_size(224)
    writer.add_vision_patch_size(E2B_VISION.patch)
    writer.add_vision_embedding_length(E2B_VISION.hidden_size)
    writer.add_vision_feed_forward_length(E2B_VISION.intermediate_size)
    writer.add_vision_block_count(E2B_VISION.layers)
    writer.add_vision_head_count(E2B_VISION.query_heads)
    writer.add_vision_attention_layernorm_eps(E2B_VISION.norm_eps)
    writer.add_vision_projection_dim(shapes["model.embed_vision.embedding_projection.weight"][0])
    writer.add_vision_image_mean([0.0, 0.0, 0.0])
    writer.add_vision_image_std([1.0, 1.0, 1.0])
    writer.add_vision_use_gelu(True)
    blocks = {Kind.Q8_0: gguf.quantize(noise(), Kind.Q8_0)}
    tensors = []
    for name, shape in shapes.items():
        own = tower_name(name)
        stored = (shape[0], 3, E2B_VISION.patch, E2B_VISION.patch) if own == "v.patch_embd.weight" else shape
        kind = Kind.Q8_0 if len(stored) == 2 else Kind.F32
        tensors.append(WrittenTensor(own, stored, kind, partial(noise_of, stored, kind, blocks)))
    write_file(writer, tensors)


def write_file(writer: Any, tensors: Sequence[WrittenTensor]) -> None:
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


def rope_divisors(config: Target | DrafterEntry) -> WrittenTensor:
    """float32[head_dim / 2]: 1 for the full layers' frequencies that turn."""
    own = next(own for own in config.attention if own.kind == "full")
    frequencies = config.frequencies()[own.rotary or 0]
    half, turning = len(frequencies), int(np.count_nonzero(frequencies))
    divisors = np.repeat(np.array([1, STILL], np.float32), [turning, half - turning])
    return WrittenTensor("rope_freqs.weight", divisors.shape, Kind.F32, lambda: [divisors])


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


def _head_dim(config: Decoder, kind: str) -> int:
    return next(own.head_dim for own in config.attention if own.kind == kind)


def describe(writer: Any, config: Target | DrafterEntry, target: Target) -> None:
    """The metadata that llama.cpp's `llama_model_gemma4::load_arch_hparams` and its base class read.

    Args:
        config: of the model in the file: the target itself, or its drafter.
    """
    writer.add_context_length(target.context_length)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(len(config.layers))
    writer.add_feed_forward_length([layer.feed_forward.width for layer in config.layers])
    writer.add_head_count(config.attention[0].heads)
    writer.add_head_count_kv([own.kv_heads for own in config.attention])
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_sliding_window(target.window)
    writer.add_sliding_window_pattern([own.kind == "sliding" for own in config.attention])
    if isinstance(config, Target):
        _describe_target(writer, config)
    else:
        writer.add_shared_kv_layers(len(config.layers))
    full, sliding = _head_dim(config, "full"), _head_dim(config, "sliding")
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


def tower_name(name: str) -> str:
    """llama.cpp's name of a tensor."""
    if ".layers." not in name:
        return next(own for part, own in TOWER_NAMES.items() if name.endswith(part))
    layer, part = name.split(".layers.")[1].split(".", 1)
    return f"v.blk.{layer}.{TOWER_NAMES[part.removesuffix('.weight').removesuffix('.linear')]}.weight"


def main() -> None:
    parser = command_line(__doc__)
    kinds = parser.add_subparsers(dest="kind", required=True)
    shape, widest, tower = (kinds.add_parser(name) for name in ("shape", "widened", "tower"))
    for each in (shape, widest, tower):
        each.add_argument("file", type=Path)
    for each, sizes in ((shape, TARGETS), (widest, SIZES)):
        each.add_argument("--size", choices=sizes, default="E2B")
        each.add_argument("--head-bits", type=int, choices=tuple(HEAD_KINDS), default=8)
    widest.add_argument("--drafter", type=Path, metavar="FILE", help="write the MTP drafter to this file")
    arguments = parser.parse_args()
    if arguments.kind == "tower":
        write_tower(arguments.file)
    elif arguments.kind == "shape":
        write_shape(arguments.file, arguments.size, arguments.head_bits)
    else:
        with widened(arguments.size) as pair:
            write_target(arguments.file, pair.target, arguments.head_bits)
            if arguments.drafter is not None:
                write_drafter(arguments.drafter, pair.drafter, pair.target, arguments.head_bits)


if __name__ == "__main__":
    run_command(main)
