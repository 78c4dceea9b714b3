"""All kernels that an engine calls, with arguments of the right types, in groups that can be compiled in parallel.

`ondevice.preparation` compiles them. `forward.run` contains the code of its steps, which it takes from the cache
directory; so the steps can be compiled by other processes first.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ondevice.engines.simd.kernels.attention.chosen import attend_chosen_share, attend_looked_up_share
from ondevice.engines.simd.kernels.attention.exact import attend_share
from ondevice.engines.simd.kernels.attention.integer_tile import move_keys, move_values
from ondevice.engines.simd.kernels.attention.key_codes import encode, learn
from ondevice.engines.simd.kernels.attention.lookup import look_up_share
from ondevice.engines.simd.kernels.attention.query_key_value import head
from ondevice.engines.simd.kernels.forward import run
from ondevice.engines.simd.kernels.isa.memory import spin_for_next
from ondevice.engines.simd.kernels.steps import experts, projections, rows

_WORDS = np.zeros(1, np.int64)
"""An argument of the type of a step's row in a plan, and of the slots."""

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
        (learn, (keys[0], codebooks[0], 0, np.zeros((1, 1)), _WORDS)),
    ]


def projection() -> Calls:
    return [
        (projections.gated_share, (_WORDS, _WORDS, 1, 0, 0)),
        (projections.project_share, (_WORDS, _WORDS, 1, 0)),
        (head, (_WORDS, _WORDS, 0, 1, 0)),
    ]


def others() -> Calls:
    shared = (
        rows.residual,
        rows.embed,
        rows.per_layer,
        rows.select,
        rows.centroid_scores,
        rows.candidate_logits,
        experts.score,
        experts.mix,
        projections.activate,
    )
    return [
        *((step, (_WORDS, _WORDS, 0, 1)) for step in shared),
        (rows.shortlist, (_WORDS, 0, 1)),
        (experts.choose, (_WORDS, _WORDS)),
        (experts.spread, (_WORDS, 0, 1)),
        *((move, (0, _WORDS, 0, 1, 1)) for move in (move_keys, move_values)),
    ]


def whole() -> Calls:
    return [(run, (np.zeros((1, 1), np.int64), _WORDS, 0, 1, 0, 0, 0)), (spin_for_next, (0, 0))]
