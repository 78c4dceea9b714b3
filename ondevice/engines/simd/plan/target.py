"""The target's forward as a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ondevice.engines.simd.buffers import Buffers, float_bits
from ondevice.engines.simd.graph.model import TargetModel
from ondevice.engines.simd.kernels import slots
from ondevice.engines.simd.kernels.step_layouts import PerLayer
from ondevice.engines.simd.lookup_settings import LookupSettings
from ondevice.engines.simd.pack.layout import Packed, PackLayout
from ondevice.engines.simd.plan.builder import PlanBuilder
from ondevice.engines.simd.plan.layer import (
    LayerPlace,
    NextInput,
    PackedLayer,
    PerLayerInputs,
    Workspace,
    build_layer,
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


def target_plan(
    model: TargetModel,
    packed: PackedTarget,
    caches: Mapping[int, int],
    pack: NDArray[np.uint8],
    buffers: Buffers,
    most_rows: int,
    threads: int,
    lookup: LookupSettings | None = None,
) -> NDArray[np.int64]:
    """The steps from token ids to logits.

    Args:
        model: what to compute.
        packed, pack: its matrices.
        caches: layer -> the place of its cache in a sequence's record.
        buffers: what keeps all memory of the plan.
        most_rows: of one forward.
        threads: that will run it.
        lookup: how layers of full attention choose keys; None where they attend to all.
    """
    builder = PlanBuilder(pack, buffers, most_rows, model.eps)
    return _TargetPlan(model, packed, caches, builder, threads, lookup).build()


class _TargetPlan:
    def __init__(
        self,
        model: TargetModel,
        packed: PackedTarget,
        caches: Mapping[int, int],
        builder: PlanBuilder,
        threads: int,
        lookup: LookupSettings | None,
    ) -> None:
        self._model = model
        self._packed = packed
        self._caches = caches
        self._builder = builder
        self._threads = threads
        self._lookup = None if lookup is None else lookup_plan(builder, lookup, model.layers, len(caches))
        outer, inner = widest(model.layers, model.width)
        hidden = builder.rows(model.width)
        entry, inputs = builder.activations(model.width), builder.activations(inner)
        self._work = Workspace(hidden, builder.rows(outer), entry, inputs)

    def build(self) -> NDArray[np.int64]:
        model, builder, work = self._model, self._builder, self._work
        builder.embed(model.table, model.embedding_factor, work.hidden, 4 * model.width)
        per_layer = self._per_layer_inputs()
        first = model.layers[0]
        builder.norm_quantize(slots.ALL, work.hidden, first.input_norm, work.entry, first.attention.query)
        self._layers(0, model.first_shared_layer, slots.ALL, work, per_layer)
        chosen = Workspace(builder.rows(model.width), work.scratch, work.entry, work.inner)
        builder.select(work.hidden, chosen.hidden, model.width)
        if model.first_shared_layer < len(model.layers):
            if per_layer is not None:
                width = per_layer.layers * per_layer.size
                kept = PerLayerInputs(builder.rows(width), per_layer.layers, per_layer.size)
                builder.select(per_layer.address, kept.address, width)
                per_layer = kept
            entry = model.layers[model.first_shared_layer]
            query = entry.attention.query
            builder.norm_quantize(slots.WANTED, chosen.hidden, entry.input_norm, work.entry, query)
            self._layers(model.first_shared_layer, len(model.layers), slots.WANTED, chosen, per_layer)
        head = self._packed.head
        builder.norm_quantize(slots.WANTED, chosen.hidden, model.norm, work.entry, model.head, slots.HIDDEN)
        builder.project(slots.WANTED, head, work.entry, out_slot=slots.LOGITS, cap=model.cap)
        return builder.plan()

    def _layers(self, start: int, stop: int, row_set: int, work: Workspace, per_layer: PerLayerInputs | None) -> None:
        for index in range(start, stop):
            layer = self._model.layers[index]
            following = None
            if index + 1 < stop:
                after = self._model.layers[index + 1]
                following = NextInput(after.input_norm, after.attention.query)
            cache = self._caches[layer.attention.source]
            place = LayerPlace(row_set, work, cache, per_layer, self._lookup, following)
            build_layer(self._builder, layer, self._packed.layers[index], place)

    def _per_layer_inputs(self) -> PerLayerInputs | None:
        model, builder, work = self._model.per_layer, self._builder, self._work
        if model is None or self._packed.per_layer is None:
            return None
        width = model.layers * model.size
        per_layer = PerLayerInputs(builder.rows(width), model.layers, model.size)
        builder.quantize(slots.ALL, work.hidden, self._model.width, work.entry, model.projection)
        builder.project(slots.ALL, self._packed.per_layer, work.entry, per_layer.address)
        builder.add(
            PerLayer(
                per_layer.address,
                model.layers,
                model.size,
                builder.eps,
                builder.buffers.constant(model.norm),
                *builder.table(model.table),
                context_factor=float_bits(model.context_factor),
                row_factor=float_bits(model.row_factor),
                factor=float_bits(model.factor),
                scratch=builder.buffers.floats(self._threads * width),
            )
        )
        return per_layer
