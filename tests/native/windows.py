"""Makes this process look like one on Windows, with Windows' functions for pages by those of Linux."""

from __future__ import annotations

import ctypes
import mmap
import platform
import sys
import sysconfig
from types import SimpleNamespace

import pytest

XGETBV = bytes.fromhex("31c9 0f01d0 48c1e220 4809d0 c3")
"""Machine code of a function that returns XCR0."""


class Kernel32(SimpleNamespace):
    """Windows' functions for pages, by those of Linux. `pages` are the allocated ones."""

    def __init__(self, *, may_execute: bool = True, may_allocate: bool = True) -> None:
        linux = ctypes.CDLL(None, use_errno=True)
        self.pages: dict[int, mmap.mmap] = {}

        def allocate(_: None, size: ctypes.c_size_t, kind: int, protection: int) -> int:
            assert (kind, protection) == (0x3000, 4)
            if not may_allocate:
                return 0
            page = mmap.mmap(-1, size.value, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            address = ctypes.addressof(ctypes.c_char.from_buffer(page))
            self.pages[address] = page
            return address

        def protect(page: ctypes.c_void_p, size: ctypes.c_size_t, protection: int, old: object) -> int:
            assert protection == 0x20
            return may_execute and linux.mprotect(page, size, mmap.PROT_READ | mmap.PROT_EXEC) == 0

        def free(page: ctypes.c_void_p, size: ctypes.c_size_t, kind: int) -> int:
            assert (size.value, kind) == (0, 0x8000)
            assert page.value is not None
            del self.pages[page.value]
            return 1

        def flush(process: ctypes.c_void_p, page: ctypes.c_void_p, size: ctypes.c_size_t) -> int:
            assert page.value in self.pages
            return 1

        super().__init__(
            VirtualAlloc=allocate,
            VirtualProtect=protect,
            VirtualFree=free,
            FlushInstructionCache=flush,
            GetEnabledXStateFeatures=xcr0,
        )


def xcr0() -> int:
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(XGETBV)
    return int(ctypes.CFUNCTYPE(ctypes.c_uint64)(ctypes.addressof(ctypes.c_char.from_buffer(page)))())


def pretend_windows(monkeypatch: pytest.MonkeyPatch, kernel: object, process: str = "win-amd64") -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(sysconfig, "get_platform", lambda: process)
    monkeypatch.setattr(platform, "machine", lambda: "ARM64")  # the machine's own, if it emulates x86-64
    monkeypatch.setattr(ctypes, "CDLL", {"kernel32": kernel}.__getitem__)
