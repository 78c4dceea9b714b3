"""The plans of the target's forward: the whole forward, or its lower and upper part."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from ondevice.engines.layer_path import WHOLE, LayerPath
from ondevice.engines.protocol import ExpertShare
from ondevice.engines.simd.buffers import Buffers, float_bits
from ondevice.engines.simd.caches import LookupSettings
from ondevice.engines.simd.kernels.steps import slots
from ondevice.engines.simd.kernels.steps.layouts import PerLayer
from ondevice.engines.simd.model import PerLayerInputs as PerLayerEmbeddings
from ondevice.engines.simd.model import TargetModel
from ondevice.engines.simd.pack_layout import Packed, PackLayout
from ondevice.engines.simd.plan.builder import PlanBuilder
from ondevice.engines.simd.plan.experts import room_for_choice
from ondevice.engines.simd.plan.layer import (
    Input,
    LayerPlace,
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
from ondevice.engines.simd.tensor_files import Matrix

EMBEDDING_STEPS = 1
"""Steps at the beginning of a whole or lower plan that write the token embeddings to the residual stream, and nothing
else: after them, the rows of pictures take the place of those of their tokens."""


def pack_target(layout: PackLayout, model: TargetModel) -> None:
    """Add the target's matrices to the pack. This comes before those of any other model."""
    for layer in model.layers:
        pack_layer(layout, layer)
    if model.per_layer is not None:
        layout.add(model.per_layer.projection)
    layout.add(model.head)


def expert_share(model: TargetModel, places: Mapping[Matrix, Packed]) -> ExpertShare | None:
    """The cost of reading an expert. None if no layer has experts, or layers differ in their number of experts or top.

    Args:
        model: the target.
        places: places of the target's matrices, without those of other models.
    """
    layers = [layer.experts for layer in model.layers if layer.experts is not None]
    sizes = {(len(experts.scale), experts.top) for experts in layers}
    if len(sizes) != 1:
        return None
    [(count, top)] = sizes
    every = sum(places[first].nbytes for experts in layers for first in (experts.gate_up[0], experts.down[0]))
    others, one = sum(packed.nbytes for packed in places.values()) - every, every // count
    return ExpertShare(count, top, one / (others + top * one))


class TargetPlanner:
    """Makes plans of the target's forward: all of it, or the parts before and after a layer.

    A path says which sub-layers are left out. All plans share their buffers, so an upper part reads the residual stream
    where a lower part has written it.

    Attributes:
        streams: the residual stream of all rows, float32[most_rows, H], which layers before `first_shared_layer`
            update; then the per-layer embeddings of all rows, float32[most_rows, layers * size], if there are any.
        ends: the residual stream of the wanted rows at the end of their path, float32[most_rows, H].
    """

    def __init__(
        self,
        model: TargetModel,
        places: Mapping[Matrix, Packed],
        caches: Mapping[int, int],
        pack: NDArray[np.uint8],
        buffers: Buffers,
        most_rows: int,
        threads: int,
        lookup: LookupSettings | None = None,
    ) -> None:
        """Allocate the buffers that all plans share.

        Args:
            model: the target.
            places, pack: places of its matrices in the pack, and the pack.
            caches: layer -> index of its cache in a sequence's record.
            buffers: allocates and keeps the memory of the plans.
            most_rows: most rows of one forward.
            threads: number of threads that will run the plans.
            lookup: how layers with full attention choose keys; None for exact attention.
        """
        self._model, self._caches = model, caches
        self._builder = builder = PlanBuilder(places, pack, buffers, most_rows, model.config.norm_eps)
        self._lookup = None if lookup is None else lookup_plan(builder, lookup, model.layers, len(caches))
        outer, inner = widest(model.layers, model.config.hidden_size)
        hidden, address = buffers.rows(most_rows, model.config.hidden_size)
        readers = [*entry_readers(model.layers), model.head]
        if model.per_layer is not None:
            readers.append(model.per_layer.projection)
        entry = builder.activations(model.config.hidden_size, readers)
        inputs = builder.activations(inner, inner_readers(model.layers))
        self._work = Workspace(address, builder.rows(outer), entry, inputs)
        self.ends, address = buffers.rows(most_rows, model.config.hidden_size)
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
        """Index of the layer before which all rows are computed; from there on, only the wanted rows are."""
        shared = self._model.config.first_shared_layer
        return shared if path.stop is None else min(path.stop, shared)

    def whole(self, path: LayerPath = WHOLE) -> NDArray[np.int64]:
        """The plan from token ids to the outputs of a path, int64[steps, WIDTH].

        Outputs are logits and hidden states; of a path that stops at a layer, the residual stream there (`ends`).
        """
        self._embed(path)
        self._layers(path, 0, self.stops_at(path), slots.ALL)
        return self._to_outputs(path)

    def lower(self, path: LayerPath, stop: int) -> NDArray[np.int64]:
        """The plan from token ids to the residual stream before the layer `stop`, which is at most `stops_at(path)`."""
        self._embed(path)
        self._layers(path, 0, stop, slots.ALL)
        return self._builder.plan()

    def upper(self, path: LayerPath, start: int) -> NDArray[np.int64]:
        """The plan from the residual stream before the layer `start` to the outputs of a path; see `whole`."""
        stop = self.stops_at(path)
        if start < stop:
            self._enter(path, start, slots.ALL, self._work)
            self._layers(path, start, stop, slots.ALL)
        return self._to_outputs(path)

    def _embed(self, path: LayerPath) -> None:
        model, builder, work = self._model, self._builder, self._work
        builder.embed(model.table, model.config.embedding_factor, work.hidden, 4 * model.config.hidden_size)
        own, step = model.per_layer, self._per_layer_step
        if own is not None and step is not None:
            builder.quantize(slots.ALL, work.hidden, model.config.hidden_size, work.entry, own.projection)
            builder.project(slots.ALL, own.projection, work.entry, step.context)
            builder.add(step)
        self._enter(path, 0, slots.ALL, work)

    def _to_outputs(self, path: LayerPath) -> NDArray[np.int64]:
        """Add the steps of the wanted rows, from the residual stream before `stops_at(path)`; returns the plan."""
        model, builder, chosen = self._model, self._builder, self._chosen
        builder.select(self._work.hidden, chosen.hidden, model.config.hidden_size)
        start, stop = self.stops_at(path), len(model.layers) if path.stop is None else path.stop
        if start < stop:
            if self._per_layer is not None and self._kept_per_layer is not None:
                width = self._per_layer.layers * self._per_layer.size
                builder.select(self._per_layer.address, self._kept_per_layer.address, width)
            self._enter(path, start, slots.WANTED, chosen)
            self._layers(path, start, stop, slots.WANTED)
        if path.stop is None:
            builder.norm_quantize(slots.WANTED, chosen.hidden, model.norm, chosen.entry, model.head, slots.HIDDEN)
            builder.project(slots.WANTED, model.head, chosen.entry, out_slot=slots.LOGITS, cap=model.config.softcap)
        return builder.plan()

    def _enter(self, path: LayerPath, index: int, row_set: int, work: Workspace) -> None:
        """Quantise the input of the layer that a part begins with; each layer quantises the input of the next one."""
        entry = self._input(path, index)
        if entry is None:
            return
        if entry.norm is None:
            self._builder.quantize(row_set, work.hidden, self._model.config.hidden_size, work.entry, entry.reader)
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
            build_layer(self._builder, layer, place)

    def _add_per_layer(self, model: PerLayerEmbeddings, most_rows: int, threads: int) -> None:
        builder, width = self._builder, model.layers * model.size
        rows, address = builder.buffers.rows(most_rows, width)
        self.streams.append(rows)
        self._per_layer = PerLayerInputs(address, model.layers, model.size)
        if self._model.config.first_shared_layer < len(self._model.layers):
            self._kept_per_layer = PerLayerInputs(builder.rows(width), model.layers, model.size)
        context_factor, row_factor, factor = model.factors
        self._per_layer_step = PerLayer(
            self._per_layer.address,
            model.layers,
            model.size,
            builder.eps,
            builder.constant(model.norm),
            *builder.table(model.table),
            context_factor=float_bits(context_factor),
            row_factor=float_bits(row_factor),
            factor=float_bits(factor),
            scratch=builder.buffers.floats(threads * width),
        )
