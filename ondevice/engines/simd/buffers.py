"""Allocates the memory that the addresses in a plan point into."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_ALIGN = 64


class Buffers:
    """Allocates memory aligned to 64 bytes, which lives as long as this object."""

    def __init__(self) -> None:
        self._held: list[NDArray[Any]] = []

    def bytes(self, size: int) -> int:
        """The address of `size` zeroed bytes."""
        room = np.zeros(size + _ALIGN, np.uint8)
        self._held.append(room)
        return int(room.ctypes.data) + -int(room.ctypes.data) % _ALIGN

    def floats(self, count: int) -> int:
        """The address of `count` float32, zeros."""
        return self.bytes(4 * count)

    def rows(self, count: int, width: int) -> tuple[NDArray[np.float32], int]:
        """float32[count, width], zeros, and its address: for what Python reads or writes as well."""
        address = self.floats(count * width)
        room = self._held[-1]
        start = address - int(room.ctypes.data)
        return room[start : start + 4 * count * width].view(np.float32).reshape(count, width), address

    def constant(self, values: NDArray[Any]) -> int:
        """The address of a copy of an array."""
        copy = np.ascontiguousarray(values)
        address = self.bytes(copy.nbytes)
        start = address - int(self._held[-1].ctypes.data)
        self._held[-1][start : start + copy.nbytes] = copy.reshape(-1).view(np.uint8)
        return address

    def hold(self, values: NDArray[Any]) -> int:
        """The address of a contiguous array itself, which is kept alive."""
        if not values.flags.c_contiguous:
            raise ValueError("only a contiguous array has an address that means something")
        self._held.append(values)
        return int(values.ctypes.data)


def float_bits(value: float) -> int:
    """The bits of a float32 as an integer, as plans hold it."""
    return int(np.float32(value).view(np.int32))
