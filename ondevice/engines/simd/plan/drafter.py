"""One MTP step as a plan."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ondevice.engines.simd.buffers import Buffers
from ondevice.engines.simd.graph.model import Centroids, DrafterModel, Matrix
from ondevice.engines.simd.kernels import slots, steps
from ondevice.engines.simd.kernels.tile import TILE
from ondevice.engines.simd.pack.layout import Packed, PackLayout
from ondevice.engines.simd.plan.builder import (
    KIND_NUMBERS,
    PackedLayer,
    PlanBuilder,
    Workspace,
    build_layer,
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
    """Steps, and where a step's input and output lie."""

    steps: NDArray[np.int64]
    token: NDArray[np.int64]
    """[1], written before a step: where the slot TOKENS must point."""
    target_hidden: NDArray[np.float32]
    """[H], written before a step."""
    normed: NDArray[np.float32]
    """The drafter's own hidden state: where the slot HIDDEN must point."""
    candidates: NDArray[np.int64]
    """[C]: where the slot CANDIDATES must point."""
    logits: NDArray[np.float32]
    """[C]"""
    next_hidden: NDArray[np.float32]
    """[H]"""


def drafter_plan(model: DrafterModel, packed: PackedDrafter, pack: NDArray[np.uint8], buffers: Buffers) -> DrafterPlan:
    builder = PlanBuilder(pack, buffers, 1, model.eps)
    backbone, width = model.table.width, len(model.norm)
    joined = np.zeros(2 * backbone, np.float32)
    builder.embed(model.table, model.embedding_factor, buffers.hold(joined), 0)
    wide = builder.records(2 * backbone)
    builder.quantize(slots.ALL, buffers.hold(joined), 2 * backbone, wide, packed.pre_projection.bits)
    outer, inner = widest(model.layers, width)
    work = Workspace(builder.rows(width), builder.rows(outer), builder.records(width), builder.records(inner))
    builder.project(slots.ALL, packed.pre_projection, wide, work.hidden)
    first = model.layers[0]
    builder.norm_quantize(slots.ALL, work.hidden, first.input_norm, work.entry, first.attention.query.bits)
    for index, layer in enumerate(model.layers):
        after = model.layers[index + 1] if index + 1 < len(model.layers) else None
        following = None if after is None else (after.input_norm, after.attention.query.bits)
        cache = KIND_NUMBERS[layer.attention.kind]
        build_layer(builder, layer, packed.layers[index], slots.ALL, work, cache, None, following)
    normed = np.zeros(width, np.float32)
    next_hidden = np.zeros(backbone, np.float32)
    post = packed.post_projection
    builder.norm_quantize(slots.ALL, work.hidden, model.norm, work.entry, post.bits, slots.HIDDEN)
    builder.project(slots.ALL, post, work.entry, buffers.hold(next_hidden))
    candidates, logits = _head(builder, model.head, packed.head, buffers.hold(normed), width)
    token = np.zeros(1, np.int64)
    return DrafterPlan(builder.plan(), token, joined[backbone:], normed, candidates, logits, next_hidden)


def _head(
    builder: PlanBuilder, head: Centroids | Matrix, packed: Packed | None, normed: int, width: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Score the candidates; where their ids and logits will be."""
    if isinstance(head, Centroids):
        return _centroid_head(builder, head, normed, width)
    assert packed is not None
    logits = np.zeros(packed.tiles * TILE, np.float32)
    records = builder.records(width)
    builder.quantize(slots.ALL, normed, width, records, head.bits)
    builder.project(slots.ALL, packed, records, builder.buffers.hold(logits))
    return np.arange(head.rows), logits[: head.rows]


def _centroid_head(
    builder: PlanBuilder, head: Centroids, normed: int, width: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    buffers, table = builder.buffers, head.table
    count = head.top * head.per_cluster
    candidates, logits = np.zeros(count, np.int64), np.zeros(count, np.float32)
    scores, chosen = buffers.floats(len(head.weights)), buffers.bytes(8 * head.top)
    builder.step(steps.CENTROIDS, buffers.hold(head.weights), len(head.weights), width, normed, scores)
    builder.step(steps.SHORTLIST, scores, len(head.weights), chosen, head.top)
    builder.step(
        steps.CANDIDATE_LOGITS, buffers.hold(table.codes), buffers.hold(table.scales),
        int(table.scales.dtype == np.float16), table.bits, width, normed, chosen, head.top, head.per_cluster,
        buffers.hold(head.ids), buffers.hold(logits),
    )  # fmt: skip
    return candidates, logits
