"""Short convolutions over the rows of a cache, which is updated in place as that of attention is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from ondevice.bundle_format.decoder import ShortConvolution
from ondevice_export.graph.attention import KeyValue
from ondevice_export.graph.graph_builder import GraphBuilder
from ondevice_export.graph.weights import Module


class WindowRows:
    """The cache rows [T, window] that each row sums over, as `graph_io` describes them.

    The nodes that all layers need are added to the graph once.
    """

    def __init__(self, builder: GraphBuilder, rows: ir.Value, window: int) -> None:
        self._builder = builder
        columns = [builder.op("Gather", rows, builder.constant(np.array(j)), axis=1) for j in range(window)]
        zero, one = (builder.constant(np.array(number)) for number in (0, 1))
        self._places = [builder.op("Clip", column, zero) for column in columns]
        there = [builder.op("Add", builder.op("Clip", column, None, zero), one) for column in columns]
        self._factors = [builder.op("Cast", builder.reshape(each, -1, 1), to=ir.DataType.FLOAT) for each in there]
        """[T, 1], 0 for positions before the first one."""

    def convolve(self, cache: KeyValue, taps: ir.Value, width: int) -> ir.Value:
        """The sums of taps [2 * width, window] times cache rows, whose halves are [1, S, width]: [T, 2 * width]."""
        builder, window = self._builder, len(self._places)
        last_first = [builder.constant(np.array(window - 1 - j)) for j in range(window)]
        summed = [
            self._sum(part, width, [builder.op("Gather", own, column, axis=1) for column in last_first])
            for part, own in zip(
                (cache.key, cache.value), builder.ops("Split", taps, axis=0, num_outputs=2, outputs=2), strict=True
            )
        ]
        return builder.op("Concat", *summed, axis=-1)

    def before(self, cache: KeyValue, width: int) -> ir.Value:
        """The cache row one position before each row, [T, 2 * width]; zeros before the first position."""
        builder, place, factor = self._builder, self._places[1], self._factors[1]
        parts = [
            builder.op("Gather", builder.reshape(each, -1, width), place, axis=0) for each in (cache.key, cache.value)
        ]
        return builder.op("Mul", builder.op("Concat", *parts, axis=-1), factor)

    def _sum(self, cache: ir.Value, width: int, taps: Sequence[ir.Value]) -> ir.Value:
        """The sum over j of tap j [width] times the cache row of column j: [1, S, width] -> [T, width]."""
        builder = self._builder
        flat = builder.reshape(cache, -1, width)
        total = None
        for place, factor, tap in zip(self._places, self._factors, taps, strict=True):
            found = builder.op("Mul", builder.op("Gather", flat, place, axis=0), builder.op("Mul", factor, tap))
            total = found if total is None else builder.op("Add", total, found)
        assert total is not None
        return total


def halves(builder: GraphBuilder, x: ir.Value) -> KeyValue:
    """The halves of rows [T, channels] as those of a cache, each [1, T, channels / 2]."""
    parts = builder.ops("Split", x, axis=-1, num_outputs=2, outputs=2)
    return KeyValue(*(builder.op("Unsqueeze", part, builder.integers(0)) for part in parts))


class Convolution:
    """The short convolution of one layer (`ShortConvolution`)."""

    def __init__(self, module: Module, body: ShortConvolution, x: ir.Value) -> None:
        """
        x : the block's input, [T, H]
        """
        self._module, self._body, self._builder = module, body, module.builder
        inner, self._gate, values = self._builder.ops(
            "Split", module.linear(x, "in_proj"), axis=-1, num_outputs=3, outputs=3
        )
        self._products = self._builder.op("Mul", inner, values)

    def new_rows(self) -> KeyValue:
        """The halves of the T new rows of the cache, each [1, T, channels / 2]."""
        return halves(self._builder, self._products)

    def mix(self, rows: WindowRows, cache: KeyValue) -> ir.Value:
        """The block's output, [T, H]."""
        summed = rows.convolve(cache, self._module.vector("conv.weight"), self._body.kv_width)
        return self._module.linear(self._builder.op("Mul", self._gate, summed), "out_proj")
