"""Tensors of layers as rows of a checkpoint's: heads in a bundle's order, and one matrix of gate and up.

Bundles rotate number i of a head with number i + head_dim / 2. A checkpoint may rotate the first numbers of a head
alone, or neighbours. So the rows of queries and keys are stored in an order in which both are the same pairs, and pairs
that do not turn have the frequency 0. The scores of attention are the same in any order. In a bundle the scale of the
scores has the square of the factor of cosines and sines: queries are divided by it where they do not turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ondevice.errors import CheckpointError
from ondevice_export.checkpoint.stacks import Taken
from ondevice_export.families.family import Config, RowsOf


def turned_numbers(config: Config, index: int) -> int:
    """The rotated numbers of a head of layer `index`, its first ones."""
    share = config.rope(config.kind(index)).number("partial_rotary_factor", 1.0, maximum=1.0)
    turned = int(config.head_dim * share)
    if turned % 2:
        raise CheckpointError(
            f"{config.origin}: partial_rotary_factor {share:g} turns {turned} numbers of a head, which are not pairs"
        )
    return turned


def queries_and_keys(
    config: Config, index: int, *, first_key: int = 0, query_stride: int | None = None, neighbours: bool = False
) -> tuple[Sequence[Taken], Sequence[Taken]]:
    """The rows of all heads of queries, which begin at row 0 of their matrix, and of keys, in a bundle's order.

    first_key : the first row of keys in their matrix
    query_stride : the rows from one head of queries to the next, if there are others between them
    neighbours : whether number 2 * i is rotated with the next, not number i with one half of the rotated numbers on
    """
    heads, size, turned = config.integer("num_attention_heads"), config.head_dim, turned_numbers(config, index)
    kv_heads = config.integer("num_key_value_heads", heads)
    with np.errstate(over="ignore"):  # infinite weights are refused when they are read
        still = float(np.float64(config.rotary(index, size, turned)[1]) ** -2)
    half, pairs = size // 2, turned // 2
    first, second = Taken(0, pairs), Taken(pairs, turned)
    if neighbours:
        first, second = Taken(0, turned, step=2), Taken(1, turned, step=2)

    def of(starts: range, factor: float) -> Sequence[Taken]:
        order = [first, Taken(turned, pairs + half, factor), second, Taken(pairs + half, size, factor)]
        if turned == size and not neighbours:
            order = [Taken(0, size)]
        return [Taken(at + each.start, at + each.stop, each.factor, each.step) for at in starts for each in order]

    stride = query_stride or size
    return of(range(0, heads * stride, stride), still), of(range(first_key, first_key + kv_heads * size, size), 1.0)


def gate_and_up(config: Config, joined: str = "mlp.gate_up_proj.weight") -> Mapping[str, RowsOf]:
    """Gate and up of a dense block, where the matrix `joined` has the rows of both."""
    width = config.integer("intermediate_size")
    return {
        "mlp.gate_proj.weight": (joined, [Taken(0, width)]),
        "mlp.up_proj.weight": (joined, [Taken(width, 2 * width)]),
    }
