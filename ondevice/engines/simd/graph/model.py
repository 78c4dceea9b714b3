"""The target and the drafter as dataclasses of layers, matrices and norms, read from ONNX graphs, all shapes checked.

Names: H is the width of the hidden state, T the rows of a forward; weights are [rows, width], applied as x @ weight.T.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ondevice.contract import AttentionKind
from ondevice.weight_format import WeightFormat

Floats = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Matrix:
    """A matrix [rows, width], its codes packed low bits first."""

    codes: NDArray[np.uint8]
    """uint8[rows, bytes of width weights]"""
    scales: Floats
    """float32[rows, scales of width weights]"""
    format: WeightFormat
    input_step: float = 0.0
    """The static scale s of its input, which becomes clamp(round(x / s), -128, 127) * s; 0 for none."""
    output_step: float = 0.0
    """The same of its output."""

    @property
    def rows(self) -> int:
        return int(self.codes.shape[0])

    @property
    def width(self) -> int:
        return int(self.codes.shape[1]) * 8 // self.format.bits

    def joins(self, other: Matrix) -> bool:
        """Whether both can be one matrix with all their rows, of one input."""
        mine, theirs = (self.width, self.format, self.input_step), (other.width, other.format, other.input_step)
        return mine == theirs


@dataclass(frozen=True, eq=False)
class Table:
    """A table [entries, width] read row by row, its codes packed low bits first."""

    codes: NDArray[np.uint8]
    """uint8[entries, bytes of width numbers]"""
    scales: NDArray[Any]
    """float32 or float16 [entries, scales of width numbers]"""
    format: WeightFormat

    @property
    def entries(self) -> int:
        return int(self.codes.shape[0])

    @property
    def width(self) -> int:
        return int(self.codes.shape[1]) * 8 // self.format.bits


@dataclass(frozen=True, eq=False)
class Attention:
    """Self-attention of a layer, without its input norm."""

    kind: AttentionKind
    query_heads: int
    kv_heads: int
    head_dim: int
    frequencies: Floats
    """Rotary frequencies, float32[head_dim / 2]: a pair of numbers is rotated by its frequency times the position."""
    query: Matrix
    query_norm: Floats
    output: Matrix
    new: NewKeyValue | None
    """How its keys and values are made; None where it reads another layer's cache."""
    source: int
    """Index of the target's layer whose cache it reads."""


@dataclass(frozen=True, eq=False)
class NewKeyValue:
    """Projections and head norms of the keys and values that a layer writes into its own cache."""

    key: Matrix
    key_norm: Floats
    value: Matrix | None
    """None where values are the key projection's output, normed."""
    value_norm: Floats


@dataclass(frozen=True, eq=False)
class PerLayer:
    """Per-layer embedding of one layer: h += norm(projection(gelu(gate(h)) * slice))."""

    index: int
    """The layer's slice of `PerLayerInputs`."""
    gate: Matrix
    projection: Matrix
    norm: Floats


@dataclass(frozen=True, eq=False)
class Experts:
    """Feed-forward blocks beside the dense one, of which every row takes the `top` that a router chooses:

    dense_norm(dense) + norm(sum of weight * expert(pre_norm(h))) takes the dense block's place. An expert's score is
    router @ (h / its RMS); its weight is the softmax of the scores of those that were chosen, times its `scale`.
    """

    router: Floats
    """float32[experts, width], times the weight of its norm"""
    scale: Floats
    """float32[experts]"""
    top: int
    pre_norm: Floats
    gate_up: tuple[Matrix, ...]
    """Of each expert, [2 * inner, width]: the rows of its gate, then those of up."""
    down: tuple[Matrix, ...]
    """Of each expert, [width, inner]."""
    norm: Floats
    dense_norm: Floats


@dataclass(frozen=True, eq=False)
class DecoderLayer:
    """One layer of the target or the drafter:

    h += post_attention_norm(attention(input_norm(h)))
    h += post_norm(down(gelu(gate(pre_norm(h))) * up(pre_norm(h)))), with `experts` where there are any
    h += per_layer(h), where there is one
    h *= scalar
    """

    input_norm: Floats
    attention: Attention
    post_attention_norm: Floats
    pre_norm: Floats
    gate: Matrix
    up: Matrix
    down: Matrix
    post_norm: Floats
    per_layer: PerLayer | None
    scalar: float
    experts: Experts | None = None


@dataclass(frozen=True, eq=False)
class PerLayerInputs:
    """Per-layer embeddings of all layers, float32[T, layers, size]:

    (norm(projection(embedded) * context_factor) + table[id] * row_factor) * factor
    """

    projection: Matrix
    norm: Floats
    layers: int
    table: Table
    context_factor: float
    row_factor: float
    factor: float

    @property
    def size(self) -> int:
        return self.table.width // self.layers


@dataclass(frozen=True, eq=False)
class TargetModel:
    """The target: table[id] * embedding_factor, the layers, the norm, the head, the softcap."""

    table: Table
    embedding_factor: float
    per_layer: PerLayerInputs | None
    layers: tuple[DecoderLayer, ...]
    first_shared_layer: int
    """Index of the first layer that reads another's cache: from there on only the wanted rows are computed."""
    norm: Floats
    head: Matrix
    cap: float | None
    """Softcap: logits are cap * tanh(logits / cap)."""
    eps: float

    @property
    def width(self) -> int:
        """H."""
        return self.table.width


@dataclass(frozen=True, eq=False)
class Centroids:
    """A drafter's head that scores only the tokens of the `top` clusters whose centroids score best."""

    weights: Floats
    """Centroids, float32[clusters, width]"""
    top: int
    per_cluster: int
    table: Table
    """The head's rows cluster by cluster, [clusters, per_cluster * width]"""
    ids: NDArray[np.int64]
    """Their tokens, int64[clusters, per_cluster]"""


@dataclass(frozen=True, eq=False)
class DrafterModel:
    """One step of the MTP drafter.

    h = pre_projection(concat(table[id] * embedding_factor, hidden)), the layers over the target's caches, the norm;
    the head scores the result, and post_projection makes the next step's `hidden` of it.
    """

    table: Table
    embedding_factor: float
    pre_projection: Matrix
    layers: tuple[DecoderLayer, ...]
    norm: Floats
    head: Centroids | Matrix
    post_projection: Matrix
    eps: float


@dataclass(frozen=True, eq=False)
class Shortlist:
    """What heads score: the tokens of the `top` clusters whose centroids score best, by the target's own rows."""

    centroids: Matrix
    """[clusters, H]"""
    top: int
    per_cluster: int
    ids: NDArray[np.int64]
    """The clusters' tokens, int64[clusters, per_cluster]"""


@dataclass(frozen=True, eq=False)
class HeadsModel:
    """Heads of one kind, on a hidden state h [H].

    x = entry_norm(h); u[j] = norm(x + f(outer(g(inner(x)))[j])), where f is SiLU or nothing and g ReLU; the target's
    projection scores u [k, H].
    """

    kind: str
    offsets: int
    """k"""
    entry_norm: Floats | None
    inner: Matrix | None
    """[F, H]; without one `outer` reads x itself."""
    outer: Matrix
    """[k * H, F or H]"""
    gated: bool
    """Whether f is SiLU."""
    norm: Floats | None
    shortlist: Shortlist | None
    """None where the whole vocabulary is scored."""
    eps: float
