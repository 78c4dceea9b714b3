"""Positions and masks of the token rows that run through layers together: all new rows, or the wanted ones."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from ondevice.contract import AttentionKind
from ondevice_export.config import LayerConfig, Rope
from ondevice_export.graph.graph_builder import GraphBuilder
from ondevice_export.graph.rope import cos_sin

CACHE_ROWS: Mapping[AttentionKind, str] = {"full": "Sf", "sliding": "Ss"}
"""The symbolic dimension of each kind's caches and masks."""


class TokenRows:
    """Positions [T] and masks [T, S] per kind of attention; what layers derive from them is added once."""

    def __init__(
        self,
        builder: GraphBuilder,
        positions: ir.Value,
        masks: Mapping[AttentionKind, ir.Value],
        ropes: Mapping[AttentionKind, Rope],
    ) -> None:
        self._builder = builder
        self._positions = positions
        self._masks = masks
        self._ropes = ropes
        self._rotary: dict[tuple[AttentionKind, int], tuple[ir.Value, ir.Value]] = {}
        self._folded: dict[tuple[AttentionKind, int], ir.Value] = {}

    def select(self, wanted: ir.Value) -> TokenRows:
        """The rows that `wanted` [R] names."""
        masks = {kind: self._builder.op("Gather", mask, wanted, axis=0) for kind, mask in self._masks.items()}
        return TokenRows(self._builder, self._builder.op("Gather", self._positions, wanted, axis=0), masks, self._ropes)

    def rotary(self, layer: LayerConfig) -> tuple[ir.Value, ir.Value]:
        """cos and sin [1, T, head_dim / 2]."""
        key = (layer.kind, layer.head_dim)
        if key not in self._rotary:
            self._rotary[key] = cos_sin(self._builder, self._ropes[layer.kind], layer.head_dim, self._positions)
        return self._rotary[key]

    def mask(self, kind: AttentionKind, group: int) -> ir.Value:
        """The mask [T * group, S] with each row `group` times, for query heads that are folded into rows."""
        if group == 1:
            return self._masks[kind]
        key = (kind, group)
        if key not in self._folded:
            builder = self._builder
            column = builder.op("Unsqueeze", self._masks[kind], builder.integers(1))
            repeated = builder.op("Expand", column, builder.integers(1, group, 1))
            flat = builder.op("Concat", builder.integers(-1), builder.op("Shape", self._masks[kind], start=1), axis=0)
            self._folded[key] = builder.op("Reshape", repeated, flat)
        return self._folded[key]
