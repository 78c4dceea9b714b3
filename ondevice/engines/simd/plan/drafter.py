"""The plan of one step of the MTP drafter: from a token and a hidden state to candidates and the next hidden state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ondevice.engines.simd.buffers import Buffers
from ondevice.engines.simd.caches import LookupSettings
from ondevice.engines.simd.kernels.matmul.sizes import TILE
from ondevice.engines.simd.kernels.steps import slots
from ondevice.engines.simd.kernels.steps.layouts import CandidateLogits, CentroidScores, Shortlist
from ondevice.engines.simd.model import Centroids, DrafterModel
from ondevice.engines.simd.pack_layout import Packed, PackLayout
from ondevice.engines.simd.plan.builder import PlanBuilder
from ondevice.engines.simd.plan.layer import (
    LayerPlace,
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


def pack_drafter(layout: PackLayout, model: DrafterModel) -> None:
    """Add the drafter's matrices to the pack. A centroid head is left out: its rows are read from the mapped file."""
    if isinstance(model.head, Matrix):
        layout.add(model.head)
    for layer in model.layers:
        pack_layer(layout, layer)
    layout.add(model.pre_projection)
    layout.add(model.post_projection)


@dataclass(frozen=True)
class DrafterPlan:
    """The plan of a draft step, the arrays of its input, and the sizes of its output.

    The caller sets the slots: TOKENS and HIDDEN to the arrays here, LOGITS, NEXT_HIDDEN and CANDIDATES to arrays of its
    own for the output.
    """

    steps: NDArray[np.int64]
    """int64[steps, WIDTH]"""
    token: NDArray[np.int64]
    """[1], the input token. The slot TOKENS must point to it."""
    target_hidden: NDArray[np.float32]
    """[H], the input hidden state, of the target's width."""
    normed: NDArray[np.float32]
    """Working memory for the drafter's own hidden state after the norm. The slot HIDDEN must point to it."""
    candidates: NDArray[np.int64]
    """[C], initial content of the array at the slot CANDIDATES: a head over the whole vocabulary writes no ids."""
    logits_width: int
    """Floats at the slot LOGITS: C, padded to whole tiles."""


def drafter_plan(
    model: DrafterModel,
    places: Mapping[Matrix, Packed],
    caches: Mapping[int, int],
    pack: NDArray[np.uint8],
    buffers: Buffers,
    lookup: LookupSettings | None = None,
) -> DrafterPlan:
    """Plan a step from a token and a hidden state to candidates, their logits, and the next hidden state.

    Args:
        model: the drafter.
        places, pack: places of its matrices in the pack, and the pack.
        caches: target layer -> index of its cache in a sequence's record.
        buffers: allocates and keeps the memory of the plan.
        lookup: how layers with full attention choose keys; None for exact attention.
    """
    builder = PlanBuilder(places, pack, buffers, 1, model.eps)
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
    builder.project(slots.ALL, model.pre_projection, wide, work.hidden)
    first = model.layers[0]
    builder.norm_quantize(slots.ALL, work.hidden, first.input_norm, work.entry, first.attention.query)
    for index, layer in enumerate(model.layers):
        after = model.layers[index + 1] if index + 1 < len(model.layers) else None
        following = None if after is None else first_input(after)
        place = LayerPlace(slots.ALL, work, caches[layer.attention.source], lookup=chooses, following=following)
        build_layer(builder, layer, place)
    normed = np.zeros(width, np.float32)
    builder.norm_quantize(slots.ALL, work.hidden, model.norm, work.entry, model.post_projection, slots.HIDDEN)
    builder.project(slots.ALL, model.post_projection, work.entry, out_slot=slots.NEXT_HIDDEN)
    candidates, logits_width = _head(builder, model.head, buffers.hold(normed), width)
    token = np.zeros(1, np.int64)
    return DrafterPlan(builder.plan(), token, joined[backbone:], normed, candidates, logits_width)


def _head(builder: PlanBuilder, head: Centroids | Matrix, normed: int, width: int) -> tuple[NDArray[np.int64], int]:
    """Add the head. Returns the initial content of the candidates, int64[C], and the floats that their logits take."""
    if isinstance(head, Centroids):
        return _centroid_head(builder, head, normed, width)
    activations = builder.activations(width, [head])
    builder.quantize(slots.ALL, normed, width, activations, head)
    builder.project(slots.ALL, head, activations, out_slot=slots.LOGITS)
    return np.arange(head.rows), builder.places[head].tiles * TILE


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
