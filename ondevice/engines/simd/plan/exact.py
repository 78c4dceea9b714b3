"""A plan whose attention is exact, of one that looks up: for forwards in which no row sees enough to look up."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ondevice.engines.simd.kernels.attention_layouts import Attend, AttendChosen, AttendLookedUp, LookUp
from ondevice.engines.simd.kernels.step_layouts import WIDTH, from_row, to_row


def exact_plan(plan: NDArray[np.int64]) -> NDArray[np.int64]:
    """The same steps over the same memory, without those that choose, int64[steps, WIDTH].

    Where nothing is looked up, both compute the same bits. This one shares the positions of few rows among threads.
    """
    steps = [from_row(words) for words in plan]
    rows = []
    for step in steps:
        if isinstance(step, AttendChosen | AttendLookedUp):
            rows.append(to_row(Attend(*step[: len(Attend._fields)])))
        elif not isinstance(step, LookUp):
            rows.append(to_row(step))
    exact = np.zeros((len(rows), WIDTH), np.int64)
    for words, row in zip(exact, rows, strict=True):
        words[: len(row)] = row
    return exact
