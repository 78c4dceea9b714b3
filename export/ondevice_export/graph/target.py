"""The target graph: see `ondevice.contract` for its inputs and outputs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import numpy as np
import onnx_ir as ir

from ondevice import contract
from ondevice_export.config import LayerConfig
from ondevice_export.graph.attention import Attention, KeyValue
from ondevice_export.graph.graph_builder import GraphBuilder
from ondevice_export.graph.layer import decoder_layer
from ondevice_export.graph.matrix import gather, linear
from ondevice_export.graph.module_builder import ModuleBuilder
from ondevice_export.graph.per_layer import per_layer_inputs
from ondevice_export.graph.token_rows import CACHE_ROWS, TokenRows
from ondevice_export.matrices import StoredMatrix


@dataclass(frozen=True)
class _Stream:
    """The values that go from layer to layer."""

    hidden: ir.Value
    per_layer: ir.Value | None
    rows: TokenRows

    def select(self, builder: GraphBuilder, wanted: ir.Value) -> _Stream:
        """The same for the rows `wanted` [R] alone."""
        per_layer = None if self.per_layer is None else builder.op("Gather", self.per_layer, wanted, axis=0)
        return _Stream(builder.op("Gather", self.hidden, wanted, axis=0), per_layer, self.rows.select(wanted))


def embed(builder: GraphBuilder, table: StoredMatrix, ids: ir.Value) -> ir.Value:
    """`table[id] * sqrt(H)`: [T] -> [T, H] (Gemma4TextScaledWordEmbedding)."""
    return builder.op("Mul", gather(builder, table, ids), builder.scalar(math.sqrt(table.width)))


def softcap(builder: GraphBuilder, logits: ir.Value, cap: float) -> ir.Value:
    """`cap * tanh(logits / cap)`."""
    return builder.op(
        "Mul", builder.op("Tanh", builder.op("Mul", logits, builder.scalar(1.0 / cap))), builder.scalar(cap)
    )


class TargetGraph:
    """Builds the target's graph while its weights go to the data file.

    Attributes:
        table: the tied token table, which the drafter's graph embeds with too.
    """

    def __init__(self, module: ModuleBuilder) -> None:
        self._module = module
        self._builder = builder = module.builder
        self._config = config = module.config
        self._ids = builder.input(contract.TOKEN_IDS, ir.DataType.INT64, ["T"])
        positions = builder.input(contract.POSITIONS, ir.DataType.INT64, ["T"])
        self._wanted = builder.input(contract.WANTED, ir.DataType.INT64, ["R"])
        self._index = {kind: builder.input(contract.write_index(kind), ir.DataType.INT64, [1]) for kind in CACHE_ROWS}
        masks = {
            kind: builder.input(contract.mask(kind), ir.DataType.BOOL, ["T", CACHE_ROWS[kind]]) for kind in CACHE_ROWS
        }
        self._rows = TokenRows(builder, positions, masks, config.rope)
        self._caches: dict[int, KeyValue] = {}
        self.table = module.weights.matrix("embed_tokens.weight", module.weights.formats.head)
        self._head = self.table if config.tied else module.weights.head()

    def build(self) -> None:
        """Add everything from token ids to logits.

        Layers that share KV write no cache, so from the first of them on only the wanted rows are computed.
        """
        builder, config = self._builder, self._config
        stream = self._embed()
        for index in range(config.first_shared_layer):
            stream = self._layer(index, stream)
        if config.first_shared_layer == len(config.layers):
            hidden = builder.op("Gather", stream.hidden, self._wanted, axis=0)
        else:
            stream = stream.select(builder, self._wanted)
            for index in range(config.first_shared_layer, len(config.layers)):
                stream = self._layer(index, stream)
            hidden = stream.hidden
        hidden = self._module.norm(hidden, "norm")
        logits = linear(builder, hidden, self._head)
        if config.softcap is not None:
            logits = softcap(builder, logits, config.softcap)
        builder.output(logits, contract.LOGITS, ir.DataType.FLOAT, ["R", config.vocab_size])
        builder.output(hidden, contract.HIDDEN, ir.DataType.FLOAT, ["R", config.hidden_size])
        for index, cache in self._caches.items():
            shape = _cache_shape(config.layers[index])
            builder.output(cache.key, contract.present(index, "key"), ir.DataType.FLOAT, shape)
            builder.output(cache.value, contract.present(index, "value"), ir.DataType.FLOAT, shape)

    def _embed(self) -> _Stream:
        with self._builder.scope("embed"):
            hidden = embed(self._builder, self.table, self._ids)
            per_layer = per_layer_inputs(self._module, self._ids, hidden) if self._config.ple_size else None
        return _Stream(hidden, per_layer, self._rows)

    def _layer(self, index: int, stream: _Stream) -> _Stream:
        builder = self._builder
        module = self._module.at(f"layers.{index}.")
        with builder.scope(f"layers.{index}"):
            own = None
            if stream.per_layer is not None:
                own = builder.op("Gather", stream.per_layer, builder.constant(np.array(index, np.int64)), axis=1)
            attention = partial(self._attention, index, module.at("self_attn."), stream.rows)
            hidden = decoder_layer(module, stream.hidden, attention, own, self._config.layers[index].experts)
        return _Stream(hidden, stream.per_layer, stream.rows)

    def _attention(self, index: int, module: ModuleBuilder, rows: TokenRows, x: ir.Value) -> ir.Value:
        layer = self._config.layers[index]
        attention = Attention(module, layer)
        if layer.kv_source == index:
            self._caches[index] = self._past(index).write(
                self._builder, attention.new_rows(x, rows), self._index[layer.kind]
            )
        assert layer.kv_source is not None, "a target's layers all have a cache to read"
        return attention.attend(x, rows, self._caches[layer.kv_source])

    def _past(self, index: int) -> KeyValue:
        shape = _cache_shape(self._config.layers[index])
        return KeyValue(
            self._builder.input(contract.past(index, "key"), ir.DataType.FLOAT, shape),
            self._builder.input(contract.past(index, "value"), ir.DataType.FLOAT, shape),
        )


def _cache_shape(layer: LayerConfig) -> list[int | str]:
    return [1, CACHE_ROWS[layer.kind], layer.kv_heads * layer.head_dim]
