"""The best of some scores."""

from __future__ import annotations

import numpy as np

from ondevice.engines.simd.kernels.jit import kernel
from ondevice.engines.simd.kernels.memory import read_f32, read_i64, write_i64


@kernel
def best_of(scores: int, count: int, chosen: int, top: int) -> None:
    """chosen = the indices of the `top` largest of float32[count] scores, largest first; equal ones in order."""
    taken = 0
    for i in range(count):
        found = read_f32(scores + 4 * i)
        if taken == top and not found > read_f32(scores + 4 * read_i64(chosen + 8 * (top - 1))):
            continue
        at = taken if taken < top else top - 1
        while at > 0 and found > read_f32(scores + 4 * read_i64(chosen + 8 * (at - 1))):
            write_i64(chosen + 8 * at, read_i64(chosen + 8 * (at - 1)))
            at -= 1
        write_i64(chosen + 8 * at, np.int64(i))
        taken = min(taken + 1, top)
