"""Machine code as one block of memory: its file, and loading it into this process.

A block is code, its constants and a table of addresses of C functions, linked when it is built (`linking`): references
inside are distances inside, so the block runs at any address. To load it is to copy it, to fill in the addresses, and
to make the memory executable. Nothing of LLVM is needed for this.

LLVM's linkers load objects too, with what llvmlite 0.50 offers of them:

- MCJIT maps code and constants apart. Once gigabytes are mapped between them, distances of 32 bits do not suffice, and
  LLVM ends the process: `Assertion isInt<32>(RealOffset)`. With 2 GB and more mapped between loads, as
  `tests/simd/machines/far_apart.py` does, it ended so 18 of 18 times on x86-64.
- MCJIT with llvmlite's own memory manager, the default on ARM, maps an object as a whole. On x86-64 it ends every
  process: `Assertion "All memory must be pre-allocated"`.
- JITLink maps an object as a whole, too. llvmlite does not offer it on Windows.
- The large code model has no distances, but takes more instructions for every constant and call.

A linker of the system, which makes a shared library, is missing on most machines. The platforms' wheels have such
libraries.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import platform
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, Self

from ondevice.errors import OndeviceError

BEGINNING = b'{"functions": '
"""The first bytes of a block's file."""

ADDRESS = struct.Struct("<Q")
"""An address in a block. Every processor that kernels are built for is little endian."""

C_LIBRARIES = ("ucrtbase", "kernelbase") if sys.platform == "win32" else (None, "libm.so.6")
"""The libraries that have the C functions. None is this process. Linux's libm comes second, because a Python whose
modules are built in may have bound only a part of it.
"""


class CodeBlock(NamedTuple):
    """Machine code that runs at any address that is a multiple of a page.

    content : the bytes of the block
    functions : offsets of the functions that can be called, by name
    imports : offsets of the addresses of C functions that it calls, by name
    pointers : offsets of addresses in the block itself: as long as it is not loaded, they are offsets, too
    """

    content: bytes
    functions: dict[str, int]
    imports: dict[str, int]
    pointers: list[int]

    def to_bytes(self) -> bytes:
        """The content of a file: a line of JSON, then the block."""
        tables = {"functions": self.functions, "imports": self.imports, "pointers": self.pointers}
        return json.dumps(tables).encode() + b"\n" + self.content

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """
        Raises:
            ValueError: this is not the content of a block's file.
        """
        line, _, content = data.partition(b"\n")
        try:
            tables = json.loads(line)
            block = cls(content, dict(tables["functions"]), dict(tables["imports"]), list(tables["pointers"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError("this is not a block of machine code") from error
        addresses = [*block.imports.values(), *block.pointers]
        for offsets, size in ((block.functions.values(), 1), (addresses, ADDRESS.size)):
            if not content or not all(isinstance(each, int) and 0 <= each <= len(content) - size for each in offsets):
                raise ValueError("this is not a block of machine code")
        return block

    def load(self) -> Callable[[str], int]:
        """Load the block, for as long as the process runs; returns a function from names to addresses.

        Raises:
            OndeviceError: the system does not allow new machine code, or lacks a C function.
        """
        content = bytearray(self.content)
        addresses = {offset: c_function(name) for name, offset in self.imports.items()}
        try:
            pages = CodePages(len(content))
            for offset in self.pointers:
                (target,) = ADDRESS.unpack_from(content, offset)
                addresses[offset] = pages.address + target
            for offset, address in addresses.items():
                ADDRESS.pack_into(content, offset, address)
            pages.seal(content)
        except OSError as error:
            raise OndeviceError(
                f"this system allows no machine code that a program has written ({error.strerror}): install a wheel of "
                "ondevice-runtime for this platform, which has the kernels in a library"
            ) from error
        return lambda name: pages.address + self.functions[name]


def c_function(name: str) -> int:
    """The address of a function of the C library.

    Raises:
        OndeviceError: there is none of this name.
    """
    for library in C_LIBRARIES:
        with suppress(OSError, AttributeError):
            return ctypes.cast(getattr(ctypes.CDLL(library), name), ctypes.c_void_p).value or 0
    raise OndeviceError(f"the C library of this system has no function {name}, which the kernels need")


class CodePages:
    """Pages of memory for machine code, which are never writable and executable at once.

    They are there until `free` is called: at the end of a process, threads may still run code when objects are deleted.

    Attributes:
        address: of the first page.
    """

    def __init__(self, size: int) -> None:
        """Allocate pages for so many bytes.

        Raises:
            OSError: the system refuses.
        """
        self._size = size
        self.address = _windows_pages(size) if sys.platform == "win32" else _posix_pages(size)

    def seal(self, code: bytes | bytearray) -> None:
        """Copy machine code to the pages, and make them executable and read-only.

        Raises:
            OSError: the system refuses; the pages are returned to it.
        """
        ctypes.memmove(self.address, bytes(code), len(code))
        seal = _windows_seal if sys.platform == "win32" else _posix_seal
        try:
            seal(self.address, self._size)
        except OSError:
            self.free()
            raise

    def free(self) -> None:
        """Return the pages to the system."""
        if sys.platform == "win32":
            ctypes.CDLL("kernel32").VirtualFree(ctypes.c_void_p(self.address), ctypes.c_size_t(0), MEM_RELEASE)
        else:
            _posix().munmap(ctypes.c_void_p(self.address), ctypes.c_size_t(self._size))


def _posix_pages(size: int) -> int:
    flags, protection = mmap.MAP_PRIVATE | mmap.MAP_ANON, mmap.PROT_READ | mmap.PROT_WRITE
    address = _posix().mmap(None, ctypes.c_size_t(size), protection, flags, -1, ctypes.c_long(0))
    if address == MAP_FAILED:
        raise _posix_error()
    return int(address)


def _posix_seal(address: int, size: int) -> None:
    system, start = _posix(), ctypes.c_void_p(address)
    if system.mprotect(start, ctypes.c_size_t(size), mmap.PROT_READ | mmap.PROT_EXEC):
        raise _posix_error()
    if sys.platform == "darwin":
        system.sys_icache_invalidate(start, ctypes.c_size_t(size))
    elif platform.machine() == "aarch64":  # x86 needs none, and Linux does it for new executable pages, too
        with suppress(OSError, AttributeError):
            ctypes.CDLL("libgcc_s.so.1").__clear_cache(start, ctypes.c_void_p(address + size))


def _posix() -> ctypes.CDLL:
    system = ctypes.CDLL(None, use_errno=True)
    system.mmap.restype = ctypes.c_void_p
    return system


def _posix_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


MAP_FAILED = (1 << 64) - 1
MEM_COMMIT_RESERVE, MEM_RELEASE, PAGE_READWRITE, PAGE_EXECUTE_READ = 0x3000, 0x8000, 0x04, 0x20


def _windows_pages(size: int) -> int:
    kernel = ctypes.CDLL("kernel32")
    kernel.VirtualAlloc.restype = ctypes.c_void_p
    address = kernel.VirtualAlloc(None, ctypes.c_size_t(size), MEM_COMMIT_RESERVE, PAGE_READWRITE)
    if not address:
        raise OSError(0, "VirtualAlloc failed")
    return int(address)


def _windows_seal(address: int, size: int) -> None:
    kernel, start, length = ctypes.CDLL("kernel32"), ctypes.c_void_p(address), ctypes.c_size_t(size)
    if not kernel.VirtualProtect(start, length, PAGE_EXECUTE_READ, ctypes.byref(ctypes.c_uint32())):
        raise OSError(0, "VirtualProtect failed")
    kernel.FlushInstructionCache(ctypes.c_void_p(-1), start, length)  # -1: this process
