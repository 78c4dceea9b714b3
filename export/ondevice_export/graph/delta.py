"""The gated delta rule over states, and the convolution before it."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ondevice.bundle_format.decoder import GatedDelta
from ondevice.bundle_format.tensor_table import DELTA_TAPS
from ondevice_export.graph.attention import KeyValue
from ondevice_export.graph.convolution import WindowRows, halves
from ondevice_export.graph.matrix import product
from ondevice_export.graph.weights import Module

_L2_EPS = 1e-6
"""Added to the sum of squares of a query or a key before its root (`l2norm`)."""


class Delta:
    """The gated delta rule of one layer (`GatedDelta`)."""

    def __init__(self, module: Module, body: GatedDelta, x: ir.Value) -> None:
        """
        x : the block's input, [T, H]
        """
        self._module, self._body, self._builder, self._x = module, body, module.builder, x
        self._mixed = module.linear(x, "qkv")

    def new_rows(self) -> KeyValue:
        """The halves of the T new rows of the convolution's cache, each [1, T, channels / 2]."""
        return halves(self._builder, self._mixed)

    def mix(self, rows: WindowRows, cache: KeyValue, state: ir.Value, counts: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The block's output [T, H] and the states after the new rows.

        state : those before them; counts : [T], 0 for rows that leave them as they are
        """
        builder, module, body = self._builder, self._module, self._body
        summed = rows.convolve(cache, module.vector(DELTA_TAPS.removeprefix("delta.")), body.kv_width)
        query, key, value = builder.ops(
            "Split", builder.silu(summed), builder.integers(body.key_width, body.key_width, body.value_width),
            axis=-1, outputs=3,
        )  # fmt: skip
        size = body.key_dim
        units = [self._unit(query, 1 / size), self._unit(key, size**-0.5)]
        if body.tiled:  # the operator gives neighbouring value heads one key head
            copies = body.value_heads // body.key_heads
            units = [builder.op("Concat", *[each] * copies, axis=-1) for each in units]
        inputs = [*units, builder.op("Unsqueeze", value, builder.integers(0))]
        counts = builder.reshape(counts, 1, -1, 1)
        gates = [builder.op("Mul", each, counts) for each in (self._decay(), self._share())]
        out, states = builder.ops(
            "LinearAttention", *inputs, state, *gates, outputs=2, domain="com.microsoft",
            update_rule="gated_delta", q_num_heads=body.value_heads if body.tiled else body.key_heads,
            kv_num_heads=body.value_heads, scale=1.0,
        )  # fmt: skip
        heads = builder.reshape(out, -1, body.value_heads, body.value_dim)
        normed = builder.reshape(module.rms_norm(heads, module.vector("scale")), -1, body.value_width)
        gated = builder.op("Mul", normed, builder.silu(module.linear(self._x, "z")))
        return module.linear(gated, "out"), states

    def _unit(self, x: ir.Value, factor: float) -> ir.Value:
        """Every head of x [T, key_heads * key_dim] divided by its length, times `factor` * sqrt(key_dim): [1, T, ...].

        As an RMS norm, whose mean of squares is the sum over key_dim.
        """
        builder, body = self._builder, self._body
        heads = builder.reshape(x, 1, -1, body.key_heads, body.key_dim)
        weight = builder.constant(np.full(body.key_dim, factor, np.float32))
        unit = builder.op("RMSNormalization", heads, weight, axis=-1, epsilon=_L2_EPS / body.key_dim)
        return builder.reshape(unit, 1, -1, body.key_width)

    def _share(self) -> ir.Value:
        """sigmoid(b), [T, value_heads]."""
        return self._builder.op("Sigmoid", self._projected("b"))

    def _decay(self) -> ir.Value:
        """decay * softplus(a + dt_bias), [T, value_heads]; softplus(x) is -log(sigmoid(-x))."""
        builder, module = self._builder, self._module
        shifted = builder.op("Add", self._projected("a"), module.vector("dt_bias"))
        negative = builder.op("Mul", shifted, builder.scalar(-1.0))
        softplus = builder.op("Mul", builder.log_sigmoid(negative, self._body.value_heads), builder.scalar(-1.0))
        return builder.op("Mul", softplus, module.vector("decay"))

    def _projected(self, name: str) -> ir.Value:
        weight = self._module.vector(f"{name}.weight")
        return product(self._builder, self._x, weight, (self._body.value_heads, self._module.config.hidden_size))
