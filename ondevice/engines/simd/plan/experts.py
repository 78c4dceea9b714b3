"""The steps of a layer's experts: score and choose per row, sort rows by expert, multiply, add up the results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ondevice.engines.simd.kernels.isa.instruction_set import LANES
from ondevice.engines.simd.kernels.matmul.sizes import ACTIVATION_BYTES, BLOCK
from ondevice.engines.simd.kernels.steps.layouts import Choose, Mix, Score, Spread
from ondevice.engines.simd.model import Experts
from ondevice.engines.simd.pack_layout import PackLayout
from ondevice.engines.simd.plan.builder import PlanBuilder, input_form


def pack_experts(layout: PackLayout, experts: Experts) -> None:
    """Add the matrices of a layer's experts to the pack: all `gate_up` one after the other, then all `down`."""
    layout.add_gated_experts(experts.gate_up)
    layout.add_experts(experts.down)


@dataclass(frozen=True)
class Choice:
    """Addresses of the rows' chosen experts and of the experts' buffers, which all layers share one after the other.

    A pair is a row and one of its experts. The first six fields are operands of the step `Choose`, which has their
    shapes (`kernels.steps.layouts`).
    """

    scores: int
    weights: int
    chosen: int
    groups: int
    pairs: int
    counts: int
    alone: int
    """Activations of all rows, each row laid out as a group of its own."""
    entry: int
    """Activations of all pairs: the input of the experts' gate and up."""
    inner: int
    """Activations of all pairs: the input of the experts' down projection."""
    outputs: int
    """float32[pairs, width], the output of the down projection."""


def room_for_choice(builder: PlanBuilder, layers: Sequence[Experts]) -> Choice:
    """Allocate buffers that are large enough for the experts of each of these layers."""
    buffers, rows = builder.buffers, builder.most_rows
    count, top = max(len(each.scale) for each in layers), max(each.top for each in layers)
    width, inner = layers[0].down[0].rows, max(each.down[0].width for each in layers)
    pairs = rows * top
    return Choice(
        scores=buffers.floats(rows * count),
        weights=buffers.floats(pairs + LANES),
        chosen=buffers.bytes(8 * pairs),
        groups=buffers.bytes(8 * (3 + 2 * count)),
        pairs=buffers.bytes(8 * pairs),
        counts=buffers.bytes(8 * count),
        alone=builder.activations(width, layers[0].gate_up[:1]),
        entry=buffers.bytes(pairs * width // BLOCK * ACTIVATION_BYTES),
        inner=buffers.bytes(pairs * inner // BLOCK * ACTIVATION_BYTES),
        outputs=buffers.floats(pairs * width),
    )


def add_experts(builder: PlanBuilder, experts: Experts, choice: Choice, row_set: int, hidden: int, out: int) -> None:
    """Add the steps that replace the dense block's output by the sum of it and the experts' output, both normed.

    Args:
        builder: collects the steps.
        experts: sizes, norms and matrices.
        choice: buffers.
        row_set: rows to run on.
        hidden: address of float32[rows, width], the residual stream, which the experts read.
        out: address of float32[rows, width], the dense block's output, which is replaced.
    """
    constant, groups, width = builder.constant, choice.groups, experts.router.shape[1]
    builder.add(
        Score(
            row_set,
            hidden,
            width,
            builder.eps,
            weights=constant(experts.router),
            experts=len(experts.scale),
            scores=choice.scores,
            norm=constant(experts.pre_norm),
            activations=choice.alone,
            form=input_form(experts.gate_up[0]),
        )
    )
    builder.add(
        Choose(
            row_set,
            choice.scores,
            len(experts.scale),
            experts.top,
            scale=constant(experts.scale),
            weights=choice.weights,
            chosen=choice.chosen,
            groups=groups,
            pairs=choice.pairs,
            counts=choice.counts,
        )
    )
    builder.add(Spread(groups, choice.pairs, choice.alone, choice.entry, width // BLOCK))
    gate_up, down, count = experts.gate_up[0], experts.down[0], len(experts.scale)
    builder.gated(row_set, gate_up, choice.entry, choice.inner, down, experts=count, groups=groups)
    builder.project(row_set, down, choice.inner, choice.outputs, experts=count, groups=groups)
    builder.add(
        Mix(
            row_set,
            out,
            width,
            builder.eps,
            weight=constant(experts.dense_norm),
            outputs=choice.outputs,
            norm=constant(experts.norm),
            weights=choice.weights,
            chosen=choice.chosen,
            top=experts.top,
        )
    )
