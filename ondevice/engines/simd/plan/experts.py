"""The experts of a layer as steps: rows choose, are sorted by expert, multiplied, and put together again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ondevice.engines.simd.graph.model import Experts
from ondevice.engines.simd.kernels.expert_layouts import Choose, Mix, Score, Spread
from ondevice.engines.simd.kernels.sizes import BLOCK
from ondevice.engines.simd.kernels.tile import ACTIVATION_BYTES
from ondevice.engines.simd.kernels.vector import LANES
from ondevice.engines.simd.pack.layout import Packed, PackLayout
from ondevice.engines.simd.plan.builder import PlanBuilder
from ondevice.engines.simd.plan.reading import input_form


@dataclass(frozen=True)
class PackedExperts:
    """Where the matrices of a layer's first expert lie in the pack; those of the others follow."""

    gated: Packed
    down: Packed

    @property
    def nbytes(self) -> int:
        """Of one expert."""
        return self.gated.nbytes + self.down.nbytes


def pack_experts(layout: PackLayout, experts: Experts) -> PackedExperts:
    packed = layout.add_gated_experts(experts.gate_up), layout.add_experts(experts.down)
    count = len(experts.scale)
    return PackedExperts(*(replace(every, tiles=every.tiles // count) for every in packed))


@dataclass(frozen=True)
class Choice:
    """Addresses of what rows have chosen, and of the buffers that experts work in; layers take turns.

    A pair is a row and one of its experts; `expert_layouts.Choose` has the shapes of the first six.
    """

    scores: int
    weights: int
    chosen: int
    groups: int
    pairs: int
    counts: int
    alone: int
    """Activations of all rows, each as if it were alone."""
    entry: int
    """Activations of all pairs: the input of their experts."""
    inner: int
    """The same of the experts' last projection."""
    outputs: int
    """float32[pairs, width]"""


def room_for_choice(builder: PlanBuilder, layers: Sequence[Experts]) -> Choice:
    """Room for any of these layers' experts."""
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


def add_experts(
    builder: PlanBuilder, experts: Experts, packed: PackedExperts, choice: Choice, row_set: int, hidden: int, out: int
) -> None:
    """Add the steps that put the sum of dense block and experts, both normed, in the place of the dense block's output.

    Args:
        builder: collects the steps.
        experts: their sizes and norms.
        packed: their matrices.
        choice: buffers.
        row_set: rows to run on.
        hidden: address of float32[rows, width], the residual stream.
        out: address of float32[rows, width], the dense block's output.
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
    builder.add(Spread(groups, choice.pairs, choice.alone, choice.entry, packed.gated.blocks))
    builder.gated(row_set, packed.gated, choice.entry, choice.inner, experts.down[0], groups=groups)
    builder.project(row_set, packed.down, choice.inner, choice.outputs, groups=groups)
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
