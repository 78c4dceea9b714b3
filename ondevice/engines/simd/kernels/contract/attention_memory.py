"""Sizes of attention and of lookups, and the layout of their working memory."""

from __future__ import annotations

from typing import NamedTuple

from ondevice.engines.simd.kernels.contract.entries import LINE
from ondevice.engines.simd.kernels.contract.slots import MAX_ROWS

UNIT = 32
"""Positions of a unit of a cache. In an int8 cache, the weights of a unit's values share a scale."""
MAX_TILE_PAIRS = 12
"""Most pairs of row and head in one product."""
PART = 1024
"""Positions of a part. At a head_dim of 512 that is 1 MB of keys and values in int8, and 2 KB of state for each
pair."""
SPLIT_ROWS = 16
"""Most rows of a forward for which threads share the parts; more rows keep all threads busy."""

MAX_PAIRS = 64
"""Most pairs that are computed together, so that all of them read keys and values from a near cache."""
SCORE_BLOCK = 256
"""Positions that are weighed together, from a multiple of SCORE_BLOCK on. Their keys and values are half a megabyte in
fp16 for a head of 512 numbers."""
PAIR_WORDS = 4
"""int64 per pair in the table: the first position that it sees, one more than the last, the address of its path, and
the address of its query."""
SCORE_BYTES = 4 * SCORE_BLOCK + 64
"""Bytes from a pair's scores to the next pair's. Not a power of two, with which all pairs' scores would compete for the
same lines of the nearest cache."""
_STATE_BYTES = 64
"""Bytes of a pair's state beside its float32[head_dim]."""
TAIL = MAX_ROWS + UNIT
"""Most positions of the units that may hold pending rows of a tree."""


class Scratch(NamedTuple):
    """Working memory of a thread, as addresses of its parts. `tile` is the number of pairs in a tile of an int8 cache.

    table : int64[MAX_PAIRS, PAIR_WORDS], what each pair sees
    queries : float32[MAX_PAIRS, head_dim], queries of an fp16 cache, tile by tile: see `float_cache.lay_queries`
    codes : int8[MAX_PAIRS, head_dim], quantised queries, tile by tile: see `integer_tile.score_tile`
    starts : int32[MAX_PAIRS], start values of the queries' integer sums
    query_scales : float32[MAX_PAIRS]
    scores : MAX_TILE_PAIRS times SCORE_BYTES, float32[SCORE_BLOCK] per pair of a tile
    weights : int8[SCORE_BLOCK / UNIT][tile][UNIT], quantised weights
    weight_starts : int32[SCORE_BLOCK / UNIT][tile], start values of the weights' integer sums
    weight_scales : float32[SCORE_BLOCK / UNIT][tile]
    tail_scores : float32[MAX_TILE_PAIRS, TAIL], scores of pending rows in the order of the cache
    tail_weights : int8[TAIL / UNIT][tile][UNIT], weights of pending rows in the order of the cache
    tail_scales : float32[UNIT], scales of the values on a path
    part : states of MAX_PAIRS pairs, of the part that is being computed
    whole : states of MAX_PAIRS pairs, of all parts so far
    end : the address after them
    """

    table: int
    queries: int
    codes: int
    starts: int
    query_scales: int
    scores: int
    weights: int
    weight_starts: int
    weight_scales: int
    tail_scores: int
    tail_weights: int
    tail_scales: int
    part: int
    whole: int
    end: int


def scratch_at(address: int, head_dim: int) -> Scratch:
    """The parts of a thread's working memory. With address 0, `end` is the size that it needs, in bytes."""
    table = address
    queries = table + 8 * PAIR_WORDS * MAX_PAIRS
    codes = queries + 4 * MAX_PAIRS * head_dim
    starts = codes + MAX_PAIRS * head_dim
    query_scales = starts + 4 * MAX_PAIRS
    scores = query_scales + 4 * MAX_PAIRS
    weights = scores + MAX_TILE_PAIRS * SCORE_BYTES
    weight_starts = weights + MAX_TILE_PAIRS * SCORE_BLOCK
    weight_scales = weight_starts + 4 * MAX_TILE_PAIRS * (SCORE_BLOCK // UNIT)
    tail_scores = weight_scales + 4 * MAX_TILE_PAIRS * (SCORE_BLOCK // UNIT)
    tail_weights = tail_scores + 4 * MAX_TILE_PAIRS * TAIL
    tail_scales = tail_weights + MAX_TILE_PAIRS * TAIL
    part = tail_scales + 4 * UNIT
    whole = part + MAX_PAIRS * (4 * head_dim + _STATE_BYTES)
    end = whole + MAX_PAIRS * (4 * head_dim + _STATE_BYTES)
    return Scratch(
        table, queries, codes, starts, query_scales, scores, weights, weight_starts, weight_scales, tail_scores,
        tail_weights, tail_scales, part, whole, end,
    )  # fmt: skip


def state_bytes(head_dim: int) -> int:
    """Bytes of a pair's state."""
    return 4 * head_dim + _STATE_BYTES


# Lookup attention.

CENTROIDS = 16
SPAN = UNIT * 16
"""Positions whose codes lie together: 16 units of UNIT positions. Vector i of codes holds position i of each of the 16
units, so that a unit's maximum and sum are computed in one lane."""
SHARED_UNITS = 4
"""Pairs of a row and a KV head, per thread, below which threads share the keys of a pair; with more, each thread takes
whole pairs."""

_TABLE_BYTES = 16
"""Bytes of a table of products."""
_MAX_SUMS = 8
"""The largest `key_codes.SUMS` of all instruction sets."""


class ThreadWorkspace(NamedTuple):
    """Working memory of a thread, as addresses: `tables` and `scales` of `Tables`, `products` of `make_tables`, `sums`
    of `scan`, and the `end`.
    """

    tables: int
    scales: int
    products: int
    sums: int
    end: int


def workspace_at(address: int, heads: int, codes: int) -> ThreadWorkspace:
    """A thread's working memory for the heads of one KV head. With address 0, `end` is its size in bytes."""
    scales = address + heads * codes * _TABLE_BYTES
    products = scales + LINE * heads
    sums = products + 64 * codes
    return ThreadWorkspace(address, scales, products, sums, sums + UNIT * _MAX_SUMS * 64)


def shares_bytes(heads: int, keys: int) -> int:
    """Bytes for one row and KV head with so many keys: a counter of threads, then shares, then scores of every head."""
    spans = (keys + SPAN - 1) // SPAN
    return LINE + spans * (64 + 128 * heads)
