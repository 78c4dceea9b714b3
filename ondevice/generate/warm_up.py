"""The compiled functions that generations on any engine need: see `ondevice.preparation`."""

from __future__ import annotations

from typing import Any

import numpy as np

from ondevice.generate import sampling_kernels
from ondevice.generate.drafters import ngram


def calls() -> list[tuple[Any, tuple[Any, ...]]]:
    """Each function with arguments of the types that it is compiled for."""
    ids, floats, scores = np.zeros(1, np.int64), np.zeros(1, np.float64), np.zeros(1, np.float32)
    key = sampling_kernels.key_of(0)
    tables, scratch = ngram.empty_tables(), sampling_kernels.draw_scratch(1)
    return [
        (ngram.append_all, (tables, ids)),
        (ngram.index_edges, (tables,)),
        (ngram.follow, (tables, ids, floats)),
        (sampling_kernels.weigh, (scores, 0.5, 0.5, floats)),
        (sampling_kernels.select_nucleus, (floats, 0.5, floats, ids, ids)),
        (sampling_kernels.select_top_k, (scores, scores, ids)),
        (sampling_kernels.gumbel_argmax, (scores, ids, floats, ids, 0.5, 0.5, key, 0, ids, floats)),
        (sampling_kernels.draw_few, (scores, ids, 0.5, 1, 0.5, 0.5, key, 0, ids, floats, scratch)),
        (sampling_kernels.argmax_few, (scores, ids, ids, floats)),
        (sampling_kernels.keep_allowed, (scores, np.zeros(1, np.uint32), scores)),
        (sampling_kernels.gumbel_argmax_all, (scores, 0.5, 0.5, key, 0, ids, floats)),
    ]
