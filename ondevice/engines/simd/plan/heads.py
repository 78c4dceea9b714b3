"""The proposals of heads as a plan."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ondevice.engines.simd.buffers import Buffers, float_bits
from ondevice.engines.simd.graph.model import HeadsModel, Shortlist, TargetModel
from ondevice.engines.simd.kernels import shortlist_layouts, slots
from ondevice.engines.simd.kernels.projection_layouts import RELU, SAME, SILU, Activate
from ondevice.engines.simd.kernels.shortlist_layouts import CandidateLogits
from ondevice.engines.simd.kernels.sizes import TILE
from ondevice.engines.simd.pack.layout import Packed, PackLayout
from ondevice.engines.simd.plan.builder import PlanBuilder


@dataclass(frozen=True)
class PackedHeads:
    """Where the matrices of heads lie in the pack."""

    inner: Packed | None
    outer: Packed
    projection: Packed
    """The centroids, or where all tokens are scored the target's head."""


def pack_heads(layout: PackLayout, model: HeadsModel, target_head: Packed) -> PackedHeads:
    inner = None if model.inner is None else layout.add(model.inner)
    outer = layout.add(model.outer)
    return PackedHeads(inner, outer, target_head if model.shortlist is None else layout.add(model.shortlist.centroids))


@dataclass(frozen=True)
class HeadsPlan:
    """Steps, where their input lies, and how large their answer is: the slots LOGITS and CANDIDATES say where."""

    steps: NDArray[np.int64]
    hidden: NDArray[np.float32]
    """[H], written before a run."""
    normed: NDArray[np.float32]
    """[k, H]: where the slot HIDDEN must point."""
    offsets: int
    """k: the count of the row set WANTED."""
    candidates: int
    """C."""
    shortlisted: bool
    """Else the candidates are the whole vocabulary, in order, and no ids are written."""
    logits_width: int
    """Floats from a row of logits to the next: C, or the vocabulary padded to whole tiles."""


def heads_plan(
    model: HeadsModel, target: TargetModel, packed: PackedHeads, pack: NDArray[np.uint8], buffers: Buffers
) -> HeadsPlan:
    """The steps from a hidden state to candidates and their logits.

    Args:
        model: what to compute.
        target: whose projection it shares.
        packed, pack: its matrices.
        buffers: what keeps all memory of the plan.
    """
    width, offsets = target.width, model.offsets
    builder = PlanBuilder(pack, buffers, offsets, model.eps)
    hidden, normed = np.zeros(width, np.float32), np.zeros((offsets, width), np.float32)
    first = model.outer if model.inner is None else model.inner
    source, entry = buffers.hold(hidden), builder.activations(width, [first])
    if model.entry_norm is None:
        builder.quantize(slots.ALL, source, width, entry, first)
    else:
        builder.norm_quantize(slots.ALL, source, model.entry_norm, entry, first, slots.HIDDEN)
        source = buffers.hold(normed)
    if model.inner is not None and packed.inner is not None:
        middle = buffers.floats(packed.inner.tiles * TILE)
        builder.project(slots.ALL, packed.inner, entry, middle)
        builder.add(Activate(slots.ALL, middle, middle, model.inner.rows, RELU))
        entry = builder.activations(model.inner.rows, [model.outer])
        builder.quantize(slots.ALL, middle, model.inner.rows, entry, model.outer)
    states = buffers.floats(max(packed.outer.tiles * TILE, offsets * width))
    builder.project(slots.ALL, packed.outer, entry, states)
    builder.add(Activate(slots.WANTED, states, states, width, SILU if model.gated else SAME, source))
    reader = target.head if model.shortlist is None else model.shortlist.centroids
    scored = builder.activations(width, [reader])
    if model.norm is None:
        builder.quantize(slots.WANTED, states, width, scored, reader)
    else:
        builder.norm_quantize(slots.WANTED, states, model.norm, scored, reader, slots.HIDDEN)
        states = buffers.hold(normed)
    if model.shortlist is None:
        builder.project(slots.WANTED, packed.projection, scored, out_slot=slots.LOGITS, cap=target.cap)
        rows, stride = packed.projection.tiles * TILE, target.head.rows
        return HeadsPlan(builder.plan(), hidden, normed, offsets, stride, False, rows)
    count = _shortlist(builder, model.shortlist, target, packed.projection, scored, states)
    return HeadsPlan(builder.plan(), hidden, normed, offsets, count, True, count)


def _shortlist(
    builder: PlanBuilder, shortlist: Shortlist, target: TargetModel, centroids: Packed, scored: int, states: int
) -> int:
    """Choose clusters for every row and score their tokens; returns how many."""
    buffers, rows = builder.buffers, builder.most_rows
    stride = centroids.tiles * TILE
    scores, chosen = buffers.floats(rows * stride), buffers.bytes(8 * rows * shortlist.top)
    builder.project(slots.WANTED, centroids, scored, scores)
    builder.add(shortlist_layouts.Shortlist(scores, len(shortlist.ids), chosen, shortlist.top, rows, stride))
    ids, cap = buffers.hold(shortlist.ids), float_bits(target.cap or 0.0)
    table = builder.table(target.table)
    sizes = shortlist.top, shortlist.per_cluster
    builder.add(CandidateLogits(*table, target.width, states, chosen, *sizes, ids, rows, 0, cap))
    return shortlist.top * shortlist.per_cluster
