"""The compiled functions that every engine's generations need: see `ondevice.preparation`."""

from __future__ import annotations

from typing import Any

import numpy as np

from ondevice.decoding import masks, noise, nucleus, shortlist, top_k
from ondevice.drafters import suffix_automaton


def calls() -> list[tuple[Any, tuple[Any, ...]]]:
    ids, floats, scores = np.zeros(1, np.int64), np.zeros(1, np.float64), np.zeros(1, np.float32)
    key = noise.key_of(0)
    tables = suffix_automaton.empty_tables()
    return [
        (suffix_automaton.append_all, (tables, ids)),
        (suffix_automaton.index_edges, (tables,)),
        (suffix_automaton.follow, (tables, ids, floats)),
        (nucleus.select, (floats, 0.5, floats, ids, ids)),
        (top_k.select, (scores, scores, ids)),
        (noise.race, (scores, ids, floats, ids, 0.5, 0.5, key, 0, ids, floats)),
        (shortlist.draw_few, (scores, ids, 0.5, 1, 0.5, 0.5, key, 0, ids, floats, ids)),
        (shortlist.likeliest_few, (scores, ids, ids, floats)),
        (masks.keep_allowed, (scores, np.zeros(1, np.uint32), scores)),
        (noise.race_all, (scores, 0.5, 0.5, key, 0, ids, floats)),
    ]
