"""How a kernel reads its step, finds the sequence of a row, and shares the units of a step with other threads."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from ondevice.engines.simd.kernels.isa.jit import intrinsic, kernel
from ondevice.engines.simd.kernels.isa.memory import fetch_add, read_i64
from ondevice.engines.simd.kernels.isa.vector import I64
from ondevice.engines.simd.kernels.steps.slots import FIRST_ROW, ROW_COUNT, SEQUENCES, WANTED, WANTED_ROWS


@intrinsic
def read_step(typing: Any, layout: Any, row: Any) -> Any:
    """In kernels, `read_step(layout, row)`: the fields of a step in row int64[WIDTH], whose kind must be `layout`'s."""
    kind = layout.instance_class
    fields = types.NamedUniTuple(types.int64, len(kind._fields), kind)  # type: ignore[no-untyped-call]

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        data = context.make_array(row)(context, builder, values[1]).data
        places = (context.get_constant(types.intp, place) for place in range(1, 1 + len(fields)))
        numbers = [builder.load(builder.gep(data, [place], source_etype=I64), typ=I64) for place in places]
        return context.make_tuple(builder, fields, numbers)

    return fields(layout, row), generate


@kernel
def sequence_of(state: np.ndarray, row_set: int, row: int) -> Any:
    """The address of the record of the sequence to which row `row` of a row set belongs."""
    at = state[SEQUENCES]
    record = read_i64(at)
    while row >= read_i64(record + 8 * (FIRST_ROW + row_set)) + read_i64(record + 8 * (ROW_COUNT + row_set)):
        at += 8
        record = read_i64(at)
    return record


@kernel
def source_row(state: np.ndarray, row_set: int, row: int) -> Any:
    """The index among all new rows of row `row` of a row set."""
    if row_set == WANTED:
        return read_i64(state[WANTED_ROWS] + 8 * row)
    return row


@kernel
def first_unit(units: int, thread: int, threads: int) -> int:
    """The first unit of a thread's equal share of `units`. The share ends where the next thread's begins."""
    return units * thread // threads


@kernel
def claim(counter: int, size: int) -> Any:
    """Claim the next `size` units of a step, and return the number of the first one. Faster cores claim more often."""
    return fetch_add(counter, np.int64(size))


@kernel
def claim_part(counter: int, units: int, threads: int) -> tuple[int, int]:
    """Claim a part of a step's units; returns (start, stop), with start == stop if none is left.

    Parts get smaller: each round of as many parts as threads covers half of the units that are left (factoring; Hummel,
    Schonberg and Flynn, 1992). The first parts are long streams of memory; the last ones are small, so that a thread
    that was delayed does not keep the others waiting long.
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
