"""How every kernel is compiled, in one place."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import extending

from ondevice.jit import compiled


def _sources() -> str:
    """A hash of this package's kernels."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


STAMP = _sources()
"""Changes whenever any kernel does."""


def kernel(function: Callable[..., Any]) -> Any:
    """Compile on first call, without the GIL, kept on disk across processes.

    No fastmath: a sum must have one order, whatever rows run beside it. Numba considers a cached function fresh as long
    as its own file is; a kernel inlines others, so every one is tied to the sources of all.
    """
    dispatcher: Any = compiled(function, error_model="numpy")
    cache = getattr(dispatcher._cache, "_cache_file", None)
    if cache is not None:
        cache._source_stamp = STAMP
    return dispatcher


def intrinsic(function: Callable[..., Any]) -> Any:
    """What a kernel can call and LLVM code is emitted for: numba's, without types that describe the emitting function.

    Constants arrive as literals where that is possible.
    """
    return extending.intrinsic(prefer_literal=True)(function)
