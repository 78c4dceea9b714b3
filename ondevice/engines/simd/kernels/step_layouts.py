"""The layout of every kind of step: the fields of a row of a plan, as the plan's writer and the kernels use them.

A plan is int64[steps, WIDTH]. A row is the number of the step's kind, its index in LAYOUTS, then the fields of that
layout in their order, then zeros. All fields are integers: an address in bytes, a size, the number of a slot, or the
bits of a float32.

`rows` below is the row count of the step's row set: `slots.ALL`, all new rows of the forward, or `slots.WANTED`, the
wanted ones. "Activations" are rows in the form that the matrix wants that reads them: see `inputs`. The codes and
scales of a table are uint8[table rows, width * bits / 8] and fp16 or float32 [table rows, width / group].
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from numba import types

from ondevice.engines.simd.kernels.attention_layouts import Attend, AttendChosen, AttendLookedUp, LookUp
from ondevice.engines.simd.kernels.expert_layouts import Choose, Mix, Score, Spread
from ondevice.engines.simd.kernels.jit import intrinsic
from ondevice.engines.simd.kernels.projection_layouts import Activate, Gated, Head, Project
from ondevice.engines.simd.kernels.row_layouts import Embed, PerLayer, Residual, Select
from ondevice.engines.simd.kernels.shortlist_layouts import CandidateLogits, CentroidScores, Shortlist
from ondevice.engines.simd.kernels.vector import I64

Step = (
    Embed
    | Residual
    | PerLayer
    | Project
    | Gated
    | Head
    | Attend
    | Select
    | CentroidScores
    | Shortlist
    | CandidateLogits
    | LookUp
    | AttendChosen
    | AttendLookedUp
    | Score
    | Choose
    | Spread
    | Mix
    | Activate
)

LAYOUTS: tuple[type[Step], ...] = (
    Embed,
    Residual,
    PerLayer,
    Project,
    Gated,
    Head,
    Attend,
    Select,
    CentroidScores,
    Shortlist,
    CandidateLogits,
    LookUp,
    AttendChosen,
    AttendLookedUp,
    Score,
    Choose,
    Spread,
    Mix,
    Activate,
)
EMBED, RESIDUAL, PER_LAYER, PROJECT, GATED, HEAD, ATTEND, SELECT = range(8)
CENTROID_SCORES, SHORTLIST, CANDIDATE_LOGITS, LOOK_UP, ATTEND_CHOSEN, ATTEND_LOOKED_UP = range(8, 14)
SCORE, CHOOSE, SPREAD, MIX, ACTIVATE = range(14, 19)
"""Index of each layout in LAYOUTS: the number of its kind in a plan."""
WIDTH = 16
"""int64 in a row of a plan."""


def to_row(step: Step) -> tuple[int, ...]:
    """A step as a plan has it, without the zeros at its end."""
    return LAYOUTS.index(type(step)), *step


def from_row(row: Iterable[int]) -> Step:
    """The step in a row of a plan."""
    kind, *fields = map(int, row)
    layout = LAYOUTS[kind]
    return layout(*fields[: len(layout._fields)])


@intrinsic
def read_step(typing: Any, layout: Any, row: Any) -> Any:
    """In a kernel: the fields of a step, read_step(layout, row: int64[WIDTH]), whose kind is known to be `layout`'s."""
    kind = layout.instance_class
    fields = types.NamedUniTuple(types.int64, len(kind._fields), kind)  # type: ignore[no-untyped-call]

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        data = context.make_array(row)(context, builder, values[1]).data
        places = (context.get_constant(types.intp, place) for place in range(1, 1 + len(fields)))
        numbers = [builder.load(builder.gep(data, [place], source_etype=I64), typ=I64) for place in places]
        return context.make_tuple(builder, fields, numbers)

    return fields(layout, row), generate
