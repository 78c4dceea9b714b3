"""Prints the outputs of a bundle in an address space in which gigabytes are mapped before and between loads of kernels:
`python -m tests.simd.machines.far_apart GIGABYTES SEED BUNDLE`.

The mappings cost no memory. Between them there are holes for a few pages, but none for code: a linker that maps code
and constants apart gets them gigabytes apart.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import random
import sys
from collections.abc import Callable
from pathlib import Path

from ondevice.bundle import Bundle
from ondevice.native import functions, library
from tests.simd.outputs import digest

PROT_NONE, MAP_NORESERVE = 0, 0x4000
SMALL, LARGE = (1 << 16, 1 << 17), (1 << 20, 1 << 26, 3 << 26)
"""Bytes of a mapping. Small ones come first: they fill all holes that are large enough for code."""
SMALL_BYTES = 1 << 26
TIMES = 3
"""How often all kernels are loaded, at other addresses."""
HOLE = 1 << 14
"""Bytes of a hole: enough for constants."""


class Mappings:
    """Maps gigabytes in many pieces, and counts them."""

    def __init__(self, gigabytes: float, seed: int) -> None:
        self._bytes, self._rng, self.count = int(gigabytes * (1 << 30)), random.Random(seed), 0
        self._system = ctypes.CDLL(None, use_errno=True)
        self._system.mmap.restype = ctypes.c_void_p

    def add(self) -> None:
        """Map the gigabytes once more."""
        left = self._bytes
        while left > 0:
            size = min(left, self._rng.choice(SMALL if left > self._bytes - SMALL_BYTES else LARGE))
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANON | MAP_NORESERVE
            address = self._system.mmap(None, ctypes.c_size_t(size), PROT_NONE, flags, -1, ctypes.c_long(0))
            assert address != ctypes.c_void_p(-1).value, "the address space is full"
            if size >= 3 * HOLE:
                self._system.munmap(ctypes.c_void_p(address + HOLE), ctypes.c_size_t(HOLE))
            left -= size
            self.count += 1


def main() -> None:
    mappings = Mappings(float(sys.argv[1]), int(sys.argv[2]))
    loaded: list[str] = []
    load = library.load_block.__wrapped__

    def load_afterwards(file: Path) -> Callable[[str], int]:
        mappings.add()
        loaded.append(file.name)
        return load(file)

    library.load_block = load_afterwards  # type: ignore[assignment]
    bundle, digests = Bundle.open(sys.argv[3]), set()
    for _ in range(TIMES):
        functions._loaded.cache_clear()
        for entry in functions.ENTRIES.values():
            for name in ("function", "address"):
                vars(entry).pop(name, None)
        digests.add(digest(bundle))
    (result,) = digests
    sys.stdout.write(json.dumps({"digest": result, "loaded": len(loaded), "mappings": mappings.count}))


if __name__ == "__main__":
    main()
