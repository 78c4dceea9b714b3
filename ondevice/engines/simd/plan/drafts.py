"""The plans that draft: one step of the MTP drafter, and a run of heads, from a hidden state to candidates' logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ondevice.engines.simd.buffers import float_bits
from ondevice.engines.simd.caches import LookupSettings
from ondevice.engines.simd.kernels.contract import slots
from ondevice.engines.simd.kernels.contract.matrices import TILE
from ondevice.engines.simd.kernels.contract.steps import (
    RELU,
    SAME,
    SILU,
    Activate,
    CandidateLogits,
    CentroidScores,
    ChooseClusters,
)
from ondevice.engines.simd.model import DrafterModel, HeadsModel, Shortlist, TargetModel
from ondevice.engines.simd.pack_layout import PackLayout
from ondevice.engines.simd.plan.builder import Plan, PlanBuilder
from ondevice.engines.simd.plan.layer import LayerPlanner, Stream, pack_layer
from ondevice.engines.simd.plan.mtp import MtpPlanner
from ondevice.engines.simd.tensor_files import Matrix


def pack_drafter(layout: PackLayout, model: DrafterModel) -> None:
    """Add the drafter's matrices to the pack. A shortlist's rows are left out: they are read from the mapped file; and
    the target's head, which is in the pack.

    The target's rows of a list are packed a second time, because kernels multiply 16 rows that lie together: 12,288 of
    SmolLM2's took 1.57 ms of a step where they were gathered from the table, and a whole step takes 0.24 ms.
    """
    if model.shortlist is None and model.head not in layout.places:
        layout.add(model.head)
    for layer in model.layers:
        pack_layer(layout, layer)
    for projection in (model.pre_projection, model.post_projection):
        if projection is not None:
            layout.add(projection)


def pack_heads(layout: PackLayout, model: HeadsModel) -> None:
    """Add the matrices of heads to the pack. The target's head, which scores whole vocabularies, is already in it."""
    if model.inner is not None:
        layout.add(model.inner)
    layout.add(model.outer)
    if model.shortlist is not None and isinstance(model.shortlist.centroids, Matrix):
        layout.add(model.shortlist.centroids)


@dataclass(frozen=True)
class DraftPlan:
    """The plan of a draft step or of a run of heads, the arrays of its input, and the sizes of its output.

    The caller sets the slots: HIDDEN to `normed`, LOGITS and CANDIDATES to arrays of its own for the output; for a
    draft step also TOKENS to `token`.
    """

    plan: Plan
    hidden: NDArray[np.float32]
    """[H], the input hidden state, of the target's width."""
    normed: NDArray[np.float32]
    """Working memory for normed hidden states: [width] of the drafter, or [k, H] of heads, which propose k tokens; that
    is also the number of their rows in the row set WANTED."""
    candidates: NDArray[np.int64]
    """[C], or [k, C] of heads: initial content of the array at the slot CANDIDATES; read-only if the plan writes none,
    because they are always the same."""
    logits_width: int
    """Floats from a row of logits to the next: C, padded to whole tiles without a shortlist."""
    token: NDArray[np.int64] = field(default_factory=lambda: np.zeros(1, np.int64))
    """[1], the input token of a draft step."""
    following: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    """[H], which a draft step writes: the hidden state of the next step."""


def drafter_plan(
    model: DrafterModel,
    target: TargetModel,
    builder: PlanBuilder,
    caches: Mapping[int, int],
    lookup: LookupSettings | None,
) -> DraftPlan:
    """Plan a step from a token and a hidden state to candidates, their logits, and the next hidden state.

    The drafter shares the target's token embedding. The steps have one row.

    builder, caches, lookup: as for `LayerPlanner`
    """
    if model.pre_projection is None or model.post_projection is None:
        return _mtp_plan(model, target, builder, caches, lookup)
    buffers = builder.buffers
    layers = LayerPlanner(builder, model, caches, lookup)
    backbone, width = target.config.hidden_size, model.config.hidden_size
    joined, normed = np.zeros(2 * backbone, np.float32), np.zeros(width, np.float32)
    source, wide, stream = buffers.hold(joined), builder.rows(2 * backbone), Stream(slots.ALL, builder.rows(width))
    builder.embed(target.table, target.config.embedding_factor, source, 0)
    builder.quantize(slots.ALL, source, 2 * backbone, wide, model.pre_projection)
    builder.project(slots.ALL, model.pre_projection, wide, stream.hidden)
    layers.add(stream, 0, len(model.layers))
    entry, after, following = layers.entry, model.post_projection, np.zeros(backbone, np.float32)
    builder.quantize(slots.ALL, stream.hidden, width, entry, after, model.norm, slots.HIDDEN)
    builder.project(slots.ALL, after, entry, buffers.hold(following))
    state, shortlist, cap = buffers.hold(normed), model.shortlist, None
    if model.config.target_head:
        state, width, entry, cap = buffers.hold(following), backbone, wide, target.config.softcap
    if shortlist is None:
        builder.quantize(slots.ALL, state, width, entry, model.head)
        builder.project(slots.ALL, model.head, entry, out_slot=slots.LOGITS, cap=cap)
        candidates, logits_width = _scored(model), builder.places[model.head].tiles * TILE
    else:
        clusters, scores = len(shortlist.ids), buffers.floats(len(shortlist.ids))
        assert not isinstance(shortlist.centroids, Matrix)
        builder.add(CentroidScores(buffers.hold(shortlist.centroids), clusters, width, state, scores))
        logits_width = _shortlisted(builder, shortlist, model.head, state, width, scores, clusters, clustered=True)
        candidates = np.zeros(logits_width, np.int64)
    return DraftPlan(builder.plan(), joined[backbone:], normed, candidates, logits_width, following=following)


def _mtp_plan(
    model: DrafterModel,
    target: TargetModel,
    builder: PlanBuilder,
    caches: Mapping[int, int],
    lookup: LookupSettings | None,
) -> DraftPlan:
    """Plan a step with the target's MTP layer, as `drafter_plan` does. The residual stream after the layer is the
    hidden state of the next step.
    """
    buffers, width = builder.buffers, model.config.hidden_size
    layers, own = LayerPlanner(builder, model, caches, lookup), model.config.attention[0]
    assert target.mtp is not None
    hidden, normed, following = (np.zeros(width, np.float32) for _ in range(3))
    stream = Stream(slots.ALL, buffers.hold(following))
    inputs = MtpPlanner(builder, target, target.mtp, caches, (model.config, own.rotary), stream.hidden)
    inputs.add_step(buffers.hold(hidden))
    layers.add(stream, 0, len(model.layers))
    builder.quantize(slots.ALL, stream.hidden, width, layers.entry, model.head, model.norm, slots.HIDDEN)
    builder.project(slots.ALL, model.head, layers.entry, out_slot=slots.LOGITS, cap=target.config.softcap)
    logits_width = builder.places[model.head].tiles * TILE
    return DraftPlan(builder.plan(), hidden, normed, _scored(model), logits_width, following=following)


def _scored(model: DrafterModel) -> NDArray[np.int64]:
    """The ids of the tokens that a drafter without clusters scores, int64[C]."""
    return _read_only(np.arange(model.head.rows) if model.tokens is None else model.tokens)


def heads_plan(model: HeadsModel, target: TargetModel, builder: PlanBuilder) -> DraftPlan:
    """Plan the steps from a hidden state to candidates and their logits, with as many rows as there are offsets.

    The heads share the target's head and token embedding.
    """
    width, offsets, cap = target.config.hidden_size, model.config.offsets, target.config.softcap
    buffers, places = builder.buffers, builder.places
    hidden, normed = np.zeros(width, np.float32), np.zeros((offsets, width), np.float32)
    shortlist = model.shortlist
    first = model.outer if model.inner is None else model.inner
    source, state, entry = buffers.hold(hidden), buffers.hold(normed), builder.rows(width)
    builder.quantize(slots.ALL, source, width, entry, first, model.entry_norm, slots.HIDDEN)
    if model.entry_norm is not None:
        source = state
    if model.inner is not None:
        middle = buffers.floats(places[model.inner].tiles * TILE)
        builder.project(slots.ALL, model.inner, entry, middle)
        builder.add(Activate(slots.ALL, middle, middle, model.inner.rows, RELU))
        entry = builder.rows(model.inner.rows)
        builder.quantize(slots.ALL, middle, model.inner.rows, entry, model.outer)
    states = buffers.floats(max(places[model.outer].tiles * TILE, offsets * width))
    builder.project(slots.ALL, model.outer, entry, states)
    builder.add(Activate(slots.WANTED, states, states, width, SILU if model.inner is None else SAME, source))
    reader = target.head if shortlist is None else shortlist.centroids
    assert isinstance(reader, Matrix)
    scored = builder.rows(width)
    builder.quantize(slots.WANTED, states, width, scored, reader, model.norm, slots.HIDDEN)
    if model.norm is not None:
        states = state
    stride = places[reader].tiles * TILE
    if shortlist is None:
        builder.project(slots.WANTED, reader, scored, out_slot=slots.LOGITS, cap=cap)
        return DraftPlan(builder.plan(), hidden, normed, _read_only(np.arange(reader.rows), offsets), stride)
    scores = buffers.floats(offsets * stride)
    builder.project(slots.WANTED, reader, scored, scores)
    count = _shortlisted(builder, shortlist, target.table, states, width, scores, stride, cap=cap)
    return DraftPlan(builder.plan(), hidden, normed, np.zeros((offsets, count), np.int64), count)


def _read_only(ids: NDArray[np.int64], *rows: int) -> NDArray[np.int64]:
    """Token ids, int64[*rows, C], the same in each of the rows if there are any, that are not written."""
    return np.broadcast_to(ids, (*rows, len(ids)))


def _shortlisted(
    builder: PlanBuilder,
    shortlist: Shortlist,
    table: Matrix,
    x: int,
    width: int,
    scores: int,
    stride: int,
    *,
    clustered: bool = False,
    cap: float | None = None,
) -> int:
    """Choose the clusters for every row by their scores, and compute the logits of their tokens.

    Args:
        table: the tokens' rows; if `clustered`, an entry has the rows of a cluster.
        x, width: address of float32[most_rows, width], which are multiplied with the tokens' rows.
        scores, stride: see `ChooseClusters`.
        cap: softcap of the logits, or None.

    Returns:
        The number of tokens that are scored for each row.
    """
    clusters, per_cluster = map(int, shortlist.ids.shape)
    top, buffers = shortlist.top, builder.buffers
    chosen, ids = buffers.bytes(8 * builder.most_rows * top), buffers.hold(shortlist.ids)
    builder.add(ChooseClusters(scores, clusters, chosen, top, builder.most_rows, stride))
    builder.add(
        CandidateLogits(
            builder.table(table)._replace(width=width), x, chosen, top, per_cluster, ids,
            rows=builder.most_rows, clustered=int(clustered), cap=float_bits(cap or 0.0),
        )
    )  # fmt: skip
    return top * per_cluster
