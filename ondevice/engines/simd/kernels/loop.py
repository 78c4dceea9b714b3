"""The loop that every emitted kernel has: sums kept in registers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ondevice.engines.simd.kernels.vector import I64

Vectors = list[Any]


def accumulate(builder: Any, count: Any, sums: Vectors, step: Callable[[Any, Vectors], Vectors]) -> Vectors:
    """`sums` after `count` steps, at least one, kept in registers; code goes on behind the loop.

    step : from an index, 0 .. count - 1, and the sums before it to those after it
    """
    before, loop, after = builder.block, builder.append_basic_block("step"), builder.append_basic_block("done")
    builder.branch(loop)
    builder.position_at_end(loop)
    index = builder.phi(I64)
    carried = [builder.phi(total.type) for total in sums]
    results = step(index, carried)
    next_index = builder.add(index, I64(1))
    for phi, first, new in zip([index, *carried], [I64(0), *sums], [next_index, *results], strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(new, loop)
    builder.cbranch(builder.icmp_signed("<", next_index, count), loop, after)
    builder.position_at_end(after)
    return results
