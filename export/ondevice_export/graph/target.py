"""The target graph; `ondevice.bundle_format.graph_io` describes its inputs and outputs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from ondevice.bundle_format import graph_io
from ondevice.bundle_format.decoder import GatedDelta, Mixer, ShortConvolution
from ondevice.bundle_format.model_config import Target
from ondevice.bundle_format.tensor_table import EMBEDDING, HEAD
from ondevice_export.graph.attention import KeyValue, SelfAttention, TokenRows
from ondevice_export.graph.convolution import Convolution, WindowRows, halves
from ondevice_export.graph.delta import Delta
from ondevice_export.graph.graph_builder import GraphBuilder
from ondevice_export.graph.layer import decoder_layer, per_layer_inputs
from ondevice_export.graph.matrix import gather, linear
from ondevice_export.graph.mtp import MtpNodes, MtpWeights
from ondevice_export.graph.weights import Module, Weights
from ondevice_export.matrices import StoredMatrix


@dataclass(frozen=True)
class _Stream:
    """The values that pass from layer to layer."""

    hidden: ir.Value
    per_layer: ir.Value | None
    rows: TokenRows

    def select(self, builder: GraphBuilder, wanted: ir.Value) -> _Stream:
        """The same for the rows `wanted` [R] alone."""
        per_layer = None if self.per_layer is None else builder.op("Gather", self.per_layer, wanted, axis=0)
        return _Stream(builder.op("Gather", self.hidden, wanted, axis=0), per_layer, self.rows.select(wanted))


def embed(builder: GraphBuilder, target: Target, table: StoredMatrix, ids: ir.Value) -> ir.Value:
    """`table[id] * embedding_factor`: [T] -> [T, H]."""
    rows = gather(builder, table, ids)
    return rows if target.embedding_factor == 1 else builder.op("Mul", rows, builder.scalar(target.embedding_factor))


def softcap(builder: GraphBuilder, logits: ir.Value, cap: float) -> ir.Value:
    """`cap * tanh(logits / cap)`."""
    return builder.op(
        "Mul", builder.op("Tanh", builder.op("Mul", logits, builder.scalar(1.0 / cap))), builder.scalar(cap)
    )


class SharedWeights(NamedTuple):
    """The target's weights that other graphs read too."""

    table: StoredMatrix
    """The token embedding."""
    head: StoredMatrix
    """The same matrix if they are tied."""
    mtp: MtpWeights | None
    """The weights that make inputs, keys and values of an MTP layer; None without one."""


class TargetGraph:
    """Builds the target's graph while its weights are written to the data file.

    Attributes:
        shared: the weights that other graphs read.
    """

    def __init__(self, builder: GraphBuilder, config: Target, weights: Weights) -> None:
        self._module = Module(builder, config, weights)
        self._builder = builder
        self._config = config
        self._inputs = inputs = builder.inputs
        self._ids, self._wanted = inputs[graph_io.TOKEN_IDS], inputs[graph_io.WANTED]
        masks = {kind: inputs[graph_io.mask(kind)] for kind in config.attention_kinds}
        self._rows = TokenRows(builder, inputs[graph_io.POSITIONS], masks, config)
        self._window_rows: WindowRows | None = None
        if config.convolves:
            self._window_rows = WindowRows(builder, inputs[graph_io.CONVOLUTION_ROWS], config.window or 0)
        self._caches: dict[int, KeyValue] = {}
        self._states: dict[int, ir.Value] = {}
        table = weights.matrix(EMBEDDING, weights.formats.head)
        head = table if config.tied else weights.matrix(HEAD, weights.formats.head)
        mtp = None if config.mtp is None else MtpWeights.store(self._module, config.mtp)
        self.shared = SharedWeights(table, head, mtp)

    def build(self) -> None:
        """Add all nodes from token ids to logits.

        Layers that read another layer's KV cache write none themselves, so from the first of them on only the rows
        whose logits are wanted are computed.
        """
        builder, config = self._builder, self._config
        stream = self._embed()
        for index in range(config.first_shared_layer):
            stream = self._layer(index, stream)
        if config.first_shared_layer == len(config.layers):
            self._write_mtp(stream)
            hidden = builder.op("Gather", stream.hidden, self._wanted, axis=0)
        else:
            stream = stream.select(builder, self._wanted)
            for index in range(config.first_shared_layer, len(config.layers)):
                stream = self._layer(index, stream)
            hidden = stream.hidden
        normed = self._module.norm(hidden, "norm")
        logits = linear(builder, normed, self.shared.head)
        if config.softcap is not None:
            logits = softcap(builder, logits, config.softcap)
        builder.output(graph_io.LOGITS, logits)
        builder.output(graph_io.HIDDEN, normed if config.mtp is None else hidden)
        for index, cache in self._caches.items():
            builder.output(graph_io.present(index, "key"), cache.key)
            builder.output(graph_io.present(index, "value"), cache.value)
        for index, states in self._states.items():
            builder.output(graph_io.next_state(index), states)

    def _embed(self) -> _Stream:
        with self._builder.scope("embed"):
            hidden = embed(self._builder, self._config, self.shared.table, self._ids)
            if graph_io.SOFT_ROWS in self._inputs:
                every = self._builder.op("Concat", hidden, self._inputs[graph_io.SOFT_ROWS], axis=0)
                hidden = self._builder.op("Gather", every, self._inputs[graph_io.EMBEDDING_SOURCE], axis=0)
            per_layer, own = None, self._config.per_layer
            if own is not None:
                per_layer = per_layer_inputs(self._module, own, len(self._config.layers), self._ids, hidden)
        return _Stream(hidden, per_layer, self._rows)

    def _layer(self, index: int, stream: _Stream) -> _Stream:
        builder = self._builder
        module = self._module.at(f"layers.{index}.")
        with builder.scope(f"layers.{index}"):
            own = None
            if stream.per_layer is not None:
                own = builder.op("Gather", stream.per_layer, builder.constant(np.array(index, np.int64)), axis=1)
            mix = partial(self._mix, index, stream.rows)
            hidden = decoder_layer(module, self._config.layers[index], stream.hidden, mix, own)
        return _Stream(hidden, stream.per_layer, stream.rows)

    def _mix(self, index: int, rows: TokenRows, module: Module, body: Mixer, x: ir.Value) -> ir.Value:
        if isinstance(body, ShortConvolution):
            assert self._window_rows is not None
            convolution = Convolution(module.at("conv."), body, x)
            return convolution.mix(self._window_rows, self._written(index, body, convolution.new_rows()))
        if isinstance(body, GatedDelta):
            assert self._window_rows is not None
            delta, state = Delta(module.at("delta."), body, x), self._inputs[graph_io.state(index)]
            written, counts = self._written(index, body, delta.new_rows()), self._inputs[graph_io.STATE_ROWS]
            out, self._states[index] = delta.mix(self._window_rows, written, state, counts)
            return out
        attention = SelfAttention(module.at("self_attn."), body)
        if body.kv_source is None:
            self._written(index, body, attention.new_rows(x, rows))
        return attention.attend(x, rows, self._caches[self._config.kv_source(index)])

    def _write_mtp(self, stream: _Stream) -> None:
        """Write the projected hidden states, keys and values for an MTP layer, if there is one, to their caches."""
        config, own, weights = self._config, self._config.mtp, self.shared.mtp
        if own is None or weights is None:
            return
        assert self._window_rows is not None
        with self._builder.scope("mtp"):
            inputs, states = MtpNodes(self._module, own, weights), config.cached[len(config.layers)]
            new = halves(self._builder, inputs.projected(stream.hidden))
            before = self._window_rows.before(self._written(len(config.layers), states, new), states.kv_width)
            x = inputs.inputs(embed(self._builder, config, self.shared.table, self._ids), before)
            self._written(config.mtp_cache, own, inputs.new_rows(x, stream.rows, own.rotary))

    def _written(self, index: int, body: Mixer, new: KeyValue) -> KeyValue:
        """A layer's cache with the new rows."""
        past = KeyValue(self._inputs[graph_io.past(index, "key")], self._inputs[graph_io.past(index, "value")])
        self._caches[index] = past.write(self._builder, new, self._inputs[graph_io.write_index(body.kind)])
        return self._caches[index]
