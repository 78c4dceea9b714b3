"""Graphs and their data files: what makes up most of a bundle."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import onnx_ir as ir

from ondevice.progress import Advance
from ondevice_export.checkpoint import Checkpoint
from ondevice_export.data_file import DataFile
from ondevice_export.graph.block import Block
from ondevice_export.graph.drafter import DrafterGraph
from ondevice_export.graph.tape import Tape
from ondevice_export.graph.target import TargetGraph
from ondevice_export.graph.weights import Weights
from ondevice_export.manifest import DRAFTER_GRAPH, TARGET_GRAPH, tool_versions
from ondevice_export.matrices import MatrixWriter, StoredMatrix
from ondevice_export.models import DrafterModel, TargetModel
from ondevice_export.options import ExportOptions, Widths
from ondevice_export.quantize import BLOCK
from ondevice_export.tensor_names import Shapes


def write_target(directory: Path, target: TargetModel, options: ExportOptions, advance: Advance) -> StoredMatrix:
    """Write `target.onnx` and its data; returns where the token table lies."""
    with _graph(directory / TARGET_GRAPH, target.checkpoint, options.target_widths, advance) as (tape, weights):
        graph = TargetGraph(Block(tape, target.config, weights.at(target.prefix)))
        graph.build()
    return graph.table


def write_drafter(
    directory: Path,
    drafter: DrafterModel,
    table: StoredMatrix,
    options: ExportOptions,
    advance: Advance,
) -> None:
    """Write `drafter.onnx` and its data; its token embedding is the target's `table`, not a copy."""
    with _graph(directory / DRAFTER_GRAPH, drafter.checkpoint, options.drafter_widths, advance) as (tape, weights):
        DrafterGraph(tape, drafter.config, weights, drafter.checkpoint, table).build()


def count_weights(shapes: Shapes) -> int:
    """Weights in matrices, which is what progress counts."""
    return sum(math.prod(shape) for shape in shapes.values() if len(shape) == 2)


def estimate_bytes(shapes: Shapes, widths: Widths) -> int:
    """Size of a data file, scales included; a little too much where scales are fp16."""
    total = 0.0
    for name, shape in shapes.items():
        bits = widths.head if name.endswith("embed_tokens.weight") else widths.layers
        stored = 32 if len(shape) == 1 or bits == 32 else bits + 32 / BLOCK
        total += math.prod(shape) * stored / 8
    return int(total)


@contextmanager
def _graph(path: Path, checkpoint: Checkpoint, widths: Widths, advance: Advance) -> Iterator[tuple[Tape, Weights]]:
    """A tape and weights to record with; the graph is saved when both are complete."""
    tape = Tape(path.stem)
    with DataFile(path.with_name(f"{path.name}.data")) as file, MatrixWriter(advance) as writer:
        yield tape, Weights(tape, checkpoint, file, writer, widths=widths)
    ir.save(tape.model(tool_versions()["ondevice"]), path)
