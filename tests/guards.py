"""Arrays between guard bytes: a kernel that writes past an array changes them, and the test fails.

Kernels write to addresses, so neither numpy nor Python notices such a write. The fixture `guards` (tests/conftest.py)
makes a `Guards` and checks it when the test ends.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ondevice.engines import kv_cache
from ondevice.engines.simd.buffers import Buffers

GUARD = 4096
"""Guard bytes on each side of an array."""
PATTERN = 0xA5
"""The value of a guard byte. As float32 it is -2.9e-16, as an index of 4 or 8 bytes it lies outside every array."""
LINE = 64
"""Alignment of the arrays, a cache line."""

_zeros = np.zeros


class Guards:
    """Allocates arrays between guard bytes and checks the guard bytes."""

    def __init__(self) -> None:
        self._rooms: list[tuple[str, NDArray[np.uint8], int, int]] = []
        """Description, all bytes, and the first and last byte + 1 of each array among them."""

    def zeros(self, shape: int | tuple[int, ...], dtype: DTypeLike = np.float64, **others: Any) -> NDArray[Any]:
        """An array of zeros in C order. Other arguments of `np.zeros` are ignored."""
        kind = np.dtype(dtype)
        sizes = (shape,) if isinstance(shape, int | np.integer) else tuple(shape)
        size = math.prod(sizes) * kind.itemsize
        room = _zeros(size + 2 * GUARD + LINE, np.uint8)
        start = GUARD + -(int(room.ctypes.data) + GUARD) % LINE
        room[:start] = room[start + size :] = PATTERN
        self._rooms.append((f"{kind}{list(sizes)}", room, start, start + size))
        return np.ndarray(sizes, kind, room.data, start)

    def full(self, shape: int | tuple[int, ...], value: Any, dtype: DTypeLike = np.float32) -> NDArray[Any]:
        """An array of equal numbers."""
        made = self.zeros(shape, dtype)
        made[...] = value
        return made

    def copy(self, values: NDArray[Any]) -> NDArray[Any]:
        """A copy of an array."""
        made = self.zeros(values.shape, values.dtype)
        made[...] = values
        return made

    def check(self) -> None:
        """Fail if a guard byte has changed."""
        for name, room, start, stop in self._rooms:
            for side, guard, first in (("before", room[:start], -start), ("behind", room[stop:], 0)):
                changed = np.flatnonzero(guard != PATTERN)
                assert not len(changed), (
                    f"{len(changed)} bytes {side} an array {name} were written, the first at {first + int(changed[0])}"
                )

    @contextmanager
    def around_all(self) -> Iterator[None]:
        """Within the block, allocate all memory of engines and samplers between guard bytes."""
        with ExitStack() as stack:
            for owner, name, own in (
                (np, "zeros", self.zeros),
                (np, "empty", self.zeros),
                (Buffers, "bytes", self._bytes()),
                (kv_cache, "mapped", self._mapped),
            ):
                stack.enter_context(patch.object(owner, name, own))
            yield

    def _bytes(self) -> Any:
        """`Buffers.bytes` without the room for alignment, in which a write past the end would not be noticed."""
        guards = self

        def allocate(buffers: Any, size: int) -> int:
            made = guards.zeros(size, np.uint8)
            buffers._held.append(made)
            return int(made.ctypes.data)

        return allocate

    def _mapped(self, types: Mapping[int, np.dtype[Any]], units: Mapping[int, int]) -> dict[int, NDArray[Any]]:
        """`kv_cache.mapped` with an array for each layer."""
        return {layer: self.zeros((2, units[layer], *unit.shape), unit.base) for layer, unit in types.items()}
