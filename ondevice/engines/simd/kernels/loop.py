"""The loop of the emitted kernels, whose sums stay in registers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ondevice.engines.simd.kernels.vector import I64

Vectors = list[Any]


def accumulate(builder: Any, count: Any, sums: Vectors, step: Callable[[Any, Vectors], Vectors]) -> Vectors:
    """Emit a loop and return the values that `sums` have after it.

    Args:
        builder: at the end of a basic block; afterwards at the end of the one behind the loop.
        count: i64, how often the loop runs, at least once.
        sums: values before the loop.
        step: emits the body; from the index, 0..count - 1, and the sums before it to the sums after it.
    """
    before, loop, after = builder.block, builder.append_basic_block("step"), builder.append_basic_block("done")
    builder.branch(loop)
    builder.position_at_end(loop)
    index = builder.phi(I64)
    carried = [builder.phi(total.type) for total in sums]
    results = step(index, carried)
    next_index, last = builder.add(index, I64(1)), builder.block  # the body may have loops of its own
    for phi, first, new in zip([index, *carried], [I64(0), *sums], [next_index, *results], strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(new, last)
    builder.cbranch(builder.icmp_signed("<", next_index, count), loop, after)
    builder.position_at_end(after)
    return results
