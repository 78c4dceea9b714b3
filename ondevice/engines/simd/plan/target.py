"""The target's forward as plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ondevice.engines.layer_path import WHOLE, LayerPath
from ondevice.engines.protocol import ExpertShare
from ondevice.engines.simd.buffers import Buffers, float_bits
from ondevice.engines.simd.graph.model import PerLayerInputs as PerLayerEmbeddings
from ondevice.engines.simd.graph.model import TargetModel
from ondevice.engines.simd.kernels import slots
from ondevice.engines.simd.kernels.row_layouts import PerLayer
from ondevice.engines.simd.lookup_settings import LookupSettings
from ondevice.engines.simd.pack.layout import Packed, PackLayout
from ondevice.engines.simd.plan.builder import PlanBuilder
from ondevice.engines.simd.plan.experts import room_for_choice
from ondevice.engines.simd.plan.layer import (
    Input,
    LayerPlace,
    PackedLayer,
    PerLayerInputs,
    Workspace,
    build_layer,
    entry_readers,
    first_input,
    inner_readers,
    lookup_plan,
    pack_layer,
    widest,
)


@dataclass(frozen=True)
class PackedTarget:
    """Where the target's matrices lie in the pack."""

    layers: list[PackedLayer]
    per_layer: Packed | None
    head: Packed


def pack_target(layout: PackLayout, model: TargetModel) -> PackedTarget:
    per_layer = None if model.per_layer is None else layout.add(model.per_layer.projection)
    return PackedTarget([pack_layer(layout, layer) for layer in model.layers], per_layer, layout.add(model.head))


def expert_share(model: TargetModel, packed: PackedTarget) -> ExpertShare | None:
    """What reading an expert costs, where all layers that have experts have as many; None where there are none."""
    sizes = {(len(layer.experts.scale), layer.experts.top) for layer in model.layers if layer.experts is not None}
    if len(sizes) != 1:
        return None
    [(count, top)] = sizes
    experts = sum(each.experts.nbytes for each in packed.layers if each.experts is not None)
    others = [packed.head, *(matrix for layer in packed.layers for matrix in layer.dense())]
    if packed.per_layer is not None:
        others.append(packed.per_layer)
    return ExpertShare(count, top, experts / (sum(each.nbytes for each in others) + top * experts))


class TargetPlanner:
    """Plans of the target's forward: all of it, or pieces that meet at a layer, along a path with sub-layers left out.

    All plans share their buffers, so what one piece leaves in the residual stream is where the next one reads it.

    Attributes:
        streams: the residual stream of all rows, float32[most_rows, H], as far as the layers before
            `first_shared_layer` go; and where there are any, the rows' per-layer embeddings.
        ends: the residual stream of the wanted rows where their path ends, float32[most_rows, H].
    """

    def __init__(
        self,
        model: TargetModel,
        packed: PackedTarget,
        caches: Mapping[int, int],
        pack: NDArray[np.uint8],
        buffers: Buffers,
        most_rows: int,
        threads: int,
        lookup: LookupSettings | None = None,
    ) -> None:
        """
        Args:
            model: what to compute.
            packed, pack: its matrices.
            caches: layer -> the place of its cache in a sequence's record.
            buffers: what keeps all memory of the plans.
            most_rows: of one forward.
            threads: that will run it.
            lookup: how layers of full attention choose keys; None where they attend to all.
        """
        self._model, self._packed, self._caches = model, packed, caches
        self._builder = builder = PlanBuilder(pack, buffers, most_rows, model.eps)
        self._lookup = None if lookup is None else lookup_plan(builder, lookup, model.layers, len(caches))
        outer, inner = widest(model.layers, model.width)
        hidden, address = buffers.rows(most_rows, model.width)
        readers = [*entry_readers(model.layers), model.head]
        if model.per_layer is not None:
            readers.append(model.per_layer.projection)
        entry = builder.activations(model.width, readers)
        inputs = builder.activations(inner, inner_readers(model.layers))
        self._work = Workspace(address, builder.rows(outer), entry, inputs)
        self.ends, address = buffers.rows(most_rows, model.width)
        self._chosen = Workspace(address, self._work.scratch, entry, inputs)
        self.streams = [hidden]
        self._per_layer: PerLayerInputs | None = None
        self._kept_per_layer: PerLayerInputs | None = None
        self._per_layer_step: PerLayer | None = None
        if model.per_layer is not None:
            self._add_per_layer(model.per_layer, most_rows, threads)
        experts = [layer.experts for layer in model.layers if layer.experts is not None]
        self._choice = room_for_choice(builder, experts) if experts else None

    def stops_at(self, path: LayerPath) -> int:
        """The layer that ends the part which all rows of a forward pass, be they wanted or not."""
        shared = self._model.first_shared_layer
        return shared if path.stop is None else min(path.stop, shared)

    def whole(self, path: LayerPath = WHOLE) -> NDArray[np.int64]:
        """The steps from token ids to a path's outputs, int64[steps, WIDTH]."""
        self._embed(path)
        self._layers(path, 0, self.stops_at(path), slots.ALL)
        return self._to_outputs(path)

    def lower(self, path: LayerPath, stop: int) -> NDArray[np.int64]:
        """Those from token ids to the residual stream before a layer, at most the one that `stops_at` says."""
        self._embed(path)
        self._layers(path, 0, stop, slots.ALL)
        return self._builder.plan()

    def upper(self, path: LayerPath, start: int) -> NDArray[np.int64]:
        """Those from there to the path's outputs."""
        stop = self.stops_at(path)
        if start < stop:
            self._enter(path, start, slots.ALL, self._work)
            self._layers(path, start, stop, slots.ALL)
        return self._to_outputs(path)

    def _embed(self, path: LayerPath) -> None:
        model, builder, work = self._model, self._builder, self._work
        builder.embed(model.table, model.embedding_factor, work.hidden, 4 * model.width)
        own, step, packed = model.per_layer, self._per_layer_step, self._packed.per_layer
        if own is not None and step is not None and packed is not None:
            builder.quantize(slots.ALL, work.hidden, model.width, work.entry, own.projection)
            builder.project(slots.ALL, packed, work.entry, step.context)
            builder.add(step)
        self._enter(path, 0, slots.ALL, work)

    def _to_outputs(self, path: LayerPath) -> NDArray[np.int64]:
        """From the residual stream before `stops_at`, of the wanted rows only."""
        model, builder, chosen = self._model, self._builder, self._chosen
        builder.select(self._work.hidden, chosen.hidden, model.width)
        start, stop = self.stops_at(path), len(model.layers) if path.stop is None else path.stop
        if start < stop:
            if self._per_layer is not None and self._kept_per_layer is not None:
                width = self._per_layer.layers * self._per_layer.size
                builder.select(self._per_layer.address, self._kept_per_layer.address, width)
            self._enter(path, start, slots.WANTED, chosen)
            self._layers(path, start, stop, slots.WANTED)
        if path.stop is None:
            head = self._packed.head
            builder.norm_quantize(slots.WANTED, chosen.hidden, model.norm, chosen.entry, model.head, slots.HIDDEN)
            builder.project(slots.WANTED, head, chosen.entry, out_slot=slots.LOGITS, cap=model.cap)
        return builder.plan()

    def _enter(self, path: LayerPath, index: int, row_set: int, work: Workspace) -> None:
        """Quantise what the layer reads first, where no layer before it in the plan has."""
        entry = self._input(path, index)
        if entry is None:
            return
        if entry.norm is None:
            self._builder.quantize(row_set, work.hidden, self._model.width, work.entry, entry.reader)
        else:
            self._builder.norm_quantize(row_set, work.hidden, entry.norm, work.entry, entry.reader)

    def _input(self, path: LayerPath, index: int) -> Input | None:
        layer = self._model.layers[index]
        return first_input(
            layer, without_attention=index in path.without_attention, without_mlp=index in path.without_mlp
        )

    def _layers(self, path: LayerPath, start: int, stop: int, row_set: int) -> None:
        work, per_layer = self._work, self._per_layer
        if row_set == slots.WANTED:
            work, per_layer = self._chosen, self._kept_per_layer
        for index in range(start, stop):
            layer = self._model.layers[index]
            place = LayerPlace(
                row_set,
                work,
                self._caches[layer.attention.source],
                per_layer,
                self._lookup,
                self._input(path, index + 1) if index + 1 < stop else None,
                without_attention=index in path.without_attention,
                without_mlp=index in path.without_mlp,
                choice=self._choice,
            )
            build_layer(self._builder, layer, self._packed.layers[index], place)

    def _add_per_layer(self, model: PerLayerEmbeddings, most_rows: int, threads: int) -> None:
        builder, width = self._builder, model.layers * model.size
        rows, address = builder.buffers.rows(most_rows, width)
        self.streams.append(rows)
        self._per_layer = PerLayerInputs(address, model.layers, model.size)
        if self._model.first_shared_layer < len(self._model.layers):
            self._kept_per_layer = PerLayerInputs(builder.rows(width), model.layers, model.size)
        self._per_layer_step = PerLayer(
            self._per_layer.address,
            model.layers,
            model.size,
            builder.eps,
            builder.constant(model.norm),
            *builder.table(model.table),
            context_factor=float_bits(model.context_factor),
            row_factor=float_bits(model.row_factor),
            factor=float_bits(model.factor),
            scratch=builder.buffers.floats(threads * width),
        )
