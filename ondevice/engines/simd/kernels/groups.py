"""Rows in groups, each of which is multiplied with a matrix of its own: those that chose the same expert."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ondevice.engines.simd.kernels.jit import kernel
from ondevice.engines.simd.kernels.memory import read_i64


class Group(NamedTuple):
    """Rows side by side, and their matrix."""

    matrix: int
    """Its number."""
    first: int
    """Number of the first row."""
    rows: int


_NONE: Any = np.int64(0)


@kernel
def count_groups(groups: int) -> Any:
    """How many there are at an address, as `expert_layouts.Choose` has them; without one, all rows are one."""
    return read_i64(groups) if groups else np.int64(1)


@kernel
def read_group(groups: int, number: int, rows: int) -> Group:
    """One of them; `rows` are all, where they are a single group."""
    if not groups:
        return Group(_NONE, _NONE, rows)
    at = groups + 8 + 16 * number
    first = read_i64(at + 8)
    return Group(read_i64(at), first, read_i64(at + 24) - first)
