"""The target graph: see `ondevice.contract` for its inputs and outputs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import onnx_ir as ir

from ondevice import contract
from ondevice.contract import AttentionKind
from ondevice_export.config import LayerConfig, TextConfig
from ondevice_export.graph.attention import KeyValue, attend, new_key_value, write_cache
from ondevice_export.graph.layer import decoder_layer
from ondevice_export.graph.matrix import gather, linear
from ondevice_export.graph.norm import rms_norm
from ondevice_export.graph.per_layer import per_layer_inputs
from ondevice_export.graph.rows import Rows
from ondevice_export.graph.tape import Tape
from ondevice_export.graph.weights import Weights
from ondevice_export.matrices import StoredMatrix

_CACHE_ROWS = {"full": "Sf", "sliding": "Ss"}


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

    def __init__(self, tape: Tape, config: TextConfig, weights: Weights) -> None:
        self._tape = tape
        self._config = config
        self._weights = weights
        self._ids = tape.input(contract.TOKEN_IDS, ir.DataType.INT64, ["T"])
        positions = tape.input(contract.POSITIONS, ir.DataType.INT64, ["T"])
        self._wanted = tape.input(contract.WANTED, ir.DataType.INT64, ["R"])
        kinds: tuple[AttentionKind, AttentionKind] = ("full", "sliding")
        self._index = {kind: tape.input(contract.write_index(kind), ir.DataType.INT64, [1]) for kind in kinds}
        masks = {kind: tape.input(contract.mask(kind), ir.DataType.BOOL, ["T", _CACHE_ROWS[kind]]) for kind in kinds}
        self._rows = Rows(tape, positions, masks, config.rope)
        self._caches: dict[int, KeyValue] = {}
        self.table = weights.matrix("embed_tokens.weight", weights.head_bits)

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
        hidden = rms_norm(tape, hidden, self._weights.vector("norm.weight"), config.norm_eps)
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
        tape, config = self._tape, self._config
        with tape.scope("embed"):
            hidden = embed(tape, self.table, self._ids)
            per_layer = None
            if config.ple_size:
                per_layer = per_layer_inputs(tape, config, self._weights, self._ids, hidden)
        return _Stream(hidden, per_layer, self._rows)

    def _layer(self, index: int, stream: _Stream) -> _Stream:
        tape, config = self._tape, self._config
        with tape.scope(f"layers.{index}"):
            own = None
            if stream.per_layer is not None:
                own = tape.op("Squeeze", self._slice(stream.per_layer, index), tape.integers(1))
            weights = self._weights.at(f"layers.{index}.")
            attention = partial(self._attention, index, weights.at("self_attn."), stream.rows)
            hidden = decoder_layer(tape, config, weights, stream.hidden, attention, own)
        return _Stream(hidden, stream.per_layer, stream.rows)

    def _slice(self, per_layer: ir.Value, index: int) -> ir.Value:
        tape = self._tape
        return tape.op("Slice", per_layer, tape.integers(index), tape.integers(index + 1), tape.integers(1))

    def _attention(self, index: int, weights: Weights, rows: Rows, x: ir.Value) -> ir.Value:
        tape, layer = self._tape, self._config.layers[index]
        if layer.kv_source == index:
            shape = _cache_shape(layer)
            past = KeyValue(
                tape.input(contract.past(index, "key"), ir.DataType.FLOAT, shape),
                tape.input(contract.past(index, "value"), ir.DataType.FLOAT, shape),
            )
            new = new_key_value(tape, self._config, layer, weights, x, rows)
            self._caches[index] = write_cache(tape, past, new, self._index[layer.kind])
        assert layer.kv_source is not None
        return attend(tape, self._config, layer, weights, x, rows, self._caches[layer.kv_source])


def _cache_shape(layer: LayerConfig) -> list[int | str]:
    return [1, _CACHE_ROWS[layer.kind], layer.kv_heads * layer.head_dim]
