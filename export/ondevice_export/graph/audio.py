"""The graph of the audio tower; `ondevice.bundle_format.graph_io` describes its inputs and outputs."""

from __future__ import annotations

import math
from functools import partial, reduce

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ondevice.bundle_format import graph_io
from ondevice.bundle_format.audio import (
    DEPTHWISE,
    OUTPUT,
    OUTPUT_BIAS,
    PROJECTION,
    QUERY_SCALE,
    RELATIVE_KEYS,
    SUBSAMPLED,
    AudioEntry,
    convolution_prefix,
    layer_prefix,
)
from ondevice.bundle_format.weight_format import FLOAT32
from ondevice_export.checkpoint.audio import PER_DIM_SCALE, RELATIVE
from ondevice_export.graph.clipped_linear import ClippedLinears, projected
from ondevice_export.graph.graph_builder import GraphBuilder
from ondevice_export.graph.matrix import linear
from ondevice_export.graph.weights import Module, Weights

MASKED = -1e9
"""Added to the logit of a key that a row does not attend to."""

MAX_PERIOD = 10_000
"""Largest time scale of the sine and cosine waves that stand for a distance."""

KEY_SCALE = math.log1p(math.e) / math.log(2)
"""Factor of the keys, but not of the relative ones."""


class AudioGraph:
    """Builds the tower's graph while its weights are written to the data file (Gemma4AudioModel).

    Rows depend on earlier ones only: a row attends to the `keys` rows up to itself. Rows are attended to in blocks of
    as many, each of which sees its own block and the one before; so their number is first filled up with zeros, which
    come last and change nothing.
    """

    def __init__(self, builder: GraphBuilder, config: AudioEntry, weights: Weights) -> None:
        self._builder, self._config, self._weights = builder, config, weights
        self._module = Module(builder, config, weights)
        self._linears = ClippedLinears(builder, weights)
        self._sound = builder.inputs[graph_io.SOUND]

    def build(self) -> None:
        """Add all nodes from the spectrogram to soft rows."""
        builder, config = self._builder, self._config
        with builder.scope("subsample"):
            rows = self._subsample()
            count = builder.op("Shape", rows, start=0, end=1)
            hidden = self._filled(rows, count)
            masks = self._masks(hidden)
        for index in range(config.layers):
            with builder.scope(f"layers.{index}"):
                hidden = self._layer(self._module.at(layer_prefix(index)), hidden, masks)
        with builder.scope("project"):
            hidden = builder.op("Slice", hidden, builder.integers(0), count, builder.integers(0))
            rows = self._project(hidden)
        builder.output(graph_io.SOFT_ROWS, rows)

    def _subsample(self) -> ir.Value:
        """Two convolutions that halve time and frequency, and a linear layer: [F, B] -> [T, D].

        Source: Gemma4AudioSubSampleConvProjection.
        """
        builder, config = self._builder, self._config
        x = builder.op("Unsqueeze", self._sound, builder.integers(0, 1))
        for index in range(2):
            module = self._module.at(convolution_prefix(index))
            x = builder.op("Conv", x, module.vector("conv.weight"), strides=[2, 2], pads=[1, 1, 1, 1])
            x = builder.op("Transpose", x, perm=[0, 2, 3, 1])
            x = builder.op("LayerNormalization", x, module.vector("norm.weight"), axis=-1, epsilon=config.norm_eps)
            x = builder.op("Relu", x)
            if not index:
                x = builder.op("Transpose", x, perm=[0, 3, 1, 2])
        flat = builder.reshape(x, -1, config.mel_bins // 4 * config.channels)
        return linear(builder, flat, self._weights.matrix(SUBSAMPLED, FLOAT32))

    def _filled(self, rows: ir.Value, count: ir.Value) -> ir.Value:
        """The rows, followed by zeros up to a multiple of `keys`: [T, D] -> [NK, D]."""
        builder, keys = self._builder, self._config.keys
        zeros = builder.constant(np.zeros((keys - 1, self._config.hidden_size), np.float32))
        blocks = builder.op("Div", builder.op("Add", count, builder.integers(keys - 1)), builder.integers(keys))
        length = builder.op("Mul", blocks, builder.integers(keys))
        longer = builder.op("Concat", rows, zeros, axis=0)
        return builder.op("Slice", longer, builder.integers(0), length, builder.integers(0))

    def _masks(self, hidden: ir.Value) -> ir.Value:
        """The addition to the logits: [N, 1, K, 2K], 0 where a row of a block attends to a row of the block before and
        its own, MASKED elsewhere.
        """
        builder, keys = self._builder, self._config.keys
        distance = np.arange(keys)[:, None] + keys - np.arange(2 * keys)
        seen = (distance >= 0) & (distance < keys)
        band = builder.constant(np.where(seen, 0, MASKED).astype(np.float32)[None, None])
        # A one for each row; an Expand or a Range of unknown size is refused where the graph is opened.
        column = builder.op("Slice", hidden, *(builder.integers(each) for each in (0, 1, 1)))
        ones = builder.op("Cast", builder.op("Equal", column, column), to=ir.DataType.FLOAT)
        before = builder.op("Pad", ones, builder.integers(keys, 0, -keys, 0))
        exist = builder.op("Concat", *(builder.reshape(each, -1, 1, 1, keys) for each in (before, ones)), axis=-1)
        missing = builder.op("Mul", builder.op("Sub", exist, builder.scalar(1.0)), builder.scalar(-MASKED))
        return builder.op("Add", missing, band)

    def _layer(self, module: Module, hidden: ir.Value, masks: ir.Value) -> ir.Value:
        """[NK, D] -> [NK, D] (Gemma4AudioLayer). The clipping of gradients, at 1e10, is left out."""
        builder = self._builder
        hidden = self._feed_forward(module.at("feed_forward1."), hidden)
        attended = self._attend(module, module.norm(hidden, "norm_pre_attn"), masks)
        hidden = builder.op("Add", module.norm(attended, "norm_post_attn"), hidden)
        hidden = self._convolve(module.at("lconv1d."), hidden)
        hidden = self._feed_forward(module.at("feed_forward2."), hidden)
        return module.norm(hidden, "norm_out")

    def _feed_forward(self, module: Module, hidden: ir.Value) -> ir.Value:
        """`hidden + weight * norm(down(silu(up(norm(hidden)))))` (Gemma4AudioFeedForward)."""
        builder = self._builder
        wide = builder.silu(self._linears.add(module, module.norm(hidden, "pre_layer_norm"), "ffw_layer_1"))
        narrow = module.norm(self._linears.add(module, wide, "ffw_layer_2"), "post_layer_norm")
        return builder.op("Add", builder.op("Mul", narrow, builder.scalar(self._config.residual_weight)), hidden)

    def _convolve(self, module: Module, hidden: ir.Value) -> ir.Value:
        """A gated linear layer, a convolution of each element over earlier rows, and a linear layer; added to `hidden`.

        The convolution is a sum of shifted rows times weights: as a Conv of as many groups as elements it would need
        two transpositions. Source: Gemma4AudioLightConv1d.
        """
        builder, config = self._builder, self._config
        both = self._linears.add(module, module.norm(hidden, "pre_layer_norm"), "linear_start")
        values, gates = builder.ops("Split", both, outputs=2, axis=-1, num_outputs=2)
        gated = builder.op("Mul", values, builder.op("Sigmoid", gates))
        name = DEPTHWISE.removeprefix("lconv1d.")
        taps = module.array(name, np.ascontiguousarray(module.read(name)[:, 0].T))
        padded = builder.op("Pad", gated, builder.integers(config.kernel - 1, 0, 0, 0))
        parts = []
        for tap in range(config.kernel):
            back, rows = config.kernel - 1 - tap, gated  # rows ago
            if back:
                rows = builder.op("Slice", padded, *(builder.integers(each) for each in (tap, -back, 0)))
            weight = builder.op("Gather", taps, builder.constant(np.array(tap, np.int64)), axis=0)
            parts.append(builder.op("Mul", rows, weight))
        total = reduce(partial(builder.op, "Add"), parts)
        mixed = self._builder.silu(module.norm(total, "conv_norm"))
        return builder.op("Add", self._linears.add(module, mixed, "linear_end"), hidden)

    def _attend(self, module: Module, x: ir.Value, masks: ir.Value) -> ir.Value:
        """Attention with relative positions: [NK, D] -> [NK, D] (Gemma4AudioAttention).

        The logit of row i and key j is `cap * tanh(q_i * (k_j + r_(i-j)) / cap)`.
        """
        builder, config = self._builder, self._config
        heads, head_dim, keys, cap = config.query_heads, config.head_dim, config.keys, config.logit_cap
        own = module.at("self_attn.")
        queries, rows_k, rows_v = (self._linears.add(own, x, f"{name}_proj") for name in "qkv")
        queries = builder.op("Mul", queries, module.array(QUERY_SCALE, self._query_scale(module)))
        queries = builder.op("Transpose", builder.reshape(queries, -1, keys, heads, head_dim), perm=[0, 2, 1, 3])
        keys_seen = builder.op("Transpose", self._with_block_before(rows_k), perm=[0, 2, 3, 1])
        values_seen = builder.op("Transpose", self._with_block_before(rows_v), perm=[0, 2, 1, 3])
        relative = module.array(RELATIVE_KEYS, self._relative_keys(module))
        logits = builder.op(
            "Add", builder.op("MatMul", queries, keys_seen), self._shifted(builder.op("MatMul", queries, relative))
        )
        capped = builder.op("Tanh", builder.op("Div", logits, builder.scalar(cap)))
        logits = builder.op("Add", builder.op("Mul", capped, builder.scalar(cap)), masks)
        attended = builder.op("MatMul", builder.op("Softmax", logits, axis=-1), values_seen)
        flat = builder.reshape(builder.op("Transpose", attended, perm=[0, 2, 1, 3]), -1, config.hidden_size)
        return self._linears.add(own, flat, "post")

    def _with_block_before(self, rows: ir.Value) -> ir.Value:
        """The rows of each block and of the one before: [NK, D] -> [N, 2K, heads, head_dim]."""
        builder, config = self._builder, self._config
        before = builder.op("Pad", rows, builder.integers(config.keys, 0, -config.keys, 0))
        parts = [builder.reshape(each, -1, config.keys, config.query_heads, config.head_dim) for each in (before, rows)]
        return builder.op("Concat", *parts, axis=1)

    def _shifted(self, by_distance: ir.Value) -> ir.Value:
        """[N, heads, K, K + 1], columns for the distances K, .., 0, to [N, heads, K, 2K], columns for the keys seen.

        Row b's column of distance K is key b. Source: appendix B of arXiv 1901.02860.
        """
        builder, keys, heads = self._builder, self._config.keys, self._config.query_heads
        wide = builder.op("Pad", by_distance, builder.integers(0, 0, 0, 0, 0, 0, 0, keys))
        flat = builder.reshape(wide, -1, heads, keys * (2 * keys + 1))
        cut = builder.op("Slice", flat, builder.integers(0), builder.integers(2 * keys * keys), builder.integers(-1))
        return builder.reshape(cut, -1, heads, keys, 2 * keys)

    def _query_scale(self, module: Module) -> npt.NDArray[np.float32]:
        """float32[D]: the factor of each element of the queries, that of the keys included."""
        head_dim = self._config.head_dim
        learnt = np.logaddexp(0, module.read(PER_DIM_SCALE).astype(np.float64))
        factor = head_dim**-0.5 / math.log(2) * KEY_SCALE * learnt
        return np.tile(factor, self._config.query_heads).astype(np.float32)

    def _relative_keys(self, module: Module) -> npt.NDArray[np.float32]:
        """float32[heads, head_dim, K + 1]: the keys of the distances K, .., 0, without the factor of the keys.

        Source: Gemma4AudioRelPositionalEncoding.
        """
        config, half = self._config, self._config.hidden_size // 2
        rates = np.exp(-np.arange(half) * (math.log(MAX_PERIOD) / max(half - 1, 1)))
        turned = np.arange(config.keys, -1, -1)[:, None] * rates
        waves = np.concatenate([np.sin(turned), np.cos(turned)], axis=-1)
        made = waves @ module.read(RELATIVE).astype(np.float64).T / KEY_SCALE
        by_head = made.reshape(config.keys + 1, config.query_heads, config.head_dim).transpose(1, 2, 0)
        return np.ascontiguousarray(by_head, np.float32)

    def _project(self, hidden: ir.Value) -> ir.Value:
        """`projection(norm(output(hidden)))`, the norm without a weight: [T, D] -> [T, H]."""
        builder = self._builder
        rows = linear(builder, hidden, self._weights.matrix(OUTPUT, FLOAT32))
        rows = builder.op("Add", rows, self._module.vector(OUTPUT_BIAS))
        return projected(self._module, rows, PROJECTION, self._config.output_size)
