"""The kinds of work of a plan, which the kernel library must contain. It imports no compiler.

A kernel that is for one kind alone is marked with it (`isa.jit.optional`); where no library is shipped, this machine
builds the kinds that its bundles need. The kind "int8" does not show in a plan: the caches are given to a forward.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ondevice.engines.simd.kernels.matmul.sizes import GROUPS4, GROUPS8, PLAIN, STEPS2, STEPS4, STEPS8
from ondevice.engines.simd.kernels.steps.layouts import (
    ACTIVATE,
    ATTEND_CHOSEN,
    ATTEND_LOOKED_UP,
    CANDIDATE_LOGITS,
    CENTROID_SCORES,
    CHOOSE,
    GATED,
    LOOK_UP,
    MIX,
    PROJECT,
    SCORE,
    SHORTLIST,
    SPREAD,
    Gated,
    Project,
)

OF_PRODUCTS = {
    GROUPS4: "groups4",
    GROUPS8: "groups8",
    STEPS2: "steps2",
    STEPS4: "steps4",
    STEPS8: "steps8",
    PLAIN: "floats",
}
"""Kind of product -> kind of work."""

OF_STEPS = {
    **dict.fromkeys((LOOK_UP, ATTEND_CHOSEN, ATTEND_LOOKED_UP), "lookup"),
    **dict.fromkeys((SCORE, CHOOSE, SPREAD, MIX), "experts"),
    **dict.fromkeys((CENTROID_SCORES, SHORTLIST, CANDIDATE_LOGITS), "shortlists"),
    ACTIVATE: "heads",
}
"""Kind of step -> kind of work; the others are part of every forward."""

_PRODUCTS = {PROJECT: 1 + Project._fields.index("product"), GATED: 1 + Gated._fields.index("product")}
"""Kind of step that multiplies a matrix -> place of the kind of product in its row."""


def kinds_of(plan: NDArray[np.int64]) -> frozenset[str]:
    """The kinds of work of the steps of a plan, int64[steps, WIDTH]."""
    steps = plan[:, 0]
    found = {OF_STEPS[kind] for kind in set(steps.tolist()) & OF_STEPS.keys()}
    for kind, place in _PRODUCTS.items():
        found.update(OF_PRODUCTS[product] for product in set(plan[steps == kind, place].tolist()))
    return frozenset(found)
