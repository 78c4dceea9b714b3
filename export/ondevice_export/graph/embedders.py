"""The graphs of towers without layers, those of 12B; `ondevice.bundle_format.graph_io` describes inputs and outputs."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ondevice.bundle_format import audio, graph_io, vision
from ondevice.bundle_format.audio import AudioEntry
from ondevice.bundle_format.vision import EMBEDDER, VisionEntry
from ondevice.bundle_format.weight_format import FLOAT32
from ondevice_export.graph.clipped_linear import projected
from ondevice_export.graph.graph_builder import GraphBuilder
from ondevice_export.graph.matrix import gather, linear
from ondevice_export.graph.weights import Module, Weights

LAYER_NORM_EPS = 1e-5
"""The epsilon of torch.nn.LayerNorm, which the configuration does not change."""


def build_patch_embedder(builder: GraphBuilder, config: VisionEntry, weights: Weights) -> None:
    """Add all nodes from patches to soft rows: [N, 3PP] -> [N, H] (Gemma4UnifiedVisionEmbedder)."""
    module = Module(builder, config, weights, EMBEDDER)
    patches, column, row = (builder.inputs[name] for name in (graph_io.PATCHES, graph_io.COLUMN, graph_io.ROW))
    x = linear(builder, _norm(module, patches, "patch_ln1"), weights.matrix(f"{EMBEDDER}patch_dense.weight", FLOAT32))
    x = _norm(module, builder.op("Add", x, module.vector("patch_dense.bias")), "patch_ln2")
    table = weights.matrix(f"{EMBEDDER}pos_embedding", FLOAT32)  # rows in turn for a column and for a row
    two, one = (builder.constant(np.array(each, np.int64)) for each in (2, 1))
    of_row = builder.op("Add", builder.op("Mul", row, two), one)
    x = builder.op("Add", x, gather(builder, table, builder.op("Mul", column, two)))
    x = _norm(module, builder.op("Add", x, gather(builder, table, of_row)), "pos_norm")
    builder.output(graph_io.SOFT_ROWS, projected(module, x, vision.PROJECTION, config.hidden_size))


def build_sample_embedder(builder: GraphBuilder, config: AudioEntry, weights: Weights) -> None:
    """Add all nodes from frames of samples to soft rows: [S, B] -> [S, H] (Gemma4UnifiedMultimodalEmbedder)."""
    module = Module(builder, config, weights)
    rows = projected(module, builder.inputs[graph_io.SOUND], audio.PROJECTION, config.output_size)
    builder.output(graph_io.SOFT_ROWS, rows)


def _norm(module: Module, x: ir.Value, name: str) -> ir.Value:
    weight, bias = (module.vector(f"{name}.{part}") for part in ("weight", "bias"))
    return module.builder.op("LayerNormalization", x, weight, bias, axis=-1, epsilon=LAYER_NORM_EPS)
