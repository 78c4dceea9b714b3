"""All kernels that an engine calls, in groups that can be compiled side by side: see `ondevice.preparation`.

A forward has the code of its steps in it. It takes theirs from the cache directory, so they may be compiled elsewhere.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ondevice.engines.simd.kernels import steps
from ondevice.engines.simd.kernels.barrier import spin_for_next
from ondevice.engines.simd.kernels.forward import run

_WORDS = np.zeros(1, np.int64)
"""Stands for a step's row of the plan, and for the slots."""

Calls = list[tuple[Any, tuple[Any, ...]]]


def attention() -> Calls:
    return [(steps.attend_share, (_WORDS, _WORDS, 0, 1, 0))]


def projection() -> Calls:
    return [
        (steps.gated_share, (_WORDS, _WORDS, 1, 0, 0)),
        (steps.project_share, (_WORDS, _WORDS, 1, 0)),
        (steps.head, (_WORDS, _WORDS, 0, 1, 0)),
    ]


def others() -> Calls:
    shared = (
        steps.residual,
        steps.embed,
        steps.per_layer,
        steps.select,
        steps.centroid_scores,
        steps.candidate_logits,
    )
    return [*((step, (_WORDS, _WORDS, 0, 1)) for step in shared), (steps.shortlist, (_WORDS,))]


def whole() -> Calls:
    return [(run, (np.zeros((1, 1), np.int64), _WORDS, 0, 1, 0, 0, 0)), (spin_for_next, (0, 0))]
