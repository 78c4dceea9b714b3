"""Steps as rows of a plan: kernels and benchmarks read the fields that the builder writes."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import pytest

from ondevice.engines.simd.kernels import contract
from ondevice.engines.simd.kernels.contract import LAYOUTS, WIDTH, Step, from_row, to_row
from ondevice.engines.simd.kernels.isa.jit import read_step


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_survives_the_plan(layout: type[Step]) -> None:
    step = layout(*range(1 << 40, (1 << 40) + len(layout._fields)))
    row = np.array(to_row(step))
    assert len(row) == WIDTH
    assert from_row(row) == step

    @numba.njit
    def read(row: np.ndarray) -> Any:
        return read_step(layout, row)

    seen = read(row)
    assert type(seen) is layout
    assert seen == step


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
        "SHORTLIST",
        "CANDIDATE_LOGITS",
        "LOOK_UP",
        "ATTEND_CHOSEN",
        "ATTEND_LOOKED_UP",
        "SCORE",
        "CHOOSE",
        "SPREAD",
        "MIX",
        "ACTIVATE",
    ]
    for number, (name, layout) in enumerate(zip(names, LAYOUTS, strict=True)):
        assert getattr(contract, name) == number
        assert layout.__name__.upper() == name.replace("_", "")
