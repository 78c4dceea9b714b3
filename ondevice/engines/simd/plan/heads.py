"""The plan of heads: from a hidden state of the target to candidates and logits for k tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ondevice.engines.simd.buffers import Buffers, float_bits
from ondevice.engines.simd.kernels.matmul.sizes import TILE
from ondevice.engines.simd.kernels.steps import layouts, slots
from ondevice.engines.simd.kernels.steps.layouts import RELU, SAME, SILU, Activate, CandidateLogits
from ondevice.engines.simd.model import HeadsModel, Shortlist, TargetModel
from ondevice.engines.simd.pack_layout import Packed, PackLayout
from ondevice.engines.simd.plan.builder import PlanBuilder
from ondevice.engines.simd.tensor_files import Matrix


def pack_heads(layout: PackLayout, model: HeadsModel) -> None:
    """Add the matrices of heads to the pack. The target's head, which scores whole vocabularies, is already in it."""
    if model.inner is not None:
        layout.add(model.inner)
    layout.add(model.outer)
    if model.shortlist is not None:
        layout.add(model.shortlist.centroids)


@dataclass(frozen=True)
class HeadsPlan:
    """The plan of heads, the array of its input, and the sizes of its output.

    The caller sets the slots: HIDDEN to the array here, LOGITS and CANDIDATES to arrays of its own for the output.
    """

    steps: NDArray[np.int64]
    """int64[steps, WIDTH]"""
    hidden: NDArray[np.float32]
    """[H], the input."""
    normed: NDArray[np.float32]
    """[k, H], working memory for normed rows. The slot HIDDEN must point to it."""
    offsets: int
    """Number of tokens proposed, k, which is also the number of rows in the row set WANTED."""
    candidates: int
    """Number of candidates per token, C."""
    shortlisted: bool
    """Whether candidates are written. If not, they are the whole vocabulary in order."""
    logits_width: int
    """Floats from a row of logits to the next: C, or the size of the vocabulary padded to whole tiles."""


def heads_plan(
    model: HeadsModel, target: TargetModel, places: Mapping[Matrix, Packed], pack: NDArray[np.uint8], buffers: Buffers
) -> HeadsPlan:
    """Plan the steps from a hidden state to candidates and their logits.

    Args:
        model: the heads.
        target: the target, whose head and token embedding the heads share.
        places, pack: places of the matrices of both in the pack, and the pack.
        buffers: allocates and keeps the memory of the plan.
    """
    width, offsets = target.config.hidden_size, model.offsets
    builder = PlanBuilder(places, pack, buffers, offsets, target.config.norm_eps)
    hidden, normed = np.zeros(width, np.float32), np.zeros((offsets, width), np.float32)
    first = model.outer if model.inner is None else model.inner
    source, entry = buffers.hold(hidden), builder.activations(width, [first])
    if model.entry_norm is None:
        builder.quantize(slots.ALL, source, width, entry, first)
    else:
        builder.norm_quantize(slots.ALL, source, model.entry_norm, entry, first, slots.HIDDEN)
        source = buffers.hold(normed)
    if model.inner is not None:
        middle = buffers.floats(places[model.inner].tiles * TILE)
        builder.project(slots.ALL, model.inner, entry, middle)
        builder.add(Activate(slots.ALL, middle, middle, model.inner.rows, RELU))
        entry = builder.activations(model.inner.rows, [model.outer])
        builder.quantize(slots.ALL, middle, model.inner.rows, entry, model.outer)
    states = buffers.floats(max(places[model.outer].tiles * TILE, offsets * width))
    builder.project(slots.ALL, model.outer, entry, states)
    builder.add(Activate(slots.WANTED, states, states, width, SILU if model.gated else SAME, source))
    reader = target.head if model.shortlist is None else model.shortlist.centroids
    scored = builder.activations(width, [reader])
    if model.norm is None:
        builder.quantize(slots.WANTED, states, width, scored, reader)
    else:
        builder.norm_quantize(slots.WANTED, states, model.norm, scored, reader, slots.HIDDEN)
        states = buffers.hold(normed)
    if model.shortlist is None:
        builder.project(slots.WANTED, target.head, scored, out_slot=slots.LOGITS, cap=target.config.softcap)
        rows, stride = places[target.head].tiles * TILE, target.head.rows
        return HeadsPlan(builder.plan(), hidden, normed, offsets, stride, False, rows)
    count = _shortlist(builder, model.shortlist, target, scored, states)
    return HeadsPlan(builder.plan(), hidden, normed, offsets, count, True, count)


def _shortlist(builder: PlanBuilder, shortlist: Shortlist, target: TargetModel, scored: int, states: int) -> int:
    """Choose clusters for every row and score their tokens; returns the number of tokens per row."""
    buffers, rows = builder.buffers, builder.most_rows
    stride = builder.places[shortlist.centroids].tiles * TILE
    scores, chosen = buffers.floats(rows * stride), buffers.bytes(8 * rows * shortlist.top)
    builder.project(slots.WANTED, shortlist.centroids, scored, scores)
    builder.add(layouts.Shortlist(scores, len(shortlist.ids), chosen, shortlist.top, rows, stride))
    ids, cap = buffers.hold(shortlist.ids), float_bits(target.config.softcap or 0.0)
    table = builder.table(target.table)
    sizes = shortlist.top, shortlist.per_cluster
    builder.add(CandidateLogits(*table, target.config.hidden_size, states, chosen, *sizes, ids, rows, 0, cap))
    return shortlist.top * shortlist.per_cluster
