"""The plans of the target's forward: the whole forward, or its lower or upper part."""

from __future__ import annotations

from collections.abc import Mapping

from ondevice.engines.layer_path import WHOLE, LayerPath
from ondevice.engines.protocol import ExpertShare
from ondevice.engines.simd.buffers import float_bits
from ondevice.engines.simd.caches import LookupSettings
from ondevice.engines.simd.kernels.contract import slots
from ondevice.engines.simd.kernels.contract.steps import PerLayer, Residual, Select
from ondevice.engines.simd.model import TargetModel
from ondevice.engines.simd.pack_layout import Packed, PackLayout
from ondevice.engines.simd.plan.builder import Plan, PlanBuilder
from ondevice.engines.simd.plan.layer import LayerPlanner, Stream, pack_layer
from ondevice.engines.simd.plan.mtp import MtpPlanner, pack_mtp
from ondevice.engines.simd.tensor_files import Matrix

EMBEDDING_STEPS = 1
"""Steps at the beginning of a plan from token ids that write the token embeddings to the residual stream, and nothing
else: after them, the rows of pictures take the place of those of their tokens."""


def pack_target(layout: PackLayout, model: TargetModel) -> None:
    """Add the target's matrices to the pack. This comes before those of any other model."""
    for layer in model.layers:
        pack_layer(layout, layer)
    if model.per_layer is not None:
        layout.add(model.per_layer.projection)
    layout.add(model.head)
    if model.mtp is not None:
        pack_mtp(layout, model.mtp)


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
    """Makes plans of the target's forward: all of it, or the part before or after a layer.

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
        builder: PlanBuilder,
        caches: Mapping[int, int],
        threads: int,
        lookup: LookupSettings | None = None,
    ) -> None:
        """Allocate the buffers that all plans share, which `threads` threads will run.

        builder, caches, lookup: as for `LayerPlanner`
        """
        self._model, self._builder, config = model, builder, model.config
        buffers, most_rows = builder.buffers, builder.most_rows
        self._layers = LayerPlanner(builder, model, caches, lookup)
        hidden, address = buffers.rows(most_rows, config.hidden_size)
        self.ends, end_address = buffers.rows(most_rows, config.hidden_size)
        self.streams = [hidden]
        self._all, self._wanted = Stream(slots.ALL, address), Stream(slots.WANTED, end_address)
        self._per_layer_width = 0 if config.per_layer is None else len(model.layers) * config.per_layer.width
        if self._per_layer_width:
            rows, address = buffers.rows(most_rows, self._per_layer_width)
            self.streams.append(rows)
            self._all = self._all._replace(per_layer=address)
            self._wanted = self._wanted._replace(per_layer=builder.rows(self._per_layer_width))
            self._scratch = buffers.floats(threads * self._per_layer_width)
        self._mtp: MtpPlanner | None = None
        if model.mtp is not None and config.mtp is not None:
            self._mtp = MtpPlanner(
                builder, model, model.mtp, caches, (config, config.mtp.rotary), builder.rows(config.hidden_size)
            )

    def stops_at(self, path: LayerPath) -> int:
        """Index of the layer before which all rows are computed; from there on, only the wanted rows are."""
        shared = self._model.config.first_shared_layer
        return shared if path.stop is None else min(path.stop, shared)

    def plan(self, path: LayerPath = WHOLE, start: int = 0, stop: int | None = None) -> Plan:
        """A part of a forward along a path.

        Args:
            path: the layers and sub-layers that are run.
            start: 0 to begin with token ids, else the layer before which the residual stream was left.
            stop: the layer, at most `stops_at(path)`, before which the residual stream is left; None for the outputs:
                logits and hidden states or, of a path that stops at a layer, the residual stream there (`ends`).
        """
        if not start:
            self._embed()
        self._layers.add(self._all, start, self.stops_at(path) if stop is None else stop, path)
        if stop is None:
            self._to_outputs(path)
        return self._builder.plan()

    def _embed(self) -> None:
        model, builder, hidden, entry = self._model, self._builder, self._all.hidden, self._layers.entry
        config, own, embeddings = model.config, model.per_layer, model.config.per_layer
        builder.embed(model.table, config.embedding_factor, hidden, 4 * config.hidden_size)
        if own is None or embeddings is None:
            return
        builder.quantize(slots.ALL, hidden, config.hidden_size, entry, own.projection)
        builder.project(slots.ALL, own.projection, entry, self._all.per_layer)
        builder.add(
            PerLayer(
                self._all.per_layer,
                len(model.layers),
                embeddings.width,
                builder.eps,
                builder.constant(own.norm),
                builder.table(own.table),
                context_factor=float_bits(embeddings.context_factor),
                row_factor=float_bits(embeddings.table_factor),
                factor=float_bits(embeddings.factor),
                scratch=self._scratch,
            )
        )

    def _to_outputs(self, path: LayerPath) -> None:
        """Add the steps of the wanted rows, from the residual stream before `stops_at(path)`."""
        model, builder, layers, wanted = self._model, self._builder, self._layers, self._wanted
        width = model.config.hidden_size
        builder.add(Select(self._all.hidden, wanted.hidden, width))
        start, stop = self.stops_at(path), len(model.layers) if path.stop is None else path.stop
        if start < stop and model.per_layer is not None:
            builder.add(Select(self._all.per_layer, wanted.per_layer, self._per_layer_width))
        layers.add(wanted, start, stop, path)
        if path.stop is None:
            normed = slots.HIDDEN
            if self._mtp is not None:
                normed = 0
                builder.add(Residual(slots.WANTED, wanted.hidden, width, builder.eps, out_slot=slots.HIDDEN))
                if path.is_whole:
                    self._mtp.add_rows(self._all.hidden)
            builder.quantize(slots.WANTED, wanted.hidden, width, layers.entry, model.head, model.norm, normed)
            builder.project(slots.WANTED, model.head, layers.entry, out_slot=slots.LOGITS, cap=model.config.softcap)
