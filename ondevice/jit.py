"""How Python is compiled here, where the result is kept, and that whoever waits for it is told."""

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
    """Compile a module-level function on its first call and keep the result on disk.

    No fastmath: a sum must come out the same whatever ran beside it, and masked logits are -inf. Closures do not cache.
    """
    return compiled(function, error_model="numpy")


def compiled(function: AnyFunction, **options: Any) -> AnyFunction:
    """`numba.njit` without the GIL, its code kept in the cache directory, or where NUMBA_CACHE_DIR says.

    Left alone, numba would write beside the source, else into the home, and refuse to compile where neither is
    writable, as on a device whose disk is read-only. There it compiles anew in every process.
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
    """Says so when the first of our functions is compiled; what is loaded from disk is not."""

    def __init__(self) -> None:
        self._said = False

    def on_start(self, event: Any) -> None:
        dispatcher = event.data["dispatcher"]
        if self._said or dispatcher.py_func.__module__.partition(".")[0] not in PACKAGES:
            return
        self._said = True
        if dispatcher.stats.cache_path is None:
            once = f"as at every start, because {cache_directory()} cannot be written to: set ONDEVICE_CACHE"
        else:
            once = "only this once: it takes some seconds"
        _log.warning("compiling kernels for this CPU, %s", once)

    def on_end(self, event: Any) -> None:
        pass


ANNOUNCER = Announcer()
event.register("numba:compile", ANNOUNCER)  # type: ignore[no-untyped-call]
