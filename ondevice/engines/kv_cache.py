"""Keys and values of one sequence, for the layers of one attention kind, in the order of positions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ondevice.contract import AttentionKind
from ondevice.manifest import Layer, Target

KINDS: tuple[AttentionKind, ...] = ("full", "sliding")

SLACK = 256
"""Rows kept beyond a window: how far a rewind may go without a snapshot."""

LINE = 64
"""Bytes of a cache line, where every buffer begins."""

MARGIN = 64
"""Rows that a copy of a sliding cache holds beyond the window, so that it serves somewhat shorter sequences too: a
chat's next prompt may part from the last one a few tokens before its end."""


@dataclass(frozen=True)
class Views:
    """Which positions an engine looks at together: from a multiple of `align` on, in steps of `step`, at least `least`.

    An engine that addresses rows one by one has no need of it.
    """

    align: int = 1
    step: int = 1
    least: int = 0


class Units:
    """How the rows of a cache lie: units of some positions, from a multiple of `positions` on. Here a row is a unit."""

    positions = 1

    def move(self, keys: NDArray[Any], values: NDArray[Any], source: NDArray[np.int64], first: int) -> None:
        """Copy the rows `source`, which ascend, to those from `first` on, none of which lies behind its source."""
        for part in (keys, values):
            part[first : first + len(source)] = part[source]


SINGLE = Units()


@dataclass(frozen=True)
class HeldRows:
    """Units of a cache for positions base..length - 1: arrays [2, units] (keys, values) by layer."""

    base: int
    length: int
    rows: Mapping[int, NDArray[Any]]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.rows.values())

    def copy(self) -> HeldRows:
        return HeldRows(self.base, self.length, {layer: array.copy() for layer, array in self.rows.items()})


class KVCache:
    """Keys and values of the layers of one kind.

    A full cache keeps every position and grows by doubling. A sliding cache keeps the last `history` positions and
    some slack in one linear buffer, and moves them to its front when it reaches the end: one copy of the window in
    `SLACK + max_rows` tokens, where a ring buffer would need two views per layer.

    Buffers are [2, units] (keys, values) for every layer, with room for `capacity` rows; row r holds position
    `base + r`.
    """

    def __init__(
        self,
        types: Mapping[int, np.dtype[Any]],
        max_rows: int,
        history: int | None = None,
        views: Views = Views(),
        units: Units = SINGLE,
    ) -> None:
        """
        Args:
            types: layer index -> dtype of a unit of keys or of values.
            max_rows: most rows that one forward appends.
            history: positions before the newest that must stay visible; None keeps all.
            views: what the engine reads together; whole units.
            units: how rows lie.
        """
        self.base = 0
        self._history = history
        self._types = types
        self._views = views
        self._units = units
        capacity = 2 * max_rows + views.least
        if history is None:
            capacity = _up(capacity, views.align)
        else:
            capacity = _up(capacity + history + SLACK + views.step, views.align) + views.align
        self.capacity = capacity
        self._buffers = self._zeros(capacity)

    @property
    def layers(self) -> list[int]:
        return list(self._types)

    @property
    def slides(self) -> bool:
        """Whether rows are forgotten."""
        return self._history is not None

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def reserve(self, length: int, rows: int) -> tuple[int, int]:
        """Make room for `rows` rows after `length` committed ones; return the positions (start, stop) of the view.

        The view holds all that a row at position `length` or later may see, the new rows, and padding. Buffers are
        others when `capacity` has changed.

        Raises:
            ValueError: an interrupt has left the cache without rows of these positions.
        """
        start = self._first(length)
        if start < self.base:
            raise ValueError("rows were lost in an interrupt: rewind this session")
        stop = start + max(self._views.least, _up(length + rows - start, self._views.step))
        if stop - self.base > self.capacity:
            if self._history is None:
                self._grow(stop)
            else:
                self._slide(length)
        return start, stop

    def parts(self, layer: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Keys and values of a layer, all units of each."""
        keys, values = self._buffers[layer]
        return keys, values

    def view(self, layer: int, start: int, stop: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Keys and values [stop - start] of these positions; writing to them writes to the cache."""
        keys, values = self._buffers[layer][:, start - self.base : stop - self.base]
        return keys, values

    def gather(self, length: int, path: Sequence[int]) -> None:
        """Move the pending rows `path` (ascending) to follow `length` without gaps."""
        first = length - self.base
        source = first + np.asarray(path, np.int64)
        for buffer in self._buffers.values() if path else ():
            self._units.move(buffer[0], buffer[1], source, first)

    def can_rewind(self, length: int) -> bool:
        return self._first(length) >= self.base

    def clear(self) -> None:
        self.base = 0

    def held(self, length: int) -> HeldRows:
        """The rows that a sequence of `length` tokens needs, and a margin: views, which the next forward may change."""
        base = max(self.base, self._first(max(0, length - MARGIN)))
        kept = self._kept(base, length)
        return HeldRows(base, length, {layer: buffer[:, kept] for layer, buffer in self._buffers.items()})

    def can_adopt(self, held: HeldRows, length: int) -> bool:
        """Whether these rows are enough for a sequence of `length` tokens."""
        return held.base <= self._first(length) and length <= held.length

    def adopt(self, held: HeldRows) -> None:
        """Hold a copy of these rows, and nothing else."""
        count = self._count(held.length - held.base)
        if count * self._units.positions > self.capacity:
            self._allocate(count * self._units.positions)
        self.base = held.length  # so that an interrupt leaves nothing to rewind to
        for layer, buffer in self._buffers.items():
            buffer[:, :count] = held.rows[layer]
        self.base = held.base

    def blank(self, base: int, length: int) -> HeldRows:
        """Zeros in the shape of `held` rows, to be read into from a file.

        Raises:
            ValueError: no sequence of `length` tokens has rows from `base` on.
        """
        if not self._first(max(0, length - MARGIN)) <= base <= self._first(length):
            raise ValueError(f"rows from {base} on do not fit a sequence of {length} tokens")
        return HeldRows(base, length, self._zeros(length - base))

    def _first(self, length: int) -> int:
        """The position at which the view for a row at `length` starts."""
        if self._history is None:
            return 0
        return max(0, length - self._history) // self._views.align * self._views.align

    def _grow(self, stop: int) -> None:
        capacity = max(2 * self.capacity, stop)
        grown = self._zeros(capacity)
        for layer, old in self._buffers.items():
            grown[layer][:, : old.shape[1]] = old
        self._buffers, self.capacity = grown, capacity  # all at once, or nothing after an interrupt

    def _allocate(self, capacity: int) -> None:
        buffers = self._zeros(capacity)
        self._buffers, self.capacity = buffers, capacity  # all at once, or nothing after an interrupt

    def _zeros(self, rows: int) -> dict[int, NDArray[Any]]:
        """Buffers for so many rows, each on a cache line: of memory from numpy, vectors would lie on two."""
        count, zeros = self._count(rows), {}
        for layer, unit in self._types.items():
            size = 2 * count * unit.itemsize
            room = np.zeros(size + LINE, np.uint8)
            zeros[layer] = np.ndarray((2, count), unit, room, -room.ctypes.data % LINE)
        return zeros

    def _count(self, rows: int) -> int:
        """Units of so many rows, the last of which may have room for more."""
        return -(-rows // self._units.positions)

    def _kept(self, base: int, length: int) -> slice:
        """The units of the positions base..length - 1; a unit begins at `base`."""
        first = (base - self.base) // self._units.positions
        return slice(first, first + self._count(length - base))

    def _slide(self, length: int) -> None:
        base = max(self.base, self._first(max(0, length - SLACK)))
        kept, count = self._kept(base, length), self._count(length - base)
        self.base = length  # so that an interrupt leaves nothing to rewind to
        for buffer in self._buffers.values():
            buffer[:, :count] = buffer[:, kept].copy()
        self.base = base


def make_caches(
    target: Target,
    unit_type: Callable[[Layer], np.dtype[Any]],
    max_rows: int,
    views: Mapping[AttentionKind, Views],
    units: Units = SINGLE,
) -> dict[AttentionKind, KVCache]:
    """The caches of one sequence.

    Args:
        target: whose layers own them.
        unit_type: the dtype of a unit of a layer's keys, and of its values.
        max_rows: most rows that one forward appends.
        views: what the engine reads together, where that is more than single rows.
        units: how rows lie.
    """
    caches: dict[AttentionKind, KVCache] = {}
    for kind in KINDS:
        owners = [index for index in target.kv_layers() if target.layers[index].kind == kind]
        types = {index: unit_type(target.layers[index]) for index in owners}
        # window - 1 rows are enough for the target; a drafter at position `length` sees two more: `first_drafted`
        history = target.sliding_window + 1 if kind == "sliding" else None
        caches[kind] = KVCache(types, max_rows, history, views.get(kind, Views()), units)
    return caches


def first_drafted(kind: AttentionKind, length: int, window: int) -> int:
    """The first position that a drafter's layer sees behind `length` verified tokens.

    The reference's window is inclusive here: the last `window + 1` of them. Source:
    `create_bidirectional_sliding_window_mask` over the flipped cache, Gemma4AssistantForCausalLM.
    """
    return max(0, length - 1 - window) if kind == "sliding" else 0


def _up(value: int, step: int) -> int:
    return -(-value // step) * step
