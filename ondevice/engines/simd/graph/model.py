"""What a bundle's graphs compute, as the kernels see it: the weights of each part, all shapes checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ondevice.contract import AttentionKind

Floats = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Matrix:
    """A quantised matrix [rows, width]: `com.microsoft.MatMulNBits`."""

    codes: NDArray[np.uint8]
    """[rows, width / 32, 4 * bits]"""
    scales: Floats
    """[rows, width / 32]"""
    bits: int

    @property
    def rows(self) -> int:
        return int(self.codes.shape[0])

    @property
    def width(self) -> int:
        return int(self.codes.shape[1]) * 32


@dataclass(frozen=True, eq=False)
class Table:
    """A quantised table [entries, width] whose rows are read one by one: `com.microsoft.GatherBlockQuantized`."""

    codes: NDArray[np.uint8]
    """[entries, width * bits / 8]"""
    scales: NDArray[Any]
    """float32 or float16 [entries, width / 32]"""
    bits: int

    @property
    def entries(self) -> int:
        return int(self.codes.shape[0])

    @property
    def width(self) -> int:
        return int(self.scales.shape[1]) * 32


@dataclass(frozen=True, eq=False)
class Attention:
    kind: AttentionKind
    query_heads: int
    kv_heads: int
    head_dim: int
    frequencies: Floats
    """[head_dim / 2]: the rotation's angle per position."""
    query: Matrix
    query_norm: Floats
    output: Matrix
    new: NewRows | None
    """None where the layer reads another's cache."""
    source: int
    """The layer whose cache it reads; in a drafter, of no meaning."""


@dataclass(frozen=True, eq=False)
class NewRows:
    """What a layer writes into its own cache."""

    key: Matrix
    key_norm: Floats
    value: Matrix | None
    """None where values are made of the key projection's output."""
    value_norm: Floats


@dataclass(frozen=True, eq=False)
class PerLayer:
    """A layer's own embedding: h += norm(projection(gelu(gate(h)) * slice))."""

    index: int
    """Which slice."""
    gate: Matrix
    projection: Matrix
    norm: Floats


@dataclass(frozen=True, eq=False)
class Layer:
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


@dataclass(frozen=True, eq=False)
class PerLayerInputs:
    """(norm(projection(embedded) * context_factor) + table(id) * row_factor) * factor, [T, layers, size]."""

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
    table: Table
    embedding_factor: float
    per_layer: PerLayerInputs | None
    layers: tuple[Layer, ...]
    seam: int
    """The first layer that runs on the wanted rows alone."""
    norm: Floats
    head: Matrix
    cap: float | None
    eps: float

    @property
    def width(self) -> int:
        return self.table.width


@dataclass(frozen=True, eq=False)
class Centroids:
    """A head that scores the best clusters' tokens only; its rows lie in the order of clusters."""

    weights: Floats
    """[clusters, width]"""
    top: int
    per_cluster: int
    table: Table
    """One row per token, [clusters * per_cluster, width]"""
    ids: NDArray[np.int64]
    """[clusters, per_cluster]"""


@dataclass(frozen=True, eq=False)
class DrafterModel:
    table: Table
    embedding_factor: float
    pre_projection: Matrix
    layers: tuple[Layer, ...]
    norm: Floats
    head: Centroids | Matrix
    post_projection: Matrix
    eps: float
