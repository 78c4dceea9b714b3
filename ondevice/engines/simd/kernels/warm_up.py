"""All kernels that an engine calls, in groups that can be compiled side by side: see `ondevice.preparation`.

A forward has the code of its steps in it. It takes theirs from the cache directory, so they may be compiled elsewhere.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ondevice.engines.simd.kernels import experts, projection_steps, row_steps, shortlist_steps
from ondevice.engines.simd.kernels.attention_steps import attend_share
from ondevice.engines.simd.kernels.barrier import spin_for_next
from ondevice.engines.simd.kernels.cache_moves import move_keys, move_values
from ondevice.engines.simd.kernels.chosen_attention import attend_chosen_share
from ondevice.engines.simd.kernels.forward import run
from ondevice.engines.simd.kernels.key_codes import encode, learn
from ondevice.engines.simd.kernels.looking_up import look_up_share
from ondevice.engines.simd.kernels.nomad_attention import attend_looked_up_share

_WORDS = np.zeros(1, np.int64)
"""Stands for a step's row of the plan, and for the slots."""

Calls = list[tuple[Any, tuple[Any, ...]]]


def attention() -> Calls:
    return [(attend_share, (_WORDS, _WORDS, 0, 1, 0))]


def lookup() -> Calls:
    keys, codebooks = np.zeros((1, 1, 4), np.float32), np.zeros((1, 1, 5, 16), np.float32)
    return [
        (look_up_share, (_WORDS, _WORDS, 0, 1, 0)),
        (attend_chosen_share, (_WORDS, _WORDS, 0, 0)),
        (attend_looked_up_share, (_WORDS, _WORDS, 0, 0)),
        (encode, (keys, codebooks, 0, 0, 0)),
        (learn, (keys[0], codebooks[0], 0)),
    ]


def projection() -> Calls:
    return [
        (projection_steps.gated_share, (_WORDS, _WORDS, 1, 0, 0)),
        (projection_steps.project_share, (_WORDS, _WORDS, 1, 0)),
        (projection_steps.head, (_WORDS, _WORDS, 0, 1, 0)),
    ]


def others() -> Calls:
    shared = (
        row_steps.residual,
        row_steps.embed,
        row_steps.per_layer,
        row_steps.select,
        shortlist_steps.centroid_scores,
        shortlist_steps.candidate_logits,
        experts.score,
        experts.mix,
        projection_steps.activate,
    )
    return [
        *((step, (_WORDS, _WORDS, 0, 1)) for step in shared),
        (shortlist_steps.shortlist, (_WORDS, 0, 1)),
        (experts.choose, (_WORDS, _WORDS)),
        (experts.spread, (_WORDS, 0, 1)),
        *((move, (0, _WORDS, 0, 1, 1)) for move in (move_keys, move_values)),
    ]


def whole() -> Calls:
    return [(run, (np.zeros((1, 1), np.int64), _WORDS, 0, 1, 0, 0, 0)), (spin_for_next, (0, 0))]
