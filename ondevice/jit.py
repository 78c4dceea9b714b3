"""Compiles functions with numba, keeps the code in the cache directory, and says when something is compiled."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from numba.core import event

from ondevice.machine import cache_directory

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])

PACKAGES = ("ondevice", "ondevice_export")

_log = logging.getLogger("ondevice")


def kernel(function: AnyFunction) -> AnyFunction:
    """Compile a module-level function at its first call, without fastmath, and keep the code on disk.

    A sum must come out the same whatever ran beside it, and masked logits are -inf. Code of closures is not kept.
    """
    return compiled(function, error_model="numpy")


def compiled(function: AnyFunction, **options: Any) -> AnyFunction:
    """`numba.njit` without the GIL, with the compiled code kept in the cache directory, or in NUMBA_CACHE_DIR.

    By itself numba writes beside the source, else into the home, and where neither can be written to, as on a device
    whose disk is read-only, it refuses to compile. There this compiles anew in every process.
    """
    config: Any = numba.config
    chosen = config.CACHE_DIR
    config.CACHE_DIR = chosen or str(cache_directory())  # read now, and never again
    try:
        return cast(AnyFunction, numba.njit(nogil=True, cache=True, **options)(function))
    except RuntimeError:
        return cast(AnyFunction, numba.njit(nogil=True, **options)(function))
    finally:
        config.CACHE_DIR = chosen


class Announcer(event.Listener):
    """Logs one line when the first function of our packages is compiled, not when code is loaded from disk."""

    def __init__(self) -> None:
        self._said = False

    def on_start(self, event: Any) -> None:
        dispatcher = event.data["dispatcher"]
        if self._said or dispatcher.py_func.__module__.partition(".")[0] not in PACKAGES:
            return
        self._said = True
        if dispatcher.stats.cache_path is None:
            when = f"at every start, because {cache_directory()} cannot be written to: set ONDEVICE_CACHE"
        else:
            when = "first run only, about 15 s"
        _log.warning("compiling kernels for this CPU (%s)", when)

    def on_end(self, event: Any) -> None:
        pass


ANNOUNCER = Announcer()
event.register("numba:compile", ANNOUNCER)  # type: ignore[no-untyped-call]
