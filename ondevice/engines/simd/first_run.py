"""What a user waits for once should be said once."""

from __future__ import annotations

import hashlib
import logging
from contextlib import suppress

import numba

from ondevice.engines.simd.kernels.instruction_set import target
from ondevice.engines.simd.kernels.jit import STAMP
from ondevice.engines.simd.pack_cache import cache_directory

_log = logging.getLogger("ondevice")


def announce_compilation() -> None:
    """Say that kernels are about to be compiled, where this cache directory knows of no earlier time.

    Numba keeps compiled code by itself and tells nobody whether it has any; an empty file remembers for it.
    """
    identity = " ".join([STAMP, numba.__version__, *target()])
    mark = cache_directory() / f"compiled-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    if mark.exists():
        return
    _log.warning("compiling kernels for this CPU, only this once: it takes some seconds")
    with suppress(OSError):  # a read-only home only means that it is said again
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
