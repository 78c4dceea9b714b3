"""A set of token rows that runs through layers together, and what all its layers share."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from ondevice.contract import AttentionKind
from ondevice_export.config import LayerConfig, Rope
from ondevice_export.graph.rope import cos_sin
from ondevice_export.graph.tape import Tape

CACHE_ROWS: Mapping[AttentionKind, str] = {"full": "Sf", "sliding": "Ss"}
"""The symbolic dimension of each kind's caches and masks."""


class Rows:
    """Positions [T] and masks [T, S] per kind of attention; derived values are recorded once."""

    def __init__(
        self,
        tape: Tape,
        positions: ir.Value,
        masks: Mapping[AttentionKind, ir.Value],
        ropes: Mapping[AttentionKind, Rope],
    ) -> None:
        self._tape = tape
        self._positions = positions
        self._masks = masks
        self._ropes = ropes
        self._rotary: dict[tuple[AttentionKind, int], tuple[ir.Value, ir.Value]] = {}
        self._folded: dict[tuple[AttentionKind, int], ir.Value] = {}

    def select(self, wanted: ir.Value) -> Rows:
        """The rows that `wanted` [R] names."""
        masks = {kind: self._tape.op("Gather", mask, wanted, axis=0) for kind, mask in self._masks.items()}
        return Rows(self._tape, self._tape.op("Gather", self._positions, wanted, axis=0), masks, self._ropes)

    def rotary(self, layer: LayerConfig) -> tuple[ir.Value, ir.Value]:
        """cos and sin [1, T, head_dim / 2]."""
        key = (layer.kind, layer.head_dim)
        if key not in self._rotary:
            self._rotary[key] = cos_sin(self._tape, self._ropes[layer.kind], layer.head_dim, self._positions)
        return self._rotary[key]

    def mask(self, kind: AttentionKind, group: int) -> ir.Value:
        """[T * group, S]: each row `group` times, for the query heads folded into rows."""
        if group == 1:
            return self._masks[kind]
        key = (kind, group)
        if key not in self._folded:
            tape = self._tape
            column = tape.op("Unsqueeze", self._masks[kind], tape.integers(1))
            repeated = tape.op("Expand", column, tape.integers(1, group, 1))
            flat = tape.op("Concat", tape.integers(-1), tape.op("Shape", self._masks[kind], start=1), axis=0)
            self._folded[key] = tape.op("Reshape", repeated, flat)
        return self._folded[key]
