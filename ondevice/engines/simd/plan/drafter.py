"""One MTP step as a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ondevice.engines.simd.buffers import Buffers
from ondevice.engines.simd.graph.model import Centroids, DrafterModel, Matrix
from ondevice.engines.simd.kernels import slots
from ondevice.engines.simd.kernels.shortlist_layouts import CandidateLogits, CentroidScores, Shortlist
from ondevice.engines.simd.kernels.sizes import TILE
from ondevice.engines.simd.lookup_settings import LookupSettings
from ondevice.engines.simd.pack.layout import Packed, PackLayout
from ondevice.engines.simd.plan.builder import PlanBuilder
from ondevice.engines.simd.plan.layer import (
    LayerPlace,
    PackedLayer,
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
class PackedDrafter:
    """Where the drafter's matrices lie in the pack."""

    pre_projection: Packed
    layers: list[PackedLayer]
    head: Packed | None
    """None for a centroid head, whose rows are read where the file is mapped."""
    post_projection: Packed


def pack_drafter(layout: PackLayout, model: DrafterModel) -> PackedDrafter:
    head = None if isinstance(model.head, Centroids) else layout.add(model.head)
    layers = [pack_layer(layout, layer) for layer in model.layers]
    return PackedDrafter(layout.add(model.pre_projection), layers, head, layout.add(model.post_projection))


@dataclass(frozen=True)
class DrafterPlan:
    """Steps, where a step's input lies, and what its output looks like: the slots LOGITS and NEXT_HIDDEN say where."""

    steps: NDArray[np.int64]
    token: NDArray[np.int64]
    """[1], written before a step: where the slot TOKENS must point."""
    target_hidden: NDArray[np.float32]
    """[H], written before a step."""
    normed: NDArray[np.float32]
    """The drafter's own hidden state: where the slot HIDDEN must point."""
    candidates: NDArray[np.int64]
    """[C]: how the array at the slot CANDIDATES must begin: a head over the whole vocabulary writes no ids."""
    logits_width: int
    """Floats at the slot LOGITS: C, padded to whole tiles."""


def drafter_plan(
    model: DrafterModel,
    packed: PackedDrafter,
    caches: Mapping[int, int],
    pack: NDArray[np.uint8],
    buffers: Buffers,
    lookup: LookupSettings | None = None,
) -> DrafterPlan:
    """The steps from a token and a hidden state to candidates, their logits, and the next hidden state.

    Args:
        model: what to compute.
        packed, pack: its matrices.
        caches: target layer -> the place of its cache in a sequence's record.
        buffers: what keeps all memory of the plan.
        lookup: as in `target_plan`.
    """
    builder = PlanBuilder(pack, buffers, 1, model.eps)
    chooses = None if lookup is None else lookup_plan(builder, lookup, model.layers, len(caches))
    backbone, width = model.table.width, len(model.norm)
    joined = np.zeros(2 * backbone, np.float32)
    builder.embed(model.table, model.embedding_factor, buffers.hold(joined), 0)
    wide = builder.activations(2 * backbone, [model.pre_projection])
    builder.quantize(slots.ALL, buffers.hold(joined), 2 * backbone, wide, model.pre_projection)
    outer, inner = widest(model.layers, width)
    hidden, scratch = builder.rows(width), builder.rows(outer)
    entry = builder.activations(width, [*entry_readers(model.layers), model.post_projection])
    work = Workspace(hidden, scratch, entry, builder.activations(inner, inner_readers(model.layers)))
    builder.project(slots.ALL, packed.pre_projection, wide, work.hidden)
    first = model.layers[0]
    builder.norm_quantize(slots.ALL, work.hidden, first.input_norm, work.entry, first.attention.query)
    for index, layer in enumerate(model.layers):
        after = model.layers[index + 1] if index + 1 < len(model.layers) else None
        following = None if after is None else first_input(after)
        place = LayerPlace(slots.ALL, work, caches[layer.attention.source], lookup=chooses, following=following)
        build_layer(builder, layer, packed.layers[index], place)
    normed = np.zeros(width, np.float32)
    post = packed.post_projection
    builder.norm_quantize(slots.ALL, work.hidden, model.norm, work.entry, model.post_projection, slots.HIDDEN)
    builder.project(slots.ALL, post, work.entry, out_slot=slots.NEXT_HIDDEN)
    candidates, logits_width = _head(builder, model.head, packed.head, buffers.hold(normed), width)
    token = np.zeros(1, np.int64)
    return DrafterPlan(builder.plan(), token, joined[backbone:], normed, candidates, logits_width)


def _head(
    builder: PlanBuilder, head: Centroids | Matrix, packed: Packed | None, normed: int, width: int
) -> tuple[NDArray[np.int64], int]:
    """Score the candidates; their ids as far as they are known, and the floats that their logits need."""
    if isinstance(head, Centroids):
        return _centroid_head(builder, head, normed, width)
    assert packed is not None
    activations = builder.activations(width, [head])
    builder.quantize(slots.ALL, normed, width, activations, head)
    builder.project(slots.ALL, packed, activations, out_slot=slots.LOGITS)
    return np.arange(head.rows), packed.tiles * TILE


def _centroid_head(builder: PlanBuilder, head: Centroids, normed: int, width: int) -> tuple[NDArray[np.int64], int]:
    buffers = builder.buffers
    count = head.top * head.per_cluster
    scores, chosen = buffers.floats(len(head.weights)), buffers.bytes(8 * head.top)
    builder.add(CentroidScores(buffers.hold(head.weights), len(head.weights), width, normed, scores))
    builder.add(Shortlist(scores, len(head.weights), chosen, head.top, 1, len(head.weights)))
    ids = buffers.hold(head.ids)
    table = builder.table(head.table)
    builder.add(CandidateLogits(*table, width, normed, chosen, head.top, head.per_cluster, ids, 1, 1, 0))
    return np.zeros(count, np.int64), count
