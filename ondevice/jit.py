"""Compiles functions with numba and keeps the code in the cache directory."""

from __future__ import annotations

import hashlib
import logging
import pkgutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import CodeType
from typing import Any, TypeVar, cast

import numba
from numba.core import caching, event
from numba.core.registry import cpu_target

import ondevice
from ondevice.code_generator import tell_numba
from ondevice.compiler_locks import hold_while_forking
from ondevice.machine import cache_directory

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])

PACKAGES = ("ondevice", "ondevice_export")

_log = logging.getLogger("ondevice")
_locating = threading.Lock()

tell_numba()  # here, because no function of ondevice is compiled without this module
hold_while_forking()


def kernel(function: AnyFunction) -> AnyFunction:
    """Compile a module-level function at its first call, without fastmath, and keep the code on disk.

    A sum must come out the same whatever ran beside it, and masked logits are -inf. Code of closures is not kept.
    """
    return compiled(function, error_model="numpy")


def compiled(function: AnyFunction, **options: Any) -> AnyFunction:
    """`numba.njit` without the GIL, with the compiled code kept in the cache directory, or in NUMBA_CACHE_DIR.

    Where that cannot be written to, as on a device whose disk is read-only, this compiles anew in every process.
    """
    config: Any = numba.config
    known: Any = caching.CompileResultCacheImpl
    with _locating:
        classes, told = known._locator_classes, getattr(config, "CACHE_LOCATOR_CLASSES", "")
        known._locator_classes, config.CACHE_LOCATOR_CLASSES = [Place], ""
        try:
            return cast(AnyFunction, numba.njit(nogil=True, cache=True, **options)(function))
        except RuntimeError:
            return cast(AnyFunction, numba.njit(nogil=True, **options)(function))
        finally:
            known._locator_classes, config.CACHE_LOCATOR_CLASSES = classes, told


def code_directory() -> Path:
    """Where code is kept for this version of ondevice and numba on this CPU; it may not exist, nor be writable.

    Numba's own rules look at the source file, which an application that was frozen does not have: its code would lie
    in a directory that depends on where it was started, and an update would run the old kernels.
    """
    told = numba_cache_directory()
    return _below(Path(told) if told else cache_directory())


def numba_cache_directory() -> str:
    """What NUMBA_CACHE_DIR says, or an application did; empty where nobody did."""
    return str(cast(Any, numba.config).CACHE_DIR)


def compile_for(dispatcher: Any, arguments: tuple[Any, ...]) -> None:
    """Compile a function for arguments of these types, or load it from the cache directory."""
    dispatcher.compile(tuple(map(numba.typeof, arguments)))


def is_kept(dispatcher: Any) -> bool:
    """Whether the cache directory has code of this function."""
    module, name = dispatcher.py_func.__module__, dispatcher.py_func.__qualname__
    pattern = f"{module.rpartition('.')[2]}.{name}-{stamp(module)}-*.nbi"
    return any(code_directory().glob(pattern))


@lru_cache
def _below(root: Path) -> Path:
    _, cpu, features = cpu_target.target_context.codegen().magic_tuple()
    versions = (ondevice.__version__, numba.__version__, cpu, features)
    return root / f"kernels-{hashlib.sha256(repr(versions).encode()).hexdigest()[:16]}"


@lru_cache
def _can_keep(directory: Path) -> bool:
    """Asked once for each process, which also dates the directory."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError:
        return False
    return True


@lru_cache
def stamp(module: str) -> str:
    """A hash of what a module's functions are made of: all modules in its folder, for a function has the code of those
    that it calls in it. Of a module without a file, in an archive or an executable, it is the bytecode that is hashed:
    so nothing has to be remembered when an application is built, and an update is seen.
    """
    digest = hashlib.sha256()
    package = module.rpartition(".")[0]
    for found in pkgutil.iter_modules(sys.modules[package].__path__):
        if not found.ispkg:
            name = f"{package}.{found.name}"
            digest.update(name.encode())
            for part in _content(found.module_finder.find_spec(name, None), name):
                digest.update(part)
    return digest.hexdigest()[:16]


def _content(spec: Any, name: str) -> Iterator[bytes]:
    """Of a module: its file, which takes a tenth of the time, else its bytecode."""
    try:
        yield Path(spec.origin).read_bytes()
    except (OSError, TypeError, ValueError):
        yield from _parts(spec.loader.get_code(name))


def _parts(code: CodeType) -> Iterator[bytes]:
    """What a function does, without the places in files that it has."""
    yield code.co_code
    yield repr((code.co_names, code.co_varnames, code.co_freevars)).encode()
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _parts(constant)
        elif isinstance(constant, frozenset):  # its order changes from process to process
            yield repr(sorted(map(repr, constant))).encode()
        else:
            yield repr(constant).encode()


class Place(caching._CacheLocator):
    """Tells numba where the code of a function is kept."""

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
    def from_function(cls, function: Callable[..., Any], file: str) -> Place | None:
        known = function.__module__.rpartition(".")[0] in sys.modules  # else nobody can tell what it is made of
        return cls(function) if known and can_keep() else None


class Announcer(event.Listener):
    """Logs one line when the first function of our packages is compiled, not when code is loaded from disk."""

    def __init__(self) -> None:
        self._said = False

    def on_start(self, event: Any) -> None:
        if self._said or not is_ours(event):
            return
        self._said = True
        kept = event.data["dispatcher"].stats.cache_path is not None
        _log.warning("compiling kernels for this CPU (%s)", when(kept))

    def on_end(self, event: Any) -> None:
        pass

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Within the block somebody else tells what is compiled."""
        before, self._said = self._said, True
        try:
            yield
        finally:
            self._said = before


class Counter(event.Listener):
    """Calls `count` whenever a function of our packages was compiled in this process."""

    def __init__(self, count: Callable[[], None]) -> None:
        self._count = count

    def on_start(self, event: Any) -> None:
        pass

    def on_end(self, event: Any) -> None:
        if is_ours(event):
            self._count()


@contextmanager
def counting(count: Callable[[], None]) -> Iterator[None]:
    """Within the block `count` is called after every function of ours that is compiled; nothing else is said."""
    with ANNOUNCER.silent(), event.install_listener("numba:compile", Counter(count)):
        yield


def is_ours(event: Any) -> bool:
    return event.data["dispatcher"].py_func.__module__.partition(".")[0] in PACKAGES


def when(kept: bool) -> str:
    """How often kernels are compiled on this machine."""
    if kept:
        return "once"
    return f"at every start, because {cache_directory()} cannot be written to: set ONDEVICE_CACHE"


def can_keep() -> bool:
    """Whether code that is compiled now will be there at the next start."""
    return _can_keep(code_directory())


ANNOUNCER = Announcer()
event.register("numba:compile", ANNOUNCER)  # type: ignore[no-untyped-call]
