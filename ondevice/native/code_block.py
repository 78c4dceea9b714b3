"""Machine code as one block of memory: its file, and loading it into this process.

A block is code, its constants and a table of addresses of C functions, linked when it is built (`linking`): every
reference inside is a distance inside, so the block runs at any address. To load it is to copy it, to fill in the table,
and to make the memory executable. Nothing of LLVM is needed for this.

LLVM's linkers load objects too, with what llvmlite 0.50 offers of them:

- MCJIT maps code and constants apart. Once gigabytes are mapped between them, distances of 32 bits do not suffice, and
  LLVM ends the process: `Assertion isInt<32>(RealOffset)`. With 2 GB and more mapped between loads, as
  `tests/simd/far_apart.py` does, it ended so 18 of 18 times on x86-64.
- MCJIT with llvmlite's own memory manager, the default on ARM, maps an object as a whole. On x86-64 it ends every
  process: `Assertion "All memory must be pre-allocated"`.
- JITLink maps an object as a whole, too. llvmlite does not offer it on Windows.
- The large code model has no distances. ELF for ARM does not have it for position-independent code, and on x86-64 every
  constant takes another instruction.

A linker of the system, which makes a shared library, is missing on most machines. The platforms' wheels have such
libraries.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import platform
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import NamedTuple, Self

from ondevice.errors import OndeviceError

ADDRESS_BYTES = 8
"""Bytes of an address in a block's table."""


class CodeBlock(NamedTuple):
    """Machine code that runs at any address that is a multiple of a page.

    content : the bytes of the block
    functions : offsets of the functions that can be called, by name
    imports : offsets of the addresses of C functions that it calls, by name
    """

    content: bytes
    functions: dict[str, int]
    imports: dict[str, int]

    def to_bytes(self) -> bytes:
        """The content of a file: a line of JSON, then the block."""
        tables = {"functions": self.functions, "imports": self.imports}
        return json.dumps(tables, sort_keys=True).encode() + b"\n" + self.content

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """
        Raises:
            ValueError: this is not the content of a block's file.
        """
        line, _, content = data.partition(b"\n")
        try:
            tables = json.loads(line)
            block = cls(content, dict(tables["functions"]), dict(tables["imports"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError("this is no block of machine code") from error
        ends = [*block.functions.values(), *(offset + ADDRESS_BYTES for offset in block.imports.values())]
        if not all(isinstance(end, int) and 0 <= end <= len(content) for end in ends):
            raise ValueError("this is no block of machine code")
        return block

    def load(self) -> Callable[[str], int]:
        """Load the block, for as long as the process runs; returns a function from names to addresses.

        Raises:
            OndeviceError: the system does not allow new machine code, or lacks a C function.
        """
        content = bytearray(self.content)
        for name, offset in self.imports.items():
            content[offset : offset + ADDRESS_BYTES] = c_function(name).to_bytes(ADDRESS_BYTES, sys.byteorder)
        try:
            address = CodePages(bytes(content)).address
        except OSError as error:
            raise OndeviceError(
                f"this system allows no machine code that a program has written ({error.strerror}): install a wheel of "
                "ondevice-runtime for this platform, which has the kernels in a library"
            ) from error
        return lambda name: address + self.functions[name]


def c_function(name: str) -> int:
    """The address of a function of the C library.

    Raises:
        OndeviceError: there is none of this name.
    """
    for library in _c_libraries():
        with suppress(AttributeError):
            return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
    raise OndeviceError(f"the C library of this system has no function {name}, which the kernels need")


@cache
def _c_libraries() -> tuple[ctypes.CDLL, ...]:
    if sys.platform == "win32":
        return ctypes.CDLL("ucrtbase"), ctypes.CDLL("kernel32")
    if sys.platform == "linux":  # a Python without modules as libraries may have bound only a part of libm
        return ctypes.CDLL(None), ctypes.CDLL("libm.so.6")
    return (ctypes.CDLL(None),)


class CodePages:
    """Pages of executable memory, which are never writable at the same time.

    They are there until `free` is called: at the end of a process, threads may still run code when objects are deleted.

    Attributes:
        address: of the first page.
    """

    def __init__(self, code: bytes) -> None:
        """Copy machine code to new pages.

        Raises:
            OSError: the system refuses.
        """
        self._size = len(code)
        self.address = _windows_pages(code) if sys.platform == "win32" else _posix_pages(code)

    def free(self) -> None:
        """Return the pages to the system."""
        if sys.platform == "win32":
            _windows_free(self.address)
        else:
            _posix_free(self.address, self._size)


def _posix_pages(code: bytes) -> int:
    system, size = _posix(), ctypes.c_size_t(len(code))
    flags, protection = mmap.MAP_PRIVATE | mmap.MAP_ANON, mmap.PROT_READ | mmap.PROT_WRITE
    address = system.mmap(None, size, protection, flags, -1, ctypes.c_long(0))
    if address == MAP_FAILED:
        raise _posix_error()
    start, end = ctypes.c_void_p(address), ctypes.c_void_p(address + len(code))
    ctypes.memmove(start, code, len(code))
    if system.mprotect(start, size, mmap.PROT_READ | mmap.PROT_EXEC):
        error = _posix_error()
        _posix_free(address, len(code))
        raise error
    if sys.platform == "darwin":
        system.sys_icache_invalidate(start, size)
    elif (
        platform.machine() == "aarch64"
    ):  # Linux does it too, when pages become executable; no other processor needs it
        with suppress(OSError, AttributeError):
            ctypes.CDLL("libgcc_s.so.1").__clear_cache(start, end)
    return int(address)


def _posix_free(address: int, size: int) -> None:
    _posix().munmap(ctypes.c_void_p(address), ctypes.c_size_t(size))


def _posix() -> ctypes.CDLL:
    system = ctypes.CDLL(None, use_errno=True)
    system.mmap.restype = ctypes.c_void_p
    return system


def _posix_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


MAP_FAILED = (1 << 64) - 1
MEM_COMMIT_RESERVE, MEM_RELEASE, PAGE_READWRITE, PAGE_EXECUTE_READ = 0x3000, 0x8000, 0x04, 0x20


def _windows_pages(code: bytes) -> int:
    kernel, size = ctypes.CDLL("kernel32"), ctypes.c_size_t(len(code))
    kernel.VirtualAlloc.restype = ctypes.c_void_p
    address = kernel.VirtualAlloc(None, size, MEM_COMMIT_RESERVE, PAGE_READWRITE)
    if not address:
        raise OSError(0, "VirtualAlloc failed")
    start = ctypes.c_void_p(address)
    ctypes.memmove(start, code, len(code))
    if not kernel.VirtualProtect(start, size, PAGE_EXECUTE_READ, ctypes.byref(ctypes.c_uint32())):
        _windows_free(address)
        raise OSError(0, "VirtualProtect failed")
    kernel.FlushInstructionCache(ctypes.c_void_p(-1), start, size)  # -1: this process
    return int(address)


def _windows_free(address: int) -> None:
    ctypes.CDLL("kernel32").VirtualFree(ctypes.c_void_p(address), ctypes.c_size_t(0), MEM_RELEASE)
