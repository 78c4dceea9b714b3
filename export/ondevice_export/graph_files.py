"""Writes the graphs and their data files, which make up most of a bundle."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import onnx_ir as ir

from ondevice.progress import Advance
from ondevice_export.checkpoint import Checkpoint
from ondevice_export.config import TextConfig
from ondevice_export.data_file import DataFile
from ondevice_export.export_options import ExportOptions, Formats
from ondevice_export.graph.drafter import DrafterGraph
from ondevice_export.graph.graph_builder import GraphBuilder
from ondevice_export.graph.heads import HeadsGraph
from ondevice_export.graph.module_builder import ModuleBuilder
from ondevice_export.graph.target import TargetGraph
from ondevice_export.graph.weights import Weights
from ondevice_export.heads import HeadsCheckpoint
from ondevice_export.manifest import DRAFTER_GRAPH, TARGET_GRAPH, heads_graph, tool_versions
from ondevice_export.matrices import MatrixWriter, StoredMatrix
from ondevice_export.models import DrafterCheckpoint, TargetCheckpoint
from ondevice_export.quantized_modules import QuantizedModules
from ondevice_export.tensor_names import HEAD, Shapes


def write_target(directory: Path, target: TargetCheckpoint, options: ExportOptions, advance: Advance) -> StoredMatrix:
    """Write `target.onnx` and its data; returns where the token table lies."""
    path, formats = directory / TARGET_GRAPH, options.target_formats
    with _graph(path, target.checkpoint, formats, advance, target.modules) as (builder, weights):
        graph = TargetGraph(ModuleBuilder(builder, target.config, weights.at(target.prefix)))
        graph.build()
    return graph.table


def write_drafter(
    directory: Path,
    drafter: DrafterCheckpoint,
    table: StoredMatrix,
    options: ExportOptions,
    advance: Advance,
) -> None:
    """Write `drafter.onnx` and its data; its token embedding is the target's `table`, not a copy."""
    with _graph(directory / DRAFTER_GRAPH, drafter.checkpoint, options.drafter_formats, advance) as (builder, weights):
        DrafterGraph(builder, drafter.config, weights, drafter.checkpoint, table).build()


def write_heads(
    directory: Path,
    heads: HeadsCheckpoint,
    target: TextConfig,
    table: StoredMatrix,
    options: ExportOptions,
    *,
    advance: Advance,
) -> None:
    """Write a graph for each kind of heads, with its data; all read the target's `table` where it is."""
    for each in heads.heads:
        path = directory / heads_graph(each.kind)
        with _graph(path, heads.checkpoint, options.drafter_formats, advance) as (builder, weights):
            HeadsGraph(builder, each, target, weights, checkpoint=heads.checkpoint, table=table).build()


def count_weights(shapes: Shapes) -> int:
    """Number of weights in matrices: the unit of an export's progress."""
    return sum(math.prod(shape) for shape in shapes.values() if len(shape) > 1)


def estimate_bytes(shapes: Shapes, formats: Formats) -> int:
    """Bytes of a data file, scales included; a little too much where scales are fp16."""
    total = 0.0
    for name, shape in shapes.items():
        form = formats.head if name.endswith(("embed_tokens.weight", HEAD)) else formats.layers
        exact = len(shape) == 1 or name.endswith("router.proj.weight")
        stored = 32 if exact else form.stored_bits(scale_bits=32)
        total += math.prod(shape) * stored / 8
    return int(total)


@contextmanager
def _graph(
    path: Path,
    checkpoint: Checkpoint,
    formats: Formats,
    advance: Advance,
    modules: QuantizedModules | None = None,
) -> Iterator[tuple[GraphBuilder, Weights]]:
    """A graph builder and weights to build with; the graph is saved when all weights are written."""
    builder = GraphBuilder(path.stem)
    with DataFile(path.with_name(f"{path.name}.data")) as file, MatrixWriter(advance) as writer:
        yield builder, Weights(builder, checkpoint, file, writer, formats=formats, modules=modules)
    ir.save(builder.model(tool_versions()["ondevice"]), path)
