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
from ondevice_export.graph.block import Block
from ondevice_export.graph.layer import decoder_layer
from ondevice_export.graph.matrix import gather, linear
from ondevice_export.graph.per_layer import per_layer_inputs
from ondevice_export.graph.rows import CACHE_ROWS, Rows
from ondevice_export.graph.tape import Tape
from ondevice_export.matrices import StoredMatrix


@dataclass(frozen=True)
class _Stream:
    """What flows from layer to layer; `select` narrows all of it at once."""

    hidden: ir.Value
    per_layer: ir.Value | None
    rows: Rows

    def select(self, tape: Tape, wanted: ir.Value) -> _Stream:
        per_layer = None if self.per_layer is None else tape.op("Gather", self.per_layer, wanted, axis=0)
        return _Stream(tape.op("Gather", self.hidden, wanted, axis=0), per_layer, self.rows.select(wanted))


def embed(tape: Tape, table: StoredMatrix, ids: ir.Value) -> ir.Value:
    """`table[id] * sqrt(H)`: [T] -> [T, H] (Gemma4TextScaledWordEmbedding)."""
    return tape.op("Mul", gather(tape, table, ids), tape.scalar(math.sqrt(table.width)))


def softcap(tape: Tape, logits: ir.Value, cap: float) -> ir.Value:
    """`cap * tanh(logits / cap)`."""
    return tape.op("Mul", tape.op("Tanh", tape.op("Mul", logits, tape.scalar(1.0 / cap))), tape.scalar(cap))


class TargetGraph:
    """Builds the target's graph while its weights go to the data file.

    Attributes:
        table: the tied token table, which the drafter's graph embeds with too.
    """

    def __init__(self, block: Block) -> None:
        self._block = block
        self._tape = tape = block.tape
        self._config = config = block.config
        self._ids = tape.input(contract.TOKEN_IDS, ir.DataType.INT64, ["T"])
        positions = tape.input(contract.POSITIONS, ir.DataType.INT64, ["T"])
        self._wanted = tape.input(contract.WANTED, ir.DataType.INT64, ["R"])
        self._index = {kind: tape.input(contract.write_index(kind), ir.DataType.INT64, [1]) for kind in CACHE_ROWS}
        masks = {
            kind: tape.input(contract.mask(kind), ir.DataType.BOOL, ["T", CACHE_ROWS[kind]]) for kind in CACHE_ROWS
        }
        self._rows = Rows(tape, positions, masks, config.rope)
        self._caches: dict[int, KeyValue] = {}
        self.table = block.weights.matrix("embed_tokens.weight", block.weights.widths.head)

    def build(self) -> None:
        """Record everything from token ids to logits.

        Layers that share KV write no cache, so from the first of them on only the wanted rows are carried.
        """
        tape, config = self._tape, self._config
        stream = self._embed()
        seam = config.first_shared_layer
        for index in range(seam):
            stream = self._layer(index, stream)
        if seam == len(config.layers):
            hidden = tape.op("Gather", stream.hidden, self._wanted, axis=0)
        else:
            stream = stream.select(tape, self._wanted)
            for index in range(seam, len(config.layers)):
                stream = self._layer(index, stream)
            hidden = stream.hidden
        hidden = self._block.norm(hidden, "norm")
        logits = linear(tape, hidden, self.table)
        if config.softcap is not None:
            logits = softcap(tape, logits, config.softcap)
        tape.output(logits, contract.LOGITS, ir.DataType.FLOAT, ["R", config.vocab_size])
        tape.output(hidden, contract.HIDDEN, ir.DataType.FLOAT, ["R", config.hidden_size])
        for index, cache in self._caches.items():
            shape = _cache_shape(config.layers[index])
            tape.output(cache.key, contract.present(index, "key"), ir.DataType.FLOAT, shape)
            tape.output(cache.value, contract.present(index, "value"), ir.DataType.FLOAT, shape)

    def _embed(self) -> _Stream:
        with self._tape.scope("embed"):
            hidden = embed(self._tape, self.table, self._ids)
            per_layer = per_layer_inputs(self._block, self._ids, hidden) if self._config.ple_size else None
        return _Stream(hidden, per_layer, self._rows)

    def _layer(self, index: int, stream: _Stream) -> _Stream:
        tape = self._tape
        block = self._block.at(f"layers.{index}.")
        with tape.scope(f"layers.{index}"):
            own = None
            if stream.per_layer is not None:
                own = tape.op("Gather", stream.per_layer, tape.constant(np.array(index, np.int64)), axis=1)
            attention = partial(self._attention, index, block.at("self_attn."), stream.rows)
            hidden = decoder_layer(block, stream.hidden, attention, own)
        return _Stream(hidden, stream.per_layer, stream.rows)

    def _attention(self, index: int, block: Block, rows: Rows, x: ir.Value) -> ir.Value:
        layer = self._config.layers[index]
        attention = Attention(block, layer)
        if layer.kv_source == index:
            self._caches[index] = self._past(index).write(
                self._tape, attention.new_rows(x, rows), self._index[layer.kind]
            )
        assert layer.kv_source is not None, "a target's layers all have a cache to read"
        return attention.attend(x, rows, self._caches[layer.kv_source])

    def _past(self, index: int) -> KeyValue:
        shape = _cache_shape(self._config.layers[index])
        return KeyValue(
            self._tape.input(contract.past(index, "key"), ir.DataType.FLOAT, shape),
            self._tape.input(contract.past(index, "value"), ir.DataType.FLOAT, shape),
        )


def _cache_shape(layer: LayerConfig) -> list[int | str]:
    return [1, CACHE_ROWS[layer.kind], layer.kv_heads * layer.head_dim]
