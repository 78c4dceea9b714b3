"""The machine code that asks for CPUID on Windows, run on Linux: Windows' functions for pages by those of Linux."""

from __future__ import annotations

import ctypes
import mmap
import platform
import sys
from types import SimpleNamespace

import pytest

from ondevice import machine
from ondevice.native import features
from ondevice.native.features import CPUID_CODE, cpuid_at, native_features
from tests.native.windows import pretend_windows

if sys.platform != "linux" or platform.machine() != "x86_64":
    pytest.skip("calls x86-64 code by Linux's convention", allow_module_level=True)

LINUX_TO_WINDOWS = bytes.fromhex("89f9 4989d0 89f2")
"""mov ecx, edi; mov r8, rdx; mov edx, esi: before `CPUID_CODE`, it takes arguments in Linux's registers."""
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

        super().__init__(VirtualAlloc=allocate, VirtualProtect=protect, VirtualFree=free, GetEnabledXStateFeatures=xcr0)


def xcr0() -> int:
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(XGETBV)
    return int(ctypes.CFUNCTYPE(ctypes.c_uint64)(ctypes.addressof(ctypes.c_char.from_buffer(page)))())


def test_the_machine_code_for_windows_finds_what_linux_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, kernel = native_features.__wrapped__(), Kernel32()
    monkeypatch.setattr(features, "CPUID_CODE", LINUX_TO_WINDOWS + CPUID_CODE)
    pretend_windows(monkeypatch, kernel)
    assert native_features.__wrapped__() == expected
    assert not kernel.pages


def test_the_machine_code_reads_all_four_registers() -> None:
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(LINUX_TO_WINDOWS + CPUID_CODE)
    _, *vendor = cpuid_at(ctypes.addressof(ctypes.c_char.from_buffer(page)))(0, 0)
    name = b"".join(vendor[index].to_bytes(4, "little") for index in (0, 2, 1)).decode()
    assert f"vendor_id\t: {name}\n" in machine.CPUINFO.read_text()


@pytest.mark.parametrize("refused", ["may_execute", "may_allocate"])
def test_a_windows_process_that_may_not_run_new_code_has_no_features(
    refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Kernel32(**{refused: False})
    pretend_windows(monkeypatch, kernel)
    assert native_features.__wrapped__() == set()
    assert not kernel.pages
