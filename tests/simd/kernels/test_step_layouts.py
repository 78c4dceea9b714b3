"""Steps as rows of a plan: kernels and benchmarks read the fields that the builder writes."""

from __future__ import annotations

from itertools import count, islice
from typing import Any

import numba
import numpy as np
import pytest

from ondevice.engines.simd.kernels.contract import steps
from ondevice.engines.simd.kernels.contract.steps import LAYOUTS, WIDTH, KernelStep, field_types, from_row, to_row
from ondevice.engines.simd.kernels.isa.jit import read_step


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_survives_the_plan(layout: type[KernelStep]) -> None:
    numbers, kinds = count(1 << 40), field_types(layout)
    step = layout(*(kind(*islice(numbers, 1 if kind is int else len(kind._fields))) for kind in kinds))
    row = np.array(to_row(step))
    assert len(row) == WIDTH
    assert from_row(row) == step

    @numba.njit
    def read(row: np.ndarray) -> Any:
        return read_step(layout, row)

    seen = read(row)
    assert seen == step
    assert [type(field) for field in (seen, *seen)] == [layout, *kinds]


def test_the_number_of_a_kind_is_its_place() -> None:
    names = [
        "EMBED",
        "RESIDUAL",
        "PER_LAYER",
        "PROJECT",
        "GATED",
        "HEAD",
        "ATTEND",
        "SELECT",
        "CENTROID_SCORES",
        "CHOOSE_CLUSTERS",
        "CANDIDATE_LOGITS",
        "LOOK_UP",
        "SCORE",
        "CHOOSE",
        "SPREAD",
        "MIX",
        "ACTIVATE",
        "CONVOLVE",
        "RECUR",
        "GATE",
        "WHOLE_NORM",
    ]
    for number, (name, layout) in enumerate(zip(names, LAYOUTS, strict=True)):
        assert getattr(steps, name) == number
        assert layout.__name__.upper() == name.replace("_", "")
