"""The graph of the vision tower; `ondevice.bundle_format.graph_io` describes its inputs and outputs."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ondevice.bundle_format import graph_io
from ondevice.bundle_format.vision import PATCHES, POSITIONS, PROJECTION, STANDARDIZE, VisionEntry, layer_prefix
from ondevice.bundle_format.weight_format import FLOAT32
from ondevice_export.graph.clipped_linear import ClippedLinears, projected
from ondevice_export.graph.graph_builder import CONTRIB, GraphBuilder
from ondevice_export.graph.layer import activated
from ondevice_export.graph.matrix import gather, linear
from ondevice_export.graph.weights import Module, Weights


class VisionGraph:
    """Builds the tower's graph while its weights are written to the data file (Gemma4VisionModel).

    Every patch attends to every patch, and knows its place by its position alone. So patches may come in any order, and
    they come in that of the soft tokens which they make: pooling is then the mean of neighbouring rows.
    """

    def __init__(self, builder: GraphBuilder, config: VisionEntry, weights: Weights) -> None:
        self._builder, self._config, self._weights = builder, config, weights
        self._module = Module(builder, config, weights)
        self._linears = ClippedLinears(builder, weights)
        self._patches = builder.inputs[graph_io.PATCHES]
        self._places = [builder.inputs[name] for name in (graph_io.COLUMN, graph_io.ROW)]

    def build(self) -> None:
        """Add all nodes from patches to soft rows."""
        builder, config = self._builder, self._config
        with builder.scope("embed"):
            hidden, angles = self._embed(), self._angles()
        for index in range(config.layers):
            with builder.scope(f"layers.{index}"):
                hidden = self._layer(self._module.at(layer_prefix(index)), hidden, angles)
        with builder.scope("pool"):
            rows = projected(self._module, self._pool(hidden), PROJECTION, config.hidden_size)
        builder.output(graph_io.SOFT_ROWS, rows)

    def _embed(self) -> ir.Value:
        """`projection(2 * (patches - 0.5)) + table[0, column] + table[1, row]`: [N, 3PP] -> [N, D]."""
        builder, config = self._builder, self._config
        shifted = builder.op("Mul", builder.op("Sub", self._patches, builder.scalar(0.5)), builder.scalar(2.0))
        hidden = linear(builder, shifted, self._weights.matrix(PATCHES, FLOAT32))
        table = self._weights.matrix(POSITIONS, FLOAT32)
        column, row = self._places
        below = builder.op("Add", row, builder.constant(np.array(config.positions, np.int64)))
        places = builder.op("Add", gather(builder, table, column), gather(builder, table, below))
        return builder.op("Add", hidden, places)

    def _angles(self) -> tuple[ir.Value, ir.Value]:
        """Cosines and sines of the rotary angles, each [1, N, head_dim / 2]: those of the column, then of the row."""
        builder, half = self._builder, self._config.head_dim // 2
        frequencies = (1.0 / self._config.theta ** (np.arange(0, half, 2) / half)).astype(np.float32)
        parts = []
        for place in self._places:
            column = builder.op("Unsqueeze", builder.op("Cast", place, to=ir.DataType.FLOAT), builder.integers(0, 2))
            parts.append(builder.op("Mul", column, builder.constant(frequencies)))
        angles = builder.op("Concat", *parts, axis=-1)
        return builder.op("Cos", angles), builder.op("Sin", angles)

    def _layer(self, module: Module, hidden: ir.Value, angles: tuple[ir.Value, ir.Value]) -> ir.Value:
        """[N, D] -> [N, D] (Gemma4VisionEncoderLayer)."""
        builder = self._builder
        attended = self._attend(module.at("self_attn."), module.norm(hidden, "input_layernorm"), angles)
        hidden = builder.op("Add", hidden, module.norm(attended, "post_attention_layernorm"))
        mixed = self._mlp(module.at("mlp."), module.norm(hidden, "pre_feedforward_layernorm"))
        return builder.op("Add", hidden, module.norm(mixed, "post_feedforward_layernorm"))

    def _attend(self, module: Module, x: ir.Value, angles: tuple[ir.Value, ir.Value]) -> ir.Value:
        """Attention of all patches to all, scale 1: [N, D] -> [N, D] (Gemma4VisionAttention).

        A head's first half turns by the column and its second half by the row, each as pairs of its own two halves. The
        rows of the query and key projections are stored in another order, in which both together are pairs of the
        head's halves, as RotaryEmbedding has them. MultiHeadAttention goes through the keys in tiles; Attention would
        take memory for the scores of all heads at once, 305 MB for 280 soft tokens of E2B.
        """
        builder, config = self._builder, self._config
        order, turned = turned_order(config.query_heads, config.head_dim), []
        for name in "qk":
            heads = self._norm(module, self._linears.add(module, x, f"{name}_proj", order=order), f"{name}_norm.weight")
            turned.append(builder.op("RotaryEmbedding", heads, *angles, num_heads=config.query_heads, interleaved=0))
        values = self._norm(module, self._linears.add(module, x, "v_proj"), None)
        attended = builder.op(
            "MultiHeadAttention", *turned, values, domain=CONTRIB, num_heads=config.query_heads, scale=1.0
        )
        flat = builder.reshape(attended, -1, config.query_heads * config.head_dim)
        return self._linears.add(module, flat, "o_proj")

    def _norm(self, module: Module, x: ir.Value, name: str | None) -> ir.Value:
        """RMS norm of each head: [N, heads * head_dim] -> [1, N, heads * head_dim]; without a weight if None."""
        builder, config = self._builder, self._config
        split = builder.reshape(x, 1, -1, config.query_heads, config.head_dim)
        if name is None:
            weight = builder.constant(np.ones(config.head_dim, np.float32))
        else:
            weight = module.array(name, module.read(name)[turned_order(1, config.head_dim)])
        return builder.reshape(module.rms_norm(split, weight), 1, -1, config.query_heads * config.head_dim)

    def _mlp(self, module: Module, x: ir.Value) -> ir.Value:
        """`down(gelu(gate(x)) * up(x))`: [N, D] -> [N, D] (Gemma4VisionMLP)."""
        gate = activated(self._builder, "gelu_tanh", self._linears.add(module, x, "gate_proj"))
        mixed = self._builder.op("Mul", gate, self._linears.add(module, x, "up_proj"))
        return self._linears.add(module, mixed, "down_proj")

    def _pool(self, hidden: ir.Value) -> ir.Value:
        """The mean of the patches of each soft token, times sqrt(D): [N, D] -> [S, D] (Gemma4VisionPooler)."""
        builder, config = self._builder, self._config
        count = config.pool**2
        blocks = builder.reshape(hidden, -1, count, config.hidden_size)
        total = builder.op("ReduceSum", blocks, builder.integers(1), keepdims=0)
        rows = builder.op("Mul", total, builder.scalar(math.sqrt(config.hidden_size) / count))
        if config.standardize:
            shift, scale = (self._module.vector(name) for name in STANDARDIZE)
            rows = builder.op("Mul", builder.op("Sub", rows, shift), scale)
        return rows


def turned_order(heads: int, head_dim: int) -> npt.NDArray[np.int64]:
    """int64[heads * head_dim]: the order in which rows of the query and key projections are stored.

    A head has four quarters: pairs (1, 2) turn by the column, and (3, 4) by the row. It is stored as 1, 3, 2, 4.
    """
    quarters = np.arange(heads * head_dim, dtype=np.int64).reshape(heads, 4, head_dim // 4)
    return quarters[:, [0, 2, 1, 3]].reshape(-1)
