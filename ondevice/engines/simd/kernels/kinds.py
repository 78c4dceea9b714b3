"""The kinds of work of a plan, which the kernel library must contain. It imports no compiler.

A kernel that is for one kind alone is marked with it (`isa.jit.optional`); where no library is shipped, this machine
builds the kinds that its bundles need. The kind "int8" does not show in a plan: the caches are given to a forward.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ondevice.engines.simd.kernels.matmul.sizes import (
    GROUPS4,
    GROUPS4_AFFINE,
    GROUPS8,
    PLAIN,
    STEPS2,
    STEPS4,
    STEPS8,
)
from ondevice.engines.simd.kernels.steps import layouts

OF_PRODUCTS = {
    GROUPS4: "groups4",
    GROUPS8: "groups8",
    GROUPS4_AFFINE: "affine4",
    STEPS2: "steps2",
    STEPS4: "steps4",
    STEPS8: "steps8",
    PLAIN: "floats",
}
"""Kind of product -> kind of work."""

OF_STEPS = {
    **dict.fromkeys((layouts.LOOK_UP, layouts.ATTEND_CHOSEN, layouts.ATTEND_LOOKED_UP), "lookup"),
    **dict.fromkeys((layouts.SCORE, layouts.CHOOSE, layouts.SPREAD, layouts.MIX), "experts"),
    **dict.fromkeys((layouts.CENTROID_SCORES, layouts.SHORTLIST, layouts.CANDIDATE_LOGITS), "shortlists"),
    layouts.ACTIVATE: "heads",
}
"""Kind of step -> kind of work; the others are part of every forward."""

_PRODUCTS = {
    layouts.PROJECT: 1 + layouts.Project._fields.index("product"),
    layouts.GATED: 1 + layouts.Gated._fields.index("product"),
}
"""Kind of step that multiplies a matrix -> place of the kind of product in its row."""


def kinds_of(plan: NDArray[np.int64]) -> frozenset[str]:
    """The kinds of work of the steps of a plan, int64[steps, WIDTH]."""
    steps = plan[:, 0]
    found = {OF_STEPS[kind] for kind in set(steps.tolist()) & OF_STEPS.keys()}
    for kind, place in _PRODUCTS.items():
        found.update(OF_PRODUCTS[product] for product in set(plan[steps == kind, place].tolist()))
    return frozenset(found)
