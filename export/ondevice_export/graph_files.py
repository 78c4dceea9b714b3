"""Writes a bundle's ONNX graphs and their data files."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import onnx_ir as ir

from ondevice.bundle_format.audio import AudioEntry
from ondevice.bundle_format.interfaces import (
    Interface,
    audio_interface,
    drafter_interface,
    heads_interface,
    target_interface,
    vision_interface,
)
from ondevice.bundle_format.model_config import Target
from ondevice.bundle_format.tensor_table import EMBEDDING, HEAD, Shapes, TensorTable, is_plain
from ondevice.bundle_format.vision import VisionEntry
from ondevice.bundle_format.weight_format import FLOAT32
from ondevice.progress import Advance
from ondevice_export.calibration.source import FactorSource
from ondevice_export.checkpoint.directory import Checkpoint
from ondevice_export.checkpoint.heads import HeadsCheckpoint
from ondevice_export.checkpoint.models import DrafterCheckpoint, TargetCheckpoint
from ondevice_export.checkpoint.named_tensors import NamedTensors, TensorNames
from ondevice_export.checkpoint.quantized.gemma_modules import QuantizedModules
from ondevice_export.checkpoint.towers import PREFIX
from ondevice_export.data_file import DataFile
from ondevice_export.export_options import ExportOptions, Formats
from ondevice_export.graph.audio import AudioGraph
from ondevice_export.graph.drafter import DrafterGraph
from ondevice_export.graph.embedders import build_patch_embedder, build_sample_embedder
from ondevice_export.graph.graph_builder import GraphBuilder
from ondevice_export.graph.heads import HeadsGraph
from ondevice_export.graph.target import SharedWeights, TargetGraph
from ondevice_export.graph.vision import VisionGraph
from ondevice_export.graph.weights import Weights
from ondevice_export.manifest import tool_versions
from ondevice_export.matrices import MatrixWriter


class GraphFiles:
    """Writes the graphs of a bundle and their data files; the target's has to be written first.

    Attributes:
        tensors: the tensor tables of the graphs written so far, by the graph's file name.
    """

    def __init__(
        self, directory: Path, options: ExportOptions, advance: Advance, calibration: FactorSource | None = None
    ) -> None:
        """
        Args:
            directory: the directory that the files are written to.
            options: the export's options, which give the weight formats.
            advance: called with the number of weights written since the last call.
            calibration: the moments of the inputs of the target's matrices; None rounds without.
        """
        self.tensors: dict[str, TensorTable] = {}
        self._directory = directory
        self._options = options
        self._calibration = calibration
        self._advance = advance

    def write_target(self, target: TargetCheckpoint) -> SharedWeights:
        """Write `target.onnx` and its data; returns the stored weights that the other graphs read too."""
        interface = target_interface(target.config, takes_soft_rows=bool(target.vision or target.audio))
        formats, modules = self._options.target_formats, target.modules
        name, calibration = target.config.graph, self._calibration
        with self._graph(name, interface, target.tensors, formats, modules=modules, calibration=calibration) as (
            builder,
            weights,
        ):
            graph = TargetGraph(builder, target.config, weights)
            graph.build()
        return graph.shared

    def write_vision(self, vision: VisionEntry, target: TargetCheckpoint) -> None:
        """Write `vision.onnx` and its data."""
        interface, formats = vision_interface(vision, target.config), self._options.tower_formats
        with self._graph(vision.graph, interface, _of_towers(target), formats) as (builder, weights):
            if vision.layers:
                VisionGraph(builder, vision, weights).build()
            else:
                build_patch_embedder(builder, vision, weights)

    def write_audio(self, audio: AudioEntry, target: TargetCheckpoint) -> None:
        """Write `audio.onnx` and its data."""
        interface, formats = audio_interface(audio, target.config), self._options.tower_formats
        with self._graph(audio.graph, interface, _of_towers(target), formats) as (builder, weights):
            if audio.layers:
                AudioGraph(builder, audio, weights).build()
            else:
                build_sample_embedder(builder, audio, weights)

    def write_drafter(self, drafter: DrafterCheckpoint, target: Target, shared: SharedWeights) -> None:
        """Write `drafter.onnx` and its data; it reads the target's `shared` weights, not copies."""
        config, formats = drafter.config, self._options.drafter_formats
        interface = drafter_interface(config, target)
        with self._graph(config.graph, interface, drafter.tensors, formats) as (builder, weights):
            DrafterGraph(builder, config, target, weights, shared, head_tokens=drafter.head_tokens).build()

    def write_heads(self, heads: HeadsCheckpoint, target: Target, shared: SharedWeights) -> None:
        """Write a graph and its data for each kind of heads; all read the target's token embedding, not a copy."""
        for each in heads.heads:
            interface, formats = heads_interface(each, target), self._options.drafter_formats
            with self._graph(each.graph, interface, NamedTensors(heads.checkpoint), formats) as (builder, weights):
                HeadsGraph(builder, each, target, weights, shared.table).build()

    @contextmanager
    def _graph(
        self,
        name: str,
        interface: Interface,
        tensors: NamedTensors,
        formats: Formats,
        *,
        modules: QuantizedModules | None = None,
        calibration: FactorSource | None = None,
    ) -> Iterator[tuple[GraphBuilder, Weights]]:
        """Give a graph builder and its weights; the graph is saved after all weights have been written."""
        path, data = self._directory / name, f"{name}.data"
        builder, made, goes_on = GraphBuilder(path.stem, interface), self._directory / data, False
        unfinished = None if calibration is None else calibration.unfinished
        if unfinished is not None:
            made, goes_on = unfinished.directory / data, unfinished.layers > 0
        with DataFile(made, goes_on=goes_on) as file, MatrixWriter(self._advance) as writer:
            weights = Weights(tensors, file, writer, formats=formats, modules=modules, calibration=calibration)
            yield builder, weights
        if unfinished is not None:
            unfinished.save(0)
            made.replace(self._directory / data)
        ir.save(builder.model(tool_versions()["ondevice"]), path)
        self.tensors[name] = TensorTable(data, weights.tensors)


def _of_towers(target: TargetCheckpoint) -> NamedTensors:
    """The tensors of a target's vision and audio towers."""
    return NamedTensors(target.checkpoint, TensorNames(PREFIX))


def count_weights(shapes: Shapes) -> int:
    """Number of weights in all matrices: the unit in which an export reports its progress."""
    return sum(math.prod(shape) for shape in shapes.values() if len(shape) > 1)


def estimate_bytes(shapes: Shapes, formats: Formats, checkpoint: Checkpoint | None = None) -> int:
    """Bytes of a data file, scales and minimums included; slightly overestimated: fp16 scales count as float32.

    Args:
        shapes: the shapes of all tensors by their names in the checkpoint.
        formats: the graph's weight formats.
        checkpoint: the checkpoint, if formats of its own may be kept.
    """
    total = 0
    for name, shape in shapes.items():
        form = formats.head if name.endswith((EMBEDDING, HEAD)) else formats.layers
        if checkpoint is not None:
            form = formats.of(checkpoint, name, form)
        stored = FLOAT32 if is_plain(name, shape) else form
        total += stored.bytes(math.prod(shape))
        if stored.quantised:
            total += (8 if stored.affine else 4) * math.prod(shape[:-1]) * stored.scales(shape[-1])
    return total
