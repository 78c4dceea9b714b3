"""Compiles kernels, and makes intrinsics: functions that kernels call and for which LLVM code is emitted."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import extending

from ondevice.jit import compiled

LITERAL = object()
"""In the signature of an intrinsic: an integer that is known when a kernel is compiled, and an int for the emitter."""


def _sources() -> str:
    """A hash of the sources of all kernels."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


STAMP = _sources()
"""Changes whenever any kernel does."""


def kernel(function: Callable[..., Any]) -> Any:
    """Compile a function at its first call, without the GIL and without fastmath, and keep the code on disk.

    A sum must have one order, whatever rows run beside it. Numba takes code from the disk while the function's own file
    is unchanged; but a kernel contains those that it calls, so the stamp of its file becomes that of all sources.
    """
    dispatcher: Any = compiled(function, error_model="numpy")
    cache = getattr(dispatcher._cache, "_cache_file", None)
    if cache is not None:
        cache._source_stamp = STAMP
    return dispatcher


def intrinsic(function: Callable[..., Any]) -> Any:
    """numba's decorator of the same name; integers that are known when a kernel is compiled arrive as literals."""
    return extending.intrinsic(prefer_literal=True)(function)


def emits(result: Any, *arguments: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make an intrinsic of a function that emits LLVM code.

    Args:
        result: the numba type of the result; `types.void` for none.
        arguments: numba types of the arguments, to which numba converts what a kernel passes; LITERAL for an integer
            that must be known when the kernel is compiled.

    The decorated function gets an llvmlite builder and a value per argument, and returns the result's value:

        @emits(types.float32, types.int64)
        def read_f32(builder, address):
            return builder.load(builder.inttoptr(address, POINTER), typ=F32, align=4)
    """

    def decorate(emit: Callable[..., Any]) -> Any:
        @functools.wraps(emit)
        def typed(typing: Any, *given: Any) -> Any:
            kinds = [own if wanted is LITERAL else wanted for own, wanted in zip(given, arguments, strict=True)]

            def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
                pairs = zip(kinds, arguments, values, strict=True)
                made = emit(
                    builder, *(own.literal_value if wanted is LITERAL else value for own, wanted, value in pairs)
                )
                return context.get_dummy_value() if made is None else made

            return result(*kinds), generate

        return intrinsic(typed)

    return decorate
