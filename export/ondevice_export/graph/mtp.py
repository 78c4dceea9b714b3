"""Inputs, keys and values of an MTP layer (`Target.mtp`), in the target's graph and in the drafter's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import onnx_ir as ir

from ondevice.arrays import Float32Array
from ondevice.bundle_format.decoder import Attention
from ondevice.bundle_format.tensor_table import MTP, NORMS
from ondevice_export.graph.attention import KeyValue, TokenRows, head_norm, rotate
from ondevice_export.graph.matrix import linear
from ondevice_export.graph.weights import Module
from ondevice_export.matrices import StoredMatrix

_EMBEDDING, _HIDDEN, _KEYS, _VALUES = (
    "embedding_projection",
    "hidden_projection",
    "self_attn.k_proj",
    "self_attn.v_proj",
)
_NORM, _KEY_NORM = NORMS["attention"][0], "self_attn.k_norm"


@dataclass(frozen=True)
class MtpWeights:
    """The weights, which are stored with the target, by their names without the prefix and `.weight`."""

    matrices: Mapping[str, StoredMatrix]
    vectors: Mapping[str, Float32Array]

    @classmethod
    def store(cls, module: Module, own: Attention) -> MtpWeights:
        """Store them in the target's data file."""
        at = module.at(MTP)
        vectors = {name: at.read(f"{name}.weight") for name in ("embedding_norm", "hidden_norm", _NORM)}
        if own.k_norm:
            vectors[_KEY_NORM] = at.read(f"{_KEY_NORM}.weight")
        for name, values in vectors.items():
            at.array(f"{name}.weight", values)
        return cls({name: at.matrix(f"{name}.weight") for name in (_EMBEDDING, _HIDDEN, _KEYS, _VALUES)}, vectors)

    def renamed(self, start: str) -> MtpWeights:
        """The same for another graph, in which the names of matrices begin so."""
        renamed = {name: replace(each, name=start + each.name) for name, each in self.matrices.items()}
        return MtpWeights(renamed, self.vectors)


class MtpNodes:
    """Adds the nodes to a graph."""

    def __init__(self, module: Module, own: Attention, weights: MtpWeights) -> None:
        self._module, self._builder, self._own, self._weights = module, module.builder, own, weights

    def projected(self, hidden: ir.Value) -> ir.Value:
        """`hidden_projection(norm(hidden))`: [T, H] -> [T, H]."""
        return self._linear(self._normed(hidden, "hidden_norm"), _HIDDEN)

    def inputs(self, embedded: ir.Value, before: ir.Value) -> ir.Value:
        """The layer's inputs, [T, H], of embedded tokens and the projected hidden states of the rows before."""
        return self._builder.op("Add", self._linear(self._normed(embedded, "embedding_norm"), _EMBEDDING), before)

    def new_rows(self, x: ir.Value, rows: TokenRows, rotary: int | None) -> KeyValue:
        """The rows of keys and values, each [1, T, kv_heads * head_dim], of the layer's inputs.

        rotary : index of the rotary embedding of `rows`; None for none
        """
        builder, own, normed = self._builder, self._own, self._normed(x, _NORM)
        keys, values = (builder.reshape(self._linear(normed, name), 1, -1, own.kv_width) for name in (_KEYS, _VALUES))
        if own.k_norm:
            weight = builder.constant(self._weights.vectors[_KEY_NORM])
            keys = head_norm(self._module, keys, (own.kv_heads, own.head_dim), weight)
        if rotary is not None:
            keys = rotate(builder, keys, rows.angles(rotary), heads=own.kv_heads)
        return KeyValue(keys, values)

    def _linear(self, x: ir.Value, name: str) -> ir.Value:
        return linear(self._builder, x, self._weights.matrices[name])

    def _normed(self, x: ir.Value, name: str) -> ir.Value:
        return self._module.rms_norm(x, self._builder.constant(self._weights.vectors[name]))
