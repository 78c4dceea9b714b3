"""Checks the files of a release before they are uploaded, for every platform without running them:

    python -m tests.project.release DIST [OTHER]

Tags, sizes and contents of the wheels; of their libraries the format, what they need of the system, the oldest macOS
and the code signature. With OTHER, a directory of files that were built again, both must have the same bytes.
"""

from __future__ import annotations

import io
import json
import re
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from ondevice import __version__
from ondevice.native.sets import PLATFORMS, Platform

MAX_BYTES = 3_000_000
"""Largest size of a wheel."""

ENTRY = "ondevice_run"
"""A function that every library exports: the kernel that runs a forward."""

LINUX_FUNCTIONS = {"memcpy", "memmove", "memset", "syscall"}
"""Functions of the C library that a library on Linux may need, besides those that begin with `_`."""

MATH_FUNCTIONS = {"fmaf", "rintf"}
"""Functions of libm that the set `generic` may need, for which its CPUs have no instruction."""

LINUX_LIBRARIES = {"libc.so.6", "libpthread.so.0", "libm.so.6", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}

MAC_FUNCTIONS = {"bzero", "dyld_stub_binder", "memcpy", "memmove", "memset", "memset_pattern16", "usleep"}
"""Functions that a library on macOS may need."""

MAC_LIBRARY = "/usr/lib/libSystem.B.dylib"
MAC_VERSION = 11
"""The macOS of the wheel's tag."""

ARM64 = 0x0100000C
"""CPU_TYPE_ARM64 of <mach/machine.h>."""

AD_HOC = 0x2
"""Flag of a code directory that is signed without an identity. macOS on ARM loads no library without a signature."""

CODE_DIRECTORY = bytes.fromhex("fade0c02")


def wheel_faults(path: Path) -> Iterator[str]:
    """The faults of a wheel, one line each."""
    tag = path.name.removeprefix(f"ondevice_runtime-{__version__}-py3-none-").removesuffix(".whl")
    found = [name for name, platform in PLATFORMS.items() if platform.wheel == tag]
    if not found and tag != "any":
        yield f"the name {path.name} has another version or tag than those of the release"
        return
    if path.stat().st_size > MAX_BYTES:
        yield f"it has {path.stat().st_size:,} bytes, more than {MAX_BYTES:,}"
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if name.startswith("ondevice/native/libraries/")]
        if tag == "any":
            yield from (f"the wheel for all systems has {name}" for name in names)
            return
        platform = PLATFORMS[found[0]]
        folder = PurePosixPath("ondevice/native/libraries", found[0])
        files = {str(folder / f"{each}{end}") for each in platform.sets for end in (platform.suffix, ".json")}
        yield from (f"{name} is {'missing' if name in files else 'unknown'}" for name in sorted(files ^ set(names)))
        for name in sorted(files & set(names)):
            if name.endswith(".json"):
                about = json.loads(archive.read(name))
                expected = (__version__, found[0], PurePosixPath(name).stem)
                if (about["version"], about["platform"], about["set"]) != expected:
                    yield f"{name} describes a library of another version, platform or instruction set"
            else:
                yield from (f"{name}: {fault}" for fault in library_faults(archive.read(name), found[0], platform))


def library_faults(content: bytes, name: str, platform: Platform) -> Iterator[str]:
    """The faults of a kernel library of the platform `name`, one line each."""
    check = {".so": _linux_faults, ".dll": _windows_faults, ".dylib": _mac_faults}[platform.suffix]
    if not content.startswith({".so": b"\x7fELF", ".dll": b"MZ", ".dylib": b"\xcf\xfa\xed\xfe"}[platform.suffix]):
        yield f"it is no {platform.suffix}"
    else:
        yield from check(content, name.partition("-")[2])


def _linux_faults(content: bytes, machine: str) -> Iterator[str]:
    from elftools.elf.elffile import ELFFile

    binary = ELFFile(io.BytesIO(content))
    if binary["e_machine"] != {"x86_64": "EM_X86_64", "aarch64": "EM_AARCH64"}[machine]:
        yield f"it is for {binary['e_machine']}"
    dynamic: Any = binary.get_section_by_name(".dynamic")
    symbols: Any = binary.get_section_by_name(".dynsym")
    needed = [tag.needed for tag in dynamic.iter_tags("DT_NEEDED")]
    yield from (f"it needs {each}" for each in needed if each not in LINUX_LIBRARIES)
    functions = [symbol for symbol in symbols.iter_symbols() if symbol.name]
    undefined = {each.name for each in functions if each["st_shndx"] == "SHN_UNDEF" and not each.name.startswith("_")}
    available = LINUX_FUNCTIONS | (MATH_FUNCTIONS if "libm.so.6" in needed else set())
    yield from (f"it needs the function {each}" for each in sorted(undefined - available))
    yield from _entry_missing({each.name for each in functions if each["st_shndx"] != "SHN_UNDEF"})


def _windows_faults(content: bytes, machine: str) -> Iterator[str]:
    """Windows 10 and newer have the C library `api-ms-win-crt-*`, and `WaitOnAddress` in `api-ms-win-core-synch-*`."""
    from pefile import PE

    binary = PE(data=content)
    if binary.FILE_HEADER.Machine != {"x86_64": 0x8664, "aarch64": 0xAA64}[machine]:
        yield f"it is for the machine {binary.FILE_HEADER.Machine:#x}"
    for name in (each.dll.decode() for each in binary.DIRECTORY_ENTRY_IMPORT):
        if name.lower() != "kernel32.dll" and not name.startswith(("api-ms-win-crt-", "api-ms-win-core-synch-")):
            yield f"it needs {name}"
    yield from _entry_missing({each.name.decode() for each in binary.DIRECTORY_ENTRY_EXPORT.symbols if each.name})


def _mac_faults(content: bytes, machine: str) -> Iterator[str]:
    from macholib.mach_o import LC_BUILD_VERSION, LC_CODE_SIGNATURE, LC_LOAD_DYLIB
    from macholib.MachO import MachO
    from macholib.SymbolTable import SymbolTable

    with tempfile.TemporaryDirectory() as directory:  # macholib reads files only
        file = Path(directory, "library")
        file.write_bytes(content)
        binary = MachO(str(file))
        symbols = SymbolTable(binary)
    exported, undefined = (
        {name.decode().removeprefix("_") for _, name in each} for each in (symbols.extdefsyms, symbols.undefsyms)
    )
    [header] = binary.headers
    if header.header.cputype != ARM64:
        yield f"it is for the machine {header.header.cputype:#x}"
    commands = {each[0].cmd: each for each in header.commands}
    needed = [each[2].rstrip(b"\0").decode() for each in header.commands if each[0].cmd == LC_LOAD_DYLIB]
    yield from (f"it needs {each}" for each in needed if each != MAC_LIBRARY)
    if (version := int(commands[LC_BUILD_VERSION][1].minos)) != MAC_VERSION << 16:
        yield f"it asks for macOS {version >> 16}"
    place = commands[LC_CODE_SIGNATURE][1] if LC_CODE_SIGNATURE in commands else None
    signature = b"" if place is None else content[place.dataoff : place.dataoff + place.datasize]
    start = signature.find(CODE_DIRECTORY)
    if start < 0 or not int.from_bytes(signature[start + 12 : start + 16], "big") & AD_HOC:
        yield "it has no ad hoc signature"
    yield from (f"it needs the function {each}" for each in sorted(undefined - MAC_FUNCTIONS))
    yield from _entry_missing(exported)


def _entry_missing(exported: set[str]) -> Iterator[str]:
    if ENTRY not in exported:
        yield f"it has no function {ENTRY}"


def difference(first: Path, second: Path) -> list[str]:
    """Names of the files that only one of two directories has, or that differ."""
    names = {path.name for directory in (first, second) for path in directory.iterdir()}
    return sorted(
        name
        for name in names
        if not ((first / name).is_file() and (second / name).is_file())
        or (first / name).read_bytes() != (second / name).read_bytes()
    )


def main(dist: Path, other: Path | None = None) -> int:
    faults = [f"{path.name}: {fault}" for path in sorted(dist.glob("*.whl")) for fault in wheel_faults(path)]
    faults += [f"{path.name} is no file of a release" for path in dist.iterdir() if not _is_known(path)]
    if other is not None:
        faults += [f"{name}: built again, it is another file" for name in difference(dist, other)]
    for path in sorted(dist.iterdir()):
        sys.stdout.write(f"{path.stat().st_size:>10,}  {path.name}\n")
    sys.stdout.write("".join(f"{fault}\n" for fault in faults) or "no faults\n")
    return bool(faults)


def _is_known(path: Path) -> bool:
    return (
        re.fullmatch(rf"ondevice_runtime-{re.escape(__version__)}(\.tar\.gz|-py3-none-\w+\.whl)", path.name) is not None
    )


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
