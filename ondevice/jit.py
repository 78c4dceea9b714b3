"""One decorator for the compiled kernels outside the `simd` engine, which has its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])


def kernel(function: AnyFunction) -> AnyFunction:
    """Compile a module-level function on its first call and keep the result on disk.

    No fastmath: a sum must come out the same whatever ran beside it, and masked logits are -inf. Closures do not cache.
    """
    return cast(AnyFunction, numba.njit(cache=True, error_model="numpy", nogil=True)(function))
