"""Compile functions with numba and keep the machine code on disk, in the cache directory.

`kernel` is the decorator of all compiled functions. Stored code is found again by ondevice's and numba's versions, the
CPU and a hash of the sources, so an update never runs old kernels. The first compilation is announced in one log line;
`counting` reports progress instead. Importing this module imports numba, enables ARM's dot-product instructions in its
code generator, and makes forks wait for the compiler's locks.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pkgutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import lru_cache
from pathlib import Path
from types import CodeType
from typing import Any, TypeVar, cast

import llvmlite.binding as llvm
import numba
from llvmlite.binding import ffi
from numba.core import caching, config, event
from numba.core.codegen import get_host_cpu_features
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target

import ondevice
from ondevice import machine
from ondevice.machine import cache_directory

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])

PACKAGES = ("ondevice", "ondevice_export")
"""Top-level packages whose compilations are announced and counted."""

KERNELS = "ondevice.engines.simd.kernels"
"""Package whose modules inline functions of each other: a change in one invalidates the code of all."""

_log = logging.getLogger("ondevice")
_installing_locator = threading.Lock()
"""Held while numba's list of cache locators is replaced, which is global."""


OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "_nrt": False}
"""Options of all compiled functions. A quotient by zero is infinite or NaN, as in numpy. Without numba's runtime a
function counts no references and has no memory manager: one that allocates an array does not compile."""


def kernel(function: AnyFunction) -> AnyFunction:
    """Compile a module-level function at its first call, without fastmath, and keep the code in `code_directory`.

    Without fastmath because a sum must be the same bits in every forward, and masked logits are -inf. If the directory
    cannot be written, as on a read-only disk, every process compiles again. The code of a closure is not kept.
    """
    numba_config: Any = numba.config
    cache_class: Any = caching.CompileResultCacheImpl
    with _installing_locator:
        locators = cache_class._locator_classes
        configured = getattr(numba_config, "CACHE_LOCATOR_CLASSES", "")
        cache_class._locator_classes, numba_config.CACHE_LOCATOR_CLASSES = [KernelCacheLocator], ""
        try:
            return cast(AnyFunction, numba.njit(cache=True, **OPTIONS)(function))
        except RuntimeError:  # numba: no locator has a directory for this function
            return cast(AnyFunction, numba.njit(**OPTIONS)(function))
        finally:
            cache_class._locator_classes, numba_config.CACHE_LOCATOR_CLASSES = locators, configured


def compile_for(dispatcher: Any, arguments: tuple[Any, ...]) -> None:
    """Compile a function for arguments of these types, or load its code from the cache directory."""
    dispatcher.compile(tuple(map(numba.typeof, arguments)))


# Stored code.


def code_directory() -> Path:
    """Directory of compiled code for this version of ondevice and numba on this CPU. It may not exist or be writable.

    Numba's own rule uses the path of the source file. A frozen application has none: its code would then depend on the
    directory that it is started from, and an update of the application would run the old kernels.
    """
    chosen = numba_cache_directory()
    return _directory_of_versions(Path(chosen) if chosen else cache_directory())


def numba_cache_directory() -> str:
    """Numba's setting CACHE_DIR, from the environment variable NUMBA_CACHE_DIR or the application; empty if unset."""
    return str(cast(Any, numba.config).CACHE_DIR)


def can_keep() -> bool:
    """Whether the directory of compiled code is writable."""
    return _is_writable(code_directory())


def is_kept(dispatcher: Any) -> bool:
    """Whether the directory of compiled code has any code of this function."""
    module, name = dispatcher.py_func.__module__, dispatcher.py_func.__qualname__
    pattern = f"{module.rpartition('.')[2]}.{name}-{stamp(module)}-*.nbi"
    return any(code_directory().glob(pattern))


def when(kept: bool) -> str:
    """How often kernels are compiled, for a message: once, or at every start and why."""
    if kept:
        return "once"
    return f"at every start, because {cache_directory()} cannot be written to: set ONDEVICE_CACHE"


@lru_cache
def stamp(module: str) -> str:
    """Hash of the sources that the compiled functions of `module` may contain code from.

    Compiled code includes the functions that it calls, so the sources are all modules of the same package and below it,
    and for kernels all of `KERNELS`. A module without a source file (in an archive or an executable) is hashed by its
    bytecode, so that an update of a frozen application is noticed too.
    """
    digest = hashlib.sha256()
    package = KERNELS if module.startswith(f"{KERNELS}.") else module.rpartition(".")[0]
    for found in pkgutil.walk_packages(sys.modules[package].__path__, f"{package}."):
        if not found.ispkg:
            digest.update(found.name.encode())
            for part in _module_content(found.module_finder.find_spec(found.name, None), found.name):
                digest.update(part)
    return digest.hexdigest()[:16]


class KernelCacheLocator(caching._CacheLocator):
    """Numba's interface for the place of a function's stored code: `code_directory`, by name, `stamp` and line."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._directory = str(code_directory())
        self._stamp = stamp(function.__module__)
        self._line = function.__code__.co_firstlineno

    def get_cache_path(self) -> str:
        return self._directory

    def get_source_stamp(self) -> str:
        return self._stamp

    def get_disambiguator(self) -> str:
        return f"{self._stamp}-{self._line}"

    @classmethod
    def from_function(cls, function: Callable[..., Any], file: str) -> KernelCacheLocator | None:
        has_package = function.__module__.rpartition(".")[0] in sys.modules  # `stamp` needs it
        return cls(function) if has_package and can_keep() else None


@lru_cache
def _directory_of_versions(root: Path) -> Path:
    _, cpu, features = cpu_target.target_context.codegen().magic_tuple()
    versions = (ondevice.__version__, numba.__version__, cpu, features)
    return root / f"kernels-{hashlib.sha256(repr(versions).encode()).hexdigest()[:16]}"


@lru_cache
def _is_writable(directory: Path) -> bool:
    """Create the directory and a temporary file in it. Done once per process; it also updates the directory's date."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError:
        return False
    return True


def _module_content(spec: Any, name: str) -> Iterator[bytes]:
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


# Announcing and counting compilations.


@contextmanager
def counting(count: Callable[[], None]) -> Iterator[None]:
    """Within the block call `count` after every compiled function of our packages, and log no announcement."""
    with ANNOUNCER.silent(), event.install_listener("numba:compile", Counter(count)):
        yield


class Announcer(event.Listener):
    """Logs one line when the first function of our packages is compiled; code loaded from disk is not announced."""

    def __init__(self) -> None:
        self._announced = False

    def on_start(self, event: Any) -> None:
        if self._announced or not is_ours(event):
            return
        self._announced = True
        kept = event.data["dispatcher"].stats.cache_path is not None
        _log.warning("compiling kernels for this CPU (%s)", when(kept))

    def on_end(self, event: Any) -> None:
        pass

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Log nothing within the block, whose caller reports the progress itself."""
        before, self._announced = self._announced, True
        try:
            yield
        finally:
            self._announced = before


class Counter(event.Listener):
    """Calls `count` after every function of our packages that this process compiles."""

    def __init__(self, count: Callable[[], None]) -> None:
        self._count = count

    def on_start(self, event: Any) -> None:
        pass

    def on_end(self, event: Any) -> None:
        if is_ours(event):
            self._count()


def is_ours(event: Any) -> bool:
    """Whether numba's event concerns a function of `PACKAGES`."""
    return event.data["dispatcher"].py_func.__module__.partition(".")[0] in PACKAGES


# ARM's dot-product instructions, which LLVM does not detect among the features of the host CPU.


def is_arm(triple: str) -> bool:
    """Whether an LLVM target triple is 64-bit ARM."""
    return triple.startswith(("aarch64", "arm64"))


def with_dot_products(triple: str, features: str) -> str:
    """Add `+dotprod` to LLVM's features of this CPU if the operating system reports the instructions."""
    if not is_arm(triple) or "+dotprod" in features.split(",") or not machine.arm_dot_products():
        return features
    return f"{features},+dotprod" if features else "+dotprod"


def enable_dot_products() -> None:
    """Set numba's CPU features for ARM, unless NUMBA_CPU_FEATURES does. Must run before anything is compiled."""
    triple = llvm.get_process_triple()
    if config.CPU_FEATURES is None and is_arm(triple):  # type: ignore[attr-defined]
        host = get_host_cpu_features()  # type: ignore[no-untyped-call]
        config.CPU_FEATURES = with_dot_products(triple, host)  # type: ignore[attr-defined]


# Forks while another thread compiles or loads a function.


_held_locks = ExitStack()


def hold_locks_while_forking() -> None:
    """Make a fork wait for the compiler's locks. The child has only the forking thread: a lock that another thread held
    would never be released there, and the child could compile nothing.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=_take_locks, after_in_parent=_held_locks.close, after_in_child=_held_locks.close)


def _take_locks() -> None:
    for lock in _compiler_locks():
        _held_locks.enter_context(lock)


def _compiler_locks() -> list[AbstractContextManager[Any]]:
    """Numba's and LLVM's locks in the compiler's order; LLVM's is private and may be missing in other versions."""
    lock = getattr(ffi.lib, "_lock", None)
    return [global_compiler_lock, *([] if lock is None else [lock])]


ANNOUNCER = Announcer()
event.register("numba:compile", ANNOUNCER)  # type: ignore[no-untyped-call]

# At import, because every compiled function of ondevice imports this module first.
enable_dot_products()
hold_locks_while_forking()
