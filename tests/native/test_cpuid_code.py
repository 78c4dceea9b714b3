"""The machine code that asks for CPUID on Windows, run on Linux: Windows' functions for pages by those of Linux."""

from __future__ import annotations

import ctypes
import mmap
import platform
import sys

import pytest

from ondevice import machine
from ondevice.native import features
from ondevice.native.features import CPUID_CODE, cpuid_at, native_features
from tests.native.windows import Kernel32, pretend_windows

if sys.platform != "linux" or platform.machine() != "x86_64":
    pytest.skip("calls x86-64 code by Linux's convention", allow_module_level=True)

LINUX_TO_WINDOWS = bytes.fromhex("89f9 4989d0 89f2")
"""mov ecx, edi; mov r8, rdx; mov edx, esi: before `CPUID_CODE`, it takes arguments in Linux's registers."""


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
