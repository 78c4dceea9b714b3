"""The files of kernel libraries: finds and checks the one for this machine, and loads it.

A library is a file of machine code with a description beside it, a JSON file of the same name. In this order:

- the file that the environment variable ONDEVICE_KERNELS names;
- in `libraries/`, the library of this platform and of the fastest instruction set that this CPU has, or that
  ONDEVICE_KERNELS names: `shipping` builds them for the wheels of a platform;
- code blocks in the cache directory, which `building` makes on this machine: one for each part that is needed.
  Those that cannot be kept are in memory only.

A file is used only if it is intact, was built from these sources for this platform, and needs no instruction that this
CPU lacks; outside of this package, also only if no other user can have written it (`files.distrust`), because its code
is run. Otherwise one line is logged and the next place counts.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import os
import pkgutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import ondevice
from ondevice.files import distrust, make_cache_directory, replacing, trusted
from ondevice.machine import cache_directory
from ondevice.native.code_block import CodeBlock
from ondevice.native.features import native_features
from ondevice.native.sets import PLATFORMS, SETS, best_set, native_platform

CHOICE = "ONDEVICE_KERNELS"
"""Environment variable: path of a library, or name of an instruction set."""

SHIPPED = Path(__file__).parent / "libraries"
"""Directory of shared libraries, in a directory for each platform."""

KERNELS = "ondevice.engines.simd.kernels"
SOURCES = (
    "ondevice.native.builder",
    "ondevice.native.code_block",
    "ondevice.native.functions",
    "ondevice.native.linking",
    "ondevice.native.sets",
    "ondevice.bundle_format.weight_format",
    "ondevice.generate.sampling.elementary",
    "ondevice.generate.sampling.filters",
    "ondevice.generate.sampling.gumbel",
    "ondevice.generate.sampling.masks",
    "ondevice.generate.sampling.peaks",
    "ondevice.generate.sampling.row_draw",
    "ondevice.generate.drafters.ngram",
    "ondevice_export.calibration.round_block",
    "ondevice_export.quantize",
)
"""Modules that a library is built from, besides all below the package KERNELS."""

_log = logging.getLogger("ondevice")
_building: list[str] = []
"""The set that this process compiles for, if it is one of `builder`."""


class LibraryChoice(NamedTuple):
    """The library that this process uses.

    set : name of its instruction set
    file : the shared library; None if it is built on this machine, as code blocks
    """

    set: str
    file: Path | None


@cache
def choice() -> LibraryChoice:
    """Choose the library of this process: see the head of this file."""
    if _building:
        return LibraryChoice(_building[0], None)
    named, name = os.environ.get(CHOICE, ""), best_set()
    if named in SETS:
        if lacking := SETS[named].needed - native_features():
            _log.warning("not using the kernels for %s: this CPU lacks %s", named, ", ".join(sorted(lacking)))
        else:
            name = named
    places = [Path(named)] if named and named not in SETS else []
    if (platform := native_platform()) in PLATFORMS:
        places += SHIPPED.glob(f"{platform}/{name}{PLATFORMS[platform].suffix}")
    for file in places:
        try:
            about = _check_named(file) if file == Path(named) else _check(file)
            load_library(file)
            return LibraryChoice(about["set"], file)
        except (OSError, ValueError) as error:
            _log.warning("not using the kernels in %s: %s", file, error)
    return LibraryChoice(name, None)


def compile_for(name: str) -> None:
    """Make kernels compile for a set, whatever this CPU has; called before they are imported."""
    _building.append(name)
    choice.cache_clear()


@cache
def load_library(file: Path) -> Callable[[str], int]:
    """Load a shared library; returns a function from symbols to addresses."""
    library = ctypes.CDLL(str(file))
    return lambda name: ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0


@cache
def load_block(file: Path) -> Callable[[str], int]:
    """`load_library` for a code block."""
    return CodeBlock.from_bytes(file.read_bytes()).load()


_unkept: dict[str, Callable[[str], int]] = {}
"""Code blocks that this process has built and could not keep, loaded."""


def adopt(part: str, code: bytes, error: str | None = None) -> None:
    """Load a code block that was just built and cannot be kept. The first `error` of writing one is logged."""
    if error is not None and not _unkept:
        _log.warning("%s could not be written to (%s): kernels stay in memory", code_directory(), error)
    _unkept[part] = CodeBlock.from_bytes(code).load()


def find(part: str) -> Callable[[str], int] | None:
    """Load the file that has a part; returns a function from symbols to addresses, or None if it has to be built."""
    if (file := choice().file) is not None:
        return load_library(file)
    if (loaded := _unkept.get(part)) is not None:
        return loaded
    if (path := kept(part)) is None:
        return None
    with suppress(OSError):
        os.utime(path.parent)  # a directory that is not used for long is removed: see `pack_cache`
    try:
        return load_block(path)
    except FileNotFoundError:  # another process has removed it since, as the code of another version
        return None


# Files and their descriptions.


def cached(part: str) -> Path:
    """The file of a part that is built on this machine."""
    return code_directory() / f"{part}.block"


def code_directory() -> Path:
    """Directory of code blocks for these sources and this CPU's set. It may not exist or be writable."""
    key = hashlib.sha256(repr((stamp(), choice().set, native_platform(), ondevice.__version__)).encode()).hexdigest()
    return cache_directory() / f"kernels-{key[:16]}"


def kept(part: str) -> Path | None:
    """The file of a part in the cache directory, if it can be used."""
    file = cached(part)
    if file.exists() and all(map(trusted, _files(file))):  # `trusted` would warn of a missing file
        with suppress(OSError, ValueError):
            _check(file)
            return file
    return None


def missing(parts: Iterable[str]) -> list[str]:
    """The parts, of those given, that have to be built on this machine: neither the library, nor the cache directory,
    nor this process has them.
    """
    if choice().file is not None:
        return []
    return [part for part in parts if part not in _unkept and kept(part) is None]


def obstacle() -> str | None:
    """Why code blocks cannot be kept; None if they can. Asking creates their directory."""
    directory = code_directory()
    if reason := distrust(directory):
        return reason
    try:
        make_cache_directory(directory)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError:
        return f"{cache_directory()} cannot be written to"
    return None


def when(obstacle: str | None) -> str:
    """How often kernels are compiled, for a message: once, or at every start and why."""
    return "once" if obstacle is None else f"at every start, because {obstacle}: set ONDEVICE_CACHE"


def write(file: Path, code: bytes, name: str, platform: str) -> None:
    """Write machine code for a set and, after it, its description; each appears complete or not at all."""
    about = {
        "version": ondevice.__version__,
        "sources": sources(),
        "platform": platform,
        "set": name,
        "sha256": hashlib.sha256(code).hexdigest(),
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    for path, content in zip(_files(file), (code, json.dumps(about, indent=1).encode()), strict=True):
        with replacing(path) as opened:
            opened.write(content)


def _files(file: Path) -> tuple[Path, Path]:
    """The file of machine code and that of its description."""
    return file, file.with_suffix(".json")


def _check_named(file: Path) -> dict[str, Any]:
    """`_check` for a library that the environment names."""
    if not file.exists():
        raise ValueError(f"no such file, and the instruction sets are {', '.join(SETS)}")
    for each in _files(file):
        if reason := distrust(each):
            raise ValueError(reason)
    return _check(file)


def _check(file: Path) -> dict[str, Any]:
    """The description of a library that this machine can run.

    Raises:
        OSError: a file cannot be read.
        ValueError: the library must not be run; the message says why.
    """
    try:
        about = json.loads(file.with_suffix(".json").read_text("utf-8"))
        version, built_from, platform, name, digest = (about[key] for key in _FIELDS)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file.with_suffix('.json').name} is damaged") from error
    if version != ondevice.__version__ or not (_has_no_sources() or _are_ours(built_from)):
        raise ValueError("they were built from other sources")
    if platform != native_platform():
        raise ValueError(f"they are for {platform}, and this is {native_platform()}")
    target = SETS.get(str(name))
    lacking = {str(name)} if target is None else target.needed - native_features()
    if lacking:
        raise ValueError(f"this CPU lacks {', '.join(sorted(lacking))}")
    if hashlib.sha256(file.read_bytes()).hexdigest() != digest:
        raise ValueError("the file is damaged")
    return dict(about)


_FIELDS = ("version", "sources", "platform", "set", "sha256")


# The sources.


@cache
def sources() -> dict[str, str]:
    """Hashes of the modules that a library is built from, by name: kernels contain code of those that they call.

    A module without a source file (in an archive or an executable) is hashed by its bytecode, so that an update of a
    frozen application is noticed too.
    """
    found = {}
    for name in _modules():
        spec = find_spec(name)
        if spec is not None:
            digest = hashlib.sha256()
            for part in _content(spec, name):
                digest.update(part)
            found[name] = digest.hexdigest()[:16]
    return found


def stamp() -> str:
    """A hash of all sources."""
    return hashlib.sha256(json.dumps(sources()).encode()).hexdigest()[:16]


def _are_ours(built_from: Any) -> bool:
    """Whether a library was built from the modules that are here; the exporter may be missing here."""
    return isinstance(built_from, dict) and sources().items() <= built_from.items()


def _modules() -> Iterator[str]:
    for found in pkgutil.walk_packages(import_module(KERNELS).__path__, f"{KERNELS}."):
        if not found.ispkg:
            yield found.name
    has_exporter = find_spec("ondevice_export") is not None
    yield from (name for name in SOURCES if has_exporter or not name.startswith("ondevice_export"))


def _has_no_sources() -> bool:
    """Whether only bytecode is here, in an archive or an executable (PyInstaller) or in files (cx_Freeze): nobody edits
    it, and its hashes are not those of the sources.
    """
    return Path(__file__).suffix != ".py" or not Path(__file__).exists()


def _content(spec: Any, name: str) -> Iterator[bytes]:
    """The source file of a module, or else its bytecode, which takes ten times as long to hash."""
    try:
        yield Path(spec.origin).read_bytes()
    except (OSError, TypeError, ValueError):
        yield from _bytecode(spec.loader.get_code(name))


def _bytecode(code: CodeType) -> Iterator[bytes]:
    """Instructions, names and constants of a code object, without file names and line numbers."""
    yield code.co_code
    yield repr((code.co_names, code.co_varnames, code.co_freevars)).encode()
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _bytecode(constant)
        elif isinstance(constant, frozenset):  # its order changes from process to process
            yield repr(sorted(map(repr, constant))).encode()
        else:
            yield repr(constant).encode()
