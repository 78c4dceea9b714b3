"""How threads share the units of a step: in equal parts, or by claiming one part after another."""

from __future__ import annotations

from typing import Any

import numpy as np

from ondevice.engines.simd.kernels.jit import kernel
from ondevice.engines.simd.kernels.memory import fetch_add


@kernel
def first_unit(units: int, thread: int, threads: int) -> int:
    """Where a thread's share of `units` begins; the next thread's beginning is its end."""
    return units * thread // threads


@kernel
def claim(counter: int, size: int) -> Any:
    """Claim the next `size` units of a step, and return the first one's number: faster cores claim more."""
    return fetch_add(counter, np.int64(size))


@kernel
def claim_part(counter: int, units: int, threads: int) -> tuple[int, int]:
    """Claim a part of a step, and return its first unit and the one behind its last: an empty one where none is left.

    Parts get smaller: as many as there are threads make up half of what is left (factoring; Hummel, Schonberg and
    Flynn, 1992). The first are read as long streams, and the last even out what a busy core came to late.
    """
    if threads == 1:
        return (0, units) if fetch_add(counter, np.int64(1)) == 0 else (units, units)
    number = fetch_add(counter, np.int64(1))
    start, size = 0, max(1, units // (2 * threads))
    while number >= threads and start + threads * size < units:
        number -= threads
        start += threads * size
        size = max(1, (units - start) // (2 * threads))
    start = min(start + number * size, units)
    return start, min(start + size, units)
