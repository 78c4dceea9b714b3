"""Keys and values of one sequence, for the layers of one attention kind, in the order of positions.

Both engines keep their caches here. `make_caches` makes those of a sequence, `KVCache` grows, slides and rewinds one,
`HeldRows` are rows taken out of it, for a snapshot, a fork or a file. What a row of an engine looks like is the
engine's choice (`Units`, and the dtype that it passes); `attention_mask` says which positions a row sees.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ondevice.bundle_format.decoder import Mixer
from ondevice.bundle_format.graph_io import AttentionKind
from ondevice.bundle_format.model_config import Target
from ondevice.engines.protocol import ROOT, Mask, TokenTree
from ondevice.machine import private_memory

SLACK = 256
"""Rows that a sliding cache keeps beyond its window: how far a rewind may go without a snapshot."""

MARGIN = 64
"""Rows that a copy of a sliding cache holds beyond the window, so that it also serves somewhat shorter sequences: a
chat's next prompt may differ from the last one a few tokens before its end."""


@dataclass(frozen=True)
class Views:
    """The range of positions that an engine reads as one array.

    It begins at a multiple of `align`, its length is a multiple of `step` and at least `least`. The defaults are for an
    engine that addresses single rows.
    """

    align: int = 1
    step: int = 1
    least: int = 0


class Units:
    """How the rows of a cache lie in memory: in units of `positions` rows each. In this base class a unit is a row."""

    positions = 1

    def move(self, keys: NDArray[Any], values: NDArray[Any], source: NDArray[np.int64], first: int) -> None:
        """Copy rows within a cache: row `source[i]` to row `first + i`.

        `source` is ascending, and no row moves towards the end of the cache.
        """
        for part in (keys, values):
            part[first : first + len(source)] = part[source]


SINGLE = Units()


@dataclass(frozen=True)
class HeldRows:
    """The units of a cache that hold positions base..length - 1: layer -> array [2, units], keys then values."""

    base: int
    length: int
    rows: Mapping[int, NDArray[Any]]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.rows.values())

    def copy(self) -> HeldRows:
        types = {layer: np.dtype((array.dtype, array.shape[2:])) for layer, array in self.rows.items()}
        rows = mapped(types, {layer: array.shape[1] for layer, array in self.rows.items()})
        for layer, array in self.rows.items():
            rows[layer][:] = array
        return HeldRows(self.base, self.length, rows)


class KVCache:
    """Keys and values of the layers of one kind.

    A full cache keeps every position and grows by doubling. A sliding cache keeps the last `history` positions and
    `slack` more in one linear buffer, and moves them to the front when it reaches the end: one copy of them every
    `max_rows` tokens. A ring buffer would save the copy, but its rows would lie in two pieces per layer.

    A layer's buffer is [2, units], keys then values, with room for `capacity` rows; row r holds position `base + r`.
    """

    def __init__(
        self,
        types: Mapping[int, np.dtype[Any]],
        max_rows: int,
        history: int | None = None,
        views: Views = Views(),
        units: Units = SINGLE,
        *,
        slack: int | None = None,
    ) -> None:
        """
        Args:
            types: layer index -> dtype of one unit of keys, and of values.
            max_rows: most rows that one forward appends.
            history: positions before the newest that must stay readable; None keeps all.
            views: the range of positions that the engine reads at once, in whole units.
            units: how rows lie in memory.
            slack: SLACK unless said otherwise; at least MARGIN.
        """
        self.base = 0
        self._history = history
        self._slack = SLACK if slack is None else slack
        self._types = types
        self._views = views
        self._units = units
        if history is None:
            capacity = 2 * max_rows + views.least
        else:
            capacity = max_rows + views.least + history + self._slack + views.step + views.align
        self.capacity = _up(capacity, views.align)
        self._buffers = self._zeros(self.capacity)

    @property
    def layers(self) -> list[int]:
        return list(self._types)

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def reserve(self, length: int, rows: int) -> tuple[int, int]:
        """Make room for `rows` rows after `length` committed ones.

        The buffers were reallocated if `capacity` has changed.

        Returns:
            The positions (start, stop) of the view: all that a row at position `length` or later may see, the new rows,
            and padding.

        Raises:
            ValueError: an interrupt has left the cache without the rows of these positions, or there are more new rows
                than a sliding cache has room for.
        """
        start = self._first(length)
        if start < self.base:
            raise ValueError("rows were lost in an interrupt: rewind this session")
        stop = start + max(self._views.least, _up(length + rows - start, self._views.step))
        if stop - self.base > self.capacity:
            if self._history is None:
                self._allocate(max(2 * self.capacity, stop), keep=True)
            else:
                self._slide(length)
                if stop - self.base > self.capacity:
                    self._slide(length, slack=0)
                if stop - self.base > self.capacity:
                    raise ValueError(f"{rows} rows do not fit into a cache for {self.capacity}")
        return start, stop

    def parts(self, layer: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """All units of a layer's keys, and of its values."""
        keys, values = self._buffers[layer]
        return keys, values

    def view(self, layer: int, start: int, stop: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """A layer's keys and values of positions start..stop - 1, as views: writing to them writes to the cache."""
        keys, values = self._buffers[layer][:, start - self.base : stop - self.base]
        return keys, values

    def gather(self, length: int, path: Sequence[int]) -> None:
        """Move the pending rows `path` (ascending) next to the `length` committed ones, without gaps."""
        first = length - self.base
        source = first + np.asarray(path, np.int64)
        for buffer in self._buffers.values() if path else ():
            self._units.move(buffer[0], buffer[1], source, first)

    def can_rewind(self, length: int) -> bool:
        """Whether the cache holds all rows that a row at position `length` may see."""
        return self._first(length) >= self.base

    def clear(self) -> None:
        """Begin at position 0 again. The old rows stay, to be overwritten."""
        self.base = 0

    def held(self, length: int, read: int | None = None) -> HeldRows:
        """The rows that a sequence of `length` tokens needs, and MARGIN more, as views: the next forward may change
        them.

        read : the number of tokens that its states include; a forward may read rows from there on again
        """
        base = max(self.base, self._least(length, read))
        kept = self._kept(base, length)
        return HeldRows(base, length, {layer: buffer[:, kept] for layer, buffer in self._buffers.items()})

    def can_adopt(self, held: HeldRows, length: int) -> bool:
        """Whether these rows are enough for a sequence of `length` tokens."""
        return held.base <= self._first(length) and length <= held.length

    def adopt(self, held: HeldRows) -> None:
        """Replace the cache's content by a copy of these rows."""
        count = self._count(held.length - held.base)
        if count * self._units.positions > self.capacity:
            self._allocate(count * self._units.positions, keep=False)
        self.base = held.length  # after an interrupt here, no rewind is possible
        for layer, buffer in self._buffers.items():
            buffer[:, :count] = held.rows[layer]
        self.base = held.base

    def blank(self, base: int, length: int, read: int | None = None) -> HeldRows:
        """Zeros in the shape of the rows of a sequence of `length` tokens, as the destination of a read from a file.

        read : as for `held`

        Raises:
            ValueError: no sequence of `length` tokens has rows from `base` on.
        """
        most = self._first(length if read is None else read)
        if base % self._views.align or not self._least(length, read) <= base <= most:
            raise ValueError(f"rows from {base} on do not fit a sequence of {length} tokens")
        return HeldRows(base, length, self._zeros(length - base))

    def _first(self, length: int) -> int:
        """The first position that the view of a row at position `length` holds."""
        if self._history is None:
            return 0
        return max(0, length - self._history) // self._views.align * self._views.align

    def _least(self, length: int, read: int | None) -> int:
        """The first position of held rows."""
        needed = max(0, length - MARGIN)
        return self._first(needed if read is None else min(needed, read))

    def _allocate(self, capacity: int, *, keep: bool) -> None:
        """Take new buffers for `capacity` rows; `keep` if the rows of the old ones are copied."""
        buffers = self._zeros(capacity)
        for layer, old in self._buffers.items() if keep else ():
            buffers[layer][:, : old.shape[1]] = old
        self._buffers, self.capacity = buffers, capacity  # one assignment: an interrupt leaves the old pair

    def _zeros(self, rows: int) -> dict[int, NDArray[Any]]:
        """Zeroed buffers for `rows` rows."""
        return mapped(self._types, dict.fromkeys(self._types, self._count(rows)), huge=rows >= HUGE_ROWS)

    def _count(self, rows: int) -> int:
        """The number of units that hold `rows` rows; the last one may be partly filled."""
        return -(-rows // self._units.positions)

    def _kept(self, base: int, length: int) -> slice:
        """The units of positions base..length - 1. A unit begins at `base`."""
        first = (base - self.base) // self._units.positions
        return slice(first, first + self._count(length - base))

    def _slide(self, length: int, slack: int | None = None) -> None:
        """Move the rows to the front but those that more than `slack` positions before `length` need; None for the
        cache's own slack.
        """
        base = max(self.base, self._first(max(0, length - (self._slack if slack is None else slack))))
        kept, count = self._kept(base, length), self._count(length - base)
        self.base = length  # after an interrupt here, no rewind is possible
        for buffer in self._buffers.values():
            buffer[:, :count] = buffer[:, kept].copy()
        self.base = base


LINE = 64
"""Bytes of a cache line. Every layer's buffer begins on one: vectors would straddle lines otherwise."""


HUGE_ROWS = 2048
"""Rows from which a cache lies in huge pages. The first rows of all layers touch every page of a small cache. To clear
huge ones took 49 to 125 ms of the time to a first token of SmolLM2 in a virtual machine that gets its memory page by
page, 2 ms where the machine has it already; without them a first token took 18 to 32 ms, and forwards after 900 tokens
the same time, after 4,000 1.02 to 1.04 times as much."""


def mapped(
    types: Mapping[int, np.dtype[Any]], units: Mapping[int, int], *, huge: bool = True
) -> dict[int, NDArray[Any]]:
    """Zeroed buffers [2, units] of some layers, in pages of their own that return to the system with the last of them.

    malloc would keep them: buffers of many lengths fragment its arenas. After 300 generations of 4 callers, with a
    budget of 537 MB for finished sequences, a process had 704 MB of anonymous memory and 495 MB after `close` with
    malloc, 589 and 93 MB with mappings (tests/engines/test_cache_memory.py).

    Args:
        types: layer -> dtype of one unit of keys, and of values.
        units: layer -> number of units.
        huge: whether huge pages may be used.
    """
    sizes = {layer: -(-2 * units[layer] * unit.itemsize // LINE) * LINE for layer, unit in types.items()}
    total = max(sum(sizes.values()), 1)
    pages = private_memory(total, huge=huge)
    buffers, offset = {}, 0
    for layer, unit in types.items():
        buffers[layer] = np.ndarray((2, units[layer]), unit, pages, offset)
        offset += sizes[layer]
    return buffers


def make_caches(
    target: Target,
    unit_type: Callable[[Mixer], np.dtype[Any]],
    max_rows: int,
    views: Views = Views(),
    units: Units = SINGLE,
) -> dict[AttentionKind, KVCache]:
    """The caches of one sequence: one for each kind of attention that the target has, for what has one of its own
    (`Target.cached`).

    unit_type : the dtype of one unit of a layer's keys, and of its values
    max_rows, views, units : as for `KVCache`; the slack of convolutions is MARGIN
    """
    caches: dict[AttentionKind, KVCache] = {}
    for kind in target.kinds:
        types = {number: unit_type(own) for number, own in target.cached.items() if own.kind == kind}
        # the target needs window - 1 earlier rows; a drafter at position `length` sees two more: see `first_drafted`
        history = None if target.window is None or kind == "full" else target.window + 1
        convolved = kind == "sliding" and target.convolves  # rows of 8 to 32 KB: no more than copies hold
        caches[kind] = KVCache(types, max_rows, history, views, units, slack=min(SLACK, MARGIN) if convolved else None)
    return caches


def first_drafted(length: int, window: int | None) -> int:
    """The first position that a drafter's layer sees, after `length` verified tokens, through a window.

    It sees the last `window + 1` of them: the reference's window is inclusive here. Source:
    `create_bidirectional_sliding_window_mask` over the flipped cache, Gemma4AssistantForCausalLM.
    """
    return 0 if window is None else max(0, length - 1 - window)


def attention_mask(
    tree: TokenTree,
    length: int,
    view: tuple[int, int],
    window: int | None,
    blocks: Sequence[tuple[int, int]] = (),
) -> Mask:
    """bool[T, stop - start]: which cache positions of a view (start, stop) each row of a tree sees.

    Row j of the tree lies at cache position length + j, whatever its depth; positions from length + T on are padding.
    With a window, a row at position p sees positions p - window + 1 .. p (Gemma4, `sliding_window_overlay`), and a row
    of one of the blocks all later rows of its block (`blockwise_overlay`; see `Rows`).
    """
    start, stop = view
    depths = tree.depths()
    count = len(depths)
    seen = np.zeros((count, stop - start), np.bool_)
    seen[:, : length - start] = True
    seen[:, length - start : length - start + count] = tree.ancestors()
    if window is not None:
        positions = np.arange(start, stop)
        positions[length - start : length - start + count] = length + depths
        seen &= positions[None, :] > (length + depths - window)[:, None]
        for begin, end in blocks:
            own = seen[begin:end, length - start + begin : length - start + end]
            own |= ~np.tri(end - begin, dtype=np.bool_)
    return seen


def window_rows(tree: TokenTree, length: int, start: int, window: int) -> NDArray[np.int64]:
    """int64[T, window]: the cache rows, from `start` on, that a convolution sums for each row of a tree.

    A row's own comes first, then its ancestor's, and so on; -1 stands for positions before the first one.
    """
    found = np.empty((len(tree), window), np.int64)
    for row, parent in enumerate(tree.parents):
        before = length - 1 - np.arange(window - 1) if parent == ROOT else found[parent, :-1]
        found[row, 0], found[row, 1:] = length + row, before
    return np.where(found < 0, -1, found - start)


def _up(value: int, step: int) -> int:
    return -(-value // step) * step
