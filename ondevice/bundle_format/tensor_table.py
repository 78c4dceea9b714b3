"""The tensor tables of a bundle: name, shape, format, file offset and size of every tensor, and their checks.

A bundle has one table per graph (`bundle.json`, field `tensors`). The configuration determines which tensors a model
has and their shapes (`target_shapes`, `drafter_shapes`, `heads_shapes`). The exporter reads exactly these from a
checkpoint. Engines compare a table with them (`check_tables`) before they read a tensor or allocate memory for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from ondevice.bundle_format.checks import InvalidFieldError, check_number, require
from ondevice.bundle_format.decoder import Attention, Block, FeedForward, GatedDelta, Layer, ShortConvolution
from ondevice.bundle_format.model_config import DrafterEntry, HeadsEntry, HeadsKind, Target
from ondevice.bundle_format.weight_format import (
    BFLOAT16,
    BY_ROW,
    FLOAT32,
    IN_GROUPS,
    INT4_AFFINE,
    INT4_TABLE,
    MXFP4,
    WeightFormat,
)

Shapes = dict[str, tuple[int, ...]]
"""Tensor name -> shape."""

EMBEDDING, HEAD, PLE_TABLE = "embed_tokens.weight", "lm_head.weight", "embed_tokens_per_layer.weight"
FINAL_NORM = "norm.weight"
"""Tensors of the target. `HEAD` exists only if the head is not tied to the token embedding."""

DRAFTER_EMBEDDING = "model.embed_tokens.weight"
"""The drafter's head, unless its rows are the target's; with a centroid head they are in the order of the clusters. The
drafter embeds tokens with the target's token embedding."""

DRAFTER_CENTROIDS, DRAFTER_ORDERING = "masked_embedding.centroids.weight", "masked_embedding.token_ordering"
CENTROIDS, ORDERING = "shortlist.centroids.weight", "shortlist.token_ordering"
"""Tensors of a drafter and of heads that score a shortlist: one centroid per cluster, and the token ids in the order of
the clusters."""

DRAFTER_TOKENS = "masked_embedding.head_tokens"
"""Tensor of a drafter whose head is the target's rows of some tokens: their ids. A head of all rows needs none."""

MTP = "mtp."
MTP_EMBEDDING, MTP_HIDDEN = "mtp.embedding_projection.weight", "mtp.hidden_projection.weight"
"""How the names of the target's tensors for an MTP layer begin, and those of its projections of tokens and states."""

VISION = ("vision_tower.", "vision_embedder.", "embed_vision.")
AUDIO = ("audio_tower.", "embed_audio.")
"""How the names of the towers' tensors begin."""

TOWER_LINEAR = ".linear.weight"
"""How the names of a tower's linear layers end, the only tensors of a tower that may be quantised: to 8 bits with a
scale per row. Rows may have any width, because only ONNX Runtime reads them.
"""

ALIGNMENT = 64
"""Alignment of tensors in a data file, in bytes: a cache line, and the widest vector register."""

Format = Literal["int2", "int4", "int4-table", "mxfp4", "int8", "bfloat16", "float32", "int64"]

_BITS: dict[Format, int] = {
    "int2": 2, "int4": 4, "int4-table": 4, "mxfp4": 4, "int8": 8, "bfloat16": 16, "float32": 32, "int64": 64,
}  # fmt: skip
_TABLES: dict[Format, int] = {"int4-table": INT4_TABLE.table, "mxfp4": MXFP4.table}


@dataclass(frozen=True)
class Scales:
    """The scales or minimums of a quantised tensor, [rows, scales per row]; their offset and size are in bytes."""

    dtype: Literal["float32", "float16"]
    offset: int
    bytes: int


@dataclass(frozen=True)
class Tensor:
    """A tensor in a data file: plain numbers, or codes with scales. Codes are packed with the lowest bits first.

    Attributes:
        shape: [rows, width] for a matrix, [experts, rows, width] for the experts of a layer.
        format: format of one number or code.
        offset: offset of the first byte in the file.
        bytes: size without scales.
        block: number of neighbouring weights in a row that share a scale; 0 if the whole row shares one.
        scales: None for plain numbers.
        minimums: the weights of code 0 in an affine format, of the scales' dtype and shape; None in others.
        input_step: static scale s of the matrix's input x, which becomes clamp(round(x / s), -128, 127) * s; 0 if the
            matrix has none.
        output_step: static scale of the matrix's output, in the same form.
    """

    shape: tuple[int, ...]
    format: Format
    offset: int
    bytes: int
    block: int = 0
    scales: Scales | None = None
    input_step: float = 0.0
    output_step: float = 0.0
    minimums: Scales | None = None

    @property
    def weight_format(self) -> WeightFormat:
        affine, table = self.minimums is not None, _TABLES.get(self.format, 0)
        return WeightFormat(_BITS[self.format], self.block, affine, table)

    @property
    def scale_shape(self) -> tuple[int, int]:
        """Shape of the scales, [rows, scales per row]; all dimensions of `shape` but the last count as rows."""
        return math.prod(self.shape[:-1]), self.weight_format.scales(self.shape[-1])


@dataclass(frozen=True)
class TensorTable:
    """The tensors of one graph by name. All lie in one data file, `file`."""

    file: str
    tensors: dict[str, Tensor]


def check_tables(tables: Mapping[str, TensorTable], expected: Mapping[str, Shapes], sizes: Mapping[str, int]) -> None:
    """Check every tensor table of a bundle.

    Args:
        tables: graph -> its table.
        expected: graph -> the shapes that follow from the configuration.
        sizes: file name -> size in bytes, for all files of the bundle.

    Raises:
        InvalidFieldError: a table or tensor is missing or unknown, has the wrong shape, has a format that is not
            allowed for it, is not aligned, overlaps another tensor, or lies outside its file.
    """
    for graph in sorted(tables.keys() ^ expected.keys()):
        raise InvalidFieldError(f"tensors of {graph!r:.99} are {'unknown' if graph in tables else 'missing'}")
    ranges: dict[str, list[tuple[int, int, str]]] = {}
    for graph, table in tables.items():
        for name in sorted(table.tensors.keys() ^ expected[graph].keys()):
            unknown = name in table.tensors
            raise InvalidFieldError(f"tensor {name!r:.99} of {graph} is {'unknown' if unknown else 'missing'}")
        require(table.file in sizes, f"the tensors of {graph} lie in {table.file!r:.99}, which is not listed")
        for name, tensor in table.tensors.items():
            require(
                tensor.shape == expected[graph][name],
                f"tensor {name} has shape {list(tensor.shape)!s:.99}, the configuration asks for "
                f"{list(expected[graph][name])}",
            )
            _check_format(name, tensor)
            ranges.setdefault(table.file, []).extend(_ranges(name, tensor))
    for file, found in ranges.items():
        end = 0
        for offset, size, name in sorted(found):
            require(offset % ALIGNMENT == 0, f"tensor {name} lies at the odd offset {offset!s:.99} of {file}")
            require(offset >= end, f"tensor {name} overlaps another in {file}")
            end = offset + size
            require(end <= sizes[file], f"tensor {name} lies outside {file}, which has {sizes[file]} bytes")


def target_shapes(target: Target) -> Shapes:
    """Names and shapes of the target's tensors."""
    shapes: Shapes = {EMBEDDING: (target.vocab_size, target.hidden_size)}
    if not target.tied:
        shapes[HEAD] = (target.vocab_size, target.hidden_size)
    shapes[FINAL_NORM] = (target.hidden_size,)
    for index, layer in enumerate(target.layers):
        own = layer_shapes(layer, target.hidden_size)
        shapes |= {f"layers.{index}.{name}": shape for name, shape in own.items()}
    if target.per_layer is not None:
        width = target.per_layer.width
        packed = len(target.layers) * width
        shapes[PLE_TABLE] = (target.per_layer.vocab_size, packed)
        shapes["per_layer_model_projection.weight"] = (packed, target.hidden_size)
        shapes["per_layer_projection_norm.weight"] = (width,)
    if target.mtp is not None:
        shapes |= _mtp_shapes(target.mtp, target.hidden_size)
    return shapes


def _mtp_shapes(own: Attention, hidden: int) -> Shapes:
    """Names and shapes of the tensors that make keys and values for an MTP layer."""
    shapes: Shapes = {MTP_EMBEDDING: (hidden, hidden), MTP_HIDDEN: (hidden, hidden)}
    shapes |= {f"{MTP}{name}_norm.weight": (hidden,) for name in ("embedding", "hidden")}
    shapes[f"{MTP}{NORMS['attention'][0]}.weight"] = (hidden,)
    parts = ("k_proj", "v_proj", "k_norm")
    every = _attention_shapes(own, hidden).items()
    return shapes | {MTP + name: shape for name, shape in every if name.split(".")[1] in parts}


def drafter_shapes(drafter: DrafterEntry, target: Target) -> Shapes:
    """Names and shapes of the drafter's tensors."""
    hidden, backbone = drafter.hidden_size, target.hidden_size
    shapes: Shapes = {"model.norm.weight": (hidden,)}
    if not drafter.target_head:
        shapes[DRAFTER_EMBEDDING] = (target.vocab_size, hidden)
    elif drafter.candidates < target.vocab_size:
        shapes[DRAFTER_TOKENS] = (drafter.candidates,)
    for index, layer in enumerate(drafter.layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer_shapes(layer, hidden).items()}
    if target.mtp is None:
        shapes["pre_projection.weight"] = (hidden, 2 * backbone)
        shapes["post_projection.weight"] = (backbone, hidden)
    if drafter.shortlist is not None:
        shapes[DRAFTER_CENTROIDS] = (drafter.shortlist.clusters, hidden)
        shapes[DRAFTER_ORDERING] = (target.vocab_size,)
    return shapes


def heads_shapes(heads: HeadsEntry, target: Target) -> Shapes:
    """Names and shapes of the tensors of heads of one kind. The rows that score tokens are the target's."""
    hidden, offsets = target.hidden_size, heads.offsets
    own: dict[HeadsKind, Shapes] = {
        "medusa": {"medusa.blocks.weight": (offsets * hidden, hidden)},
        "exit": {"exit.norm.weight": (hidden,), "exit.block.weight": (hidden, hidden)},
        "blockwise": {
            "blockwise.inner.weight": (heads.width, hidden),
            "blockwise.outer.weight": (offsets * hidden, heads.width),
            "blockwise.norm.weight": (hidden,),
        },
    }
    shapes = own[heads.kind]
    if heads.shortlist is not None:
        shapes |= {CENTROIDS: (heads.shortlist.clusters, hidden), ORDERING: (target.vocab_size,)}
    return shapes


def is_table(name: str) -> bool:
    """Whether a matrix is an embedding table, whose rows are read individually."""
    return name.endswith((EMBEDDING, PLE_TABLE))


def is_plain(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor stays float32 in every weight format: norms, scalars, biases, routers, taps of convolutions, the
    drafter's centroids, and of towers all but their linear layers.
    """
    if is_of_tower(name):
        return not name.endswith(TOWER_LINEAR)
    ends = ("router.proj.weight", "_bias", CONVOLUTION_TAPS, DELTA_TAPS, *DELTA_GATES, DRAFTER_CENTROIDS)
    return len(shape) == 1 or name.endswith(ends)


def is_of_tower(name: str) -> bool:
    """Whether a tensor is the vision or the audio tower's."""
    return name.startswith((*VISION, *AUDIO))


CONVOLUTION_TAPS = "conv.conv.weight"
"""How the names of convolutions' taps end, [channels, window], the one of a row's own position last."""

DELTA_TAPS, DELTA_GATES = "delta.taps.weight", ("delta.b.weight", "delta.a.weight")
"""How the names of some tensors of a `GatedDelta` end: its taps, [channels, window], and its projections to b and a,
[value_heads, H]."""

NORMS: dict[str, tuple[str, str]] = {
    "attention": ("input_layernorm", "post_attention_layernorm"),
    "short_convolution": ("input_layernorm", "post_attention_layernorm"),
    "gated_delta": ("input_layernorm", "post_attention_layernorm"),
    "feed_forward": ("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    "layer_embedding": ("pre_per_layer_input_norm", "post_per_layer_input_norm"),
}
"""Type of a block's body -> names of the norms before and after it, without `.weight`."""


def layer_shapes(layer: Layer, hidden: int) -> Shapes:
    """Names, without the layer's prefix, and shapes of the tensors of a layer of the target or the drafter."""
    shapes = {name: shape for block in layer.blocks for name, shape in _block_shapes(block, hidden).items()}
    return shapes | {"layer_scalar": (1,)} if layer.scalar else shapes


def _block_shapes(block: Block, hidden: int) -> Shapes:
    body, norms = block.body, NORMS[block.body.type]
    shapes: Shapes = {f"{norms[0]}.weight": (hidden,)} if block.norm_in else {}
    if isinstance(body, Attention):
        shapes |= _attention_shapes(body, hidden)
    elif isinstance(body, ShortConvolution):
        shapes["conv.in_proj.weight"] = (3 * body.channels, hidden)
        shapes[CONVOLUTION_TAPS] = (body.channels, body.window)
        shapes["conv.out_proj.weight"] = (hidden, body.channels)
    elif isinstance(body, GatedDelta):
        shapes |= _delta_shapes(body, hidden)
    elif isinstance(body, FeedForward):
        shapes |= _feed_forward_shapes(body, hidden)
    else:
        shapes["per_layer_input_gate.weight"] = (body.width, hidden)
        shapes["per_layer_projection.weight"] = (hidden, body.width)
    return shapes | {f"{norms[1]}.weight": (hidden,)} if block.norm_out else shapes


def _delta_shapes(body: GatedDelta, hidden: int) -> Shapes:
    return {
        "delta.qkv.weight": (body.channels, hidden),
        "delta.z.weight": (body.value_width, hidden),
        **dict.fromkeys(DELTA_GATES, (body.value_heads, hidden)),
        DELTA_TAPS: (body.channels, body.window),
        "delta.decay": (body.value_heads,),
        "delta.dt_bias": (body.value_heads,),
        "delta.scale": (body.value_dim,),
        "delta.out.weight": (hidden, body.value_width),
    }


def _attention_shapes(body: Attention, hidden: int) -> Shapes:
    projections = {"q_proj": body.query_width}
    if body.kv_source is None:
        projections |= {"k_proj": body.kv_width} if body.k_eq_v else {"k_proj": body.kv_width, "v_proj": body.kv_width}
    shapes: Shapes = {f"self_attn.{name}.weight": (rows, hidden) for name, rows in projections.items()}
    if body.bias:
        shapes |= {f"self_attn.{name}.bias": (rows,) for name, rows in projections.items()}
    norms = {"q_norm": body.query_width, "k_norm": body.kv_width}
    shapes |= {
        f"self_attn.{name}.weight": (width if body.whole_norms else body.head_dim,)
        for name, width in norms.items()
        if getattr(body, name)
    }
    if body.output_bias:
        shapes["self_attn.o_proj.bias"] = (hidden,)
    if body.sinks:
        shapes["self_attn.sinks"] = (body.heads,)
    if body.gated:
        shapes["self_attn.gate_proj.weight"] = (body.query_width, hidden)
    return shapes | {"self_attn.o_proj.weight": (hidden, body.query_width)}


def _feed_forward_shapes(body: FeedForward, hidden: int) -> Shapes:
    shapes: Shapes = {}
    if body.width:
        shapes["mlp.gate_proj.weight"] = shapes["mlp.up_proj.weight"] = (body.width, hidden)
        shapes["mlp.down_proj.weight"] = (hidden, body.width)
    if body.experts is not None:
        count, inner = body.experts.count, body.experts.intermediate_size
        shapes["router.proj.weight"] = (count, hidden)
        shapes["experts.gate_up_proj"] = (count, 2 * inner, hidden)
        shapes["experts.down_proj"] = (count, hidden, inner)
        if body.experts.selection_bias:
            shapes["router.selection_bias"] = (count,)
        if body.experts.bias:
            shapes["router.proj.bias"] = (count,)
            shapes["experts.gate_up_proj_bias"] = (count, 2 * inner)
            shapes["experts.down_proj_bias"] = (count, hidden)
        if body.shared and body.shared_gate:
            shapes["mlp.shared_gate.weight"] = (hidden,)
        if body.normed:
            shapes["router.scale"] = (hidden,)
            shapes["router.per_expert_scale"] = (count,)
            shapes["pre_feedforward_layernorm_2.weight"] = (hidden,)
            shapes["post_feedforward_layernorm_1.weight"] = (hidden,)
            shapes["post_feedforward_layernorm_2.weight"] = (hidden,)
    return shapes


def _check_format(name: str, tensor: Tensor) -> None:
    """Check the format of a tensor, and its sizes in bytes, which follow from shape and format.

    Raises:
        InvalidFieldError: a size is wrong, or no tensor with this name and shape may have the format.
    """
    form, width, numbers = tensor.weight_format, tensor.shape[-1], math.prod(tensor.shape)
    for size in (numbers, tensor.block, tensor.offset, tensor.bytes):
        check_number(f"a size of tensor {name}", size, 1 << 62, least=0)
    steps = tensor.input_step, tensor.output_step
    require(all(math.isfinite(step) and step >= 0 for step in steps), f"tensor {name} has the steps {steps}")
    if name in (ORDERING, DRAFTER_ORDERING, DRAFTER_TOKENS):
        known = form == WeightFormat(_BITS["int64"])
    elif is_plain(name, tensor.shape):
        known = form == FLOAT32
    elif is_of_tower(name):
        known = form in (FLOAT32, BY_ROW[8])
    elif is_table(name):
        blocks = form.quantised and form.group % 32 == 0 and width % max(form.group, 32) == 0
        even = blocks and form.bits in BY_ROW and not (form.affine or form.table)
        known = form in (FLOAT32, BFLOAT16, INT4_AFFINE, INT4_TABLE, MXFP4) or even
    else:
        known = form in (FLOAT32, BFLOAT16, *IN_GROUPS, *BY_ROW.values())
    minimums = " with minimums" if form.affine else ""
    require(known, f"tensor {name} is {tensor.format} in blocks of {tensor.block}{minimums}")
    require(not any(steps) or (form in BY_ROW.values() and not is_table(name)), f"tensor {name} has the steps {steps}")
    scales, mismatch = tensor.scales, "without" if form.quantised else "with"
    require((scales is not None) == form.quantised, f"tensor {name} is {tensor.format}, {mismatch} scales")
    require(tensor.bytes * 8 == numbers * form.bits, f"tensor {name} has {tensor.bytes} bytes")
    if scales is None:
        return
    require(width % 32 == 0 or is_of_tower(name), f"tensor {name} has rows of {width} weights, no multiple of 32")
    size = math.prod(tensor.scale_shape) * (4 if scales.dtype == "float32" else 2)
    for part, found in _factors(tensor).items():
        require(found.dtype == "float32" or name == PLE_TABLE, f"tensor {name} has {part} of {found.dtype}")
        require(found.dtype == scales.dtype, f"tensor {name} has {part} of {found.dtype}, scales of {scales.dtype}")
        check_number(f"the {part}' offset of tensor {name}", found.offset, 1 << 62, least=0)
        require(found.bytes == size, f"the {part} of tensor {name} have {found.bytes} bytes instead of {size}")


def _factors(tensor: Tensor) -> dict[str, Scales]:
    """The scales and minimums that a tensor has, by their name for messages."""
    parts = {"scales": tensor.scales, "minimums": tensor.minimums}
    return {name: part for name, part in parts.items() if part is not None}


def _ranges(name: str, tensor: Tensor) -> Iterator[tuple[int, int, str]]:
    """Yield offset, size in bytes and a name for messages: of the codes, then of the scales and minimums if any."""
    yield tensor.offset, tensor.bytes, name
    for part, found in _factors(tensor).items():
        yield found.offset, found.bytes, f"{name} (its {part})"
