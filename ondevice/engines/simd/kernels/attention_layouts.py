"""Steps of attention: over all keys, and with look-up over the keys that were chosen or over their codes.

Fields and words are those of `step_layouts`.
"""

from __future__ import annotations

from typing import NamedTuple


class Attend(NamedTuple):
    """Attention of the rows' queries over their sequences' caches, quantised."""

    row_set: int
    x: int
    """Address of a row's queries, float32[query_heads, size]."""
    stride: int
    """Bytes from a row of x to the next."""
    query_heads: int
    kv_heads: int
    size: int
    """Numbers in a head."""
    kind: int
    """Of attention: 0 for full, 1 for sliding."""
    cache: int
    """Index, from `slots.CACHES` on, of the keys' address in a sequence's record; the values' address is the next."""
    activations: int
    """Address of the activations [rows, query_heads * size] that are written."""
    form: int
    """Of the activations: see `inputs`."""


class LookUp(NamedTuple):
    """Choose the units of 32 positions that the rows' queries attend to, by table lookups over codes of the keys."""

    row_set: int
    x: int
    """Address of a row's queries, float32[query_heads, size]."""
    stride: int
    """Bytes from a row of x to the next."""
    query_heads: int
    kv_heads: int
    size: int
    """Numbers in a head."""
    codes: int
    """Index, from `slots.CACHES` on, of the codes' address in a sequence's record; the codebooks' one is the next."""
    width: int
    """Numbers of a key that share a code."""
    window: int
    """Newest positions that are always attended to."""
    begin: int
    """Positions that a row must see to look up; with fewer it attends to all."""
    least: int
    """Units that are chosen at least."""
    most: int
    """And at most."""
    left: int
    """Of a row's weights, this share may be left out, as the bits of a float32: then no more units are chosen."""
    chosen: int
    """Address of int64[rows, kv_heads, 1 + most], the number of chosen units, -1 for all of them, and their numbers."""


class AttendChosen(NamedTuple):
    """`Attend`, to what a `LookUp` has chosen, to the first positions and to the newest."""

    row_set: int
    x: int
    stride: int
    query_heads: int
    kv_heads: int
    size: int
    kind: int
    cache: int
    activations: int
    form: int
    """All as in `Attend`."""
    window: int
    most: int
    chosen: int
    """As in `LookUp`."""


class AttendLookedUp(NamedTuple):
    """`Attend`, with scores by table lookups but for the first positions and the newest."""

    row_set: int
    x: int
    stride: int
    query_heads: int
    kv_heads: int
    size: int
    kind: int
    cache: int
    activations: int
    form: int
    """All as in `Attend`."""
    codes: int
    width: int
    window: int
    begin: int
    """All as in `LookUp`."""
