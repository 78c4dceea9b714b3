"""exp, tanh and GELU of 16 float32 lanes, made of additions, products and FMAs alone: the same bits on every CPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from ondevice.engines.simd.kernels.jit import kernel
from ondevice.engines.simd.kernels.vector import fma, full, maximum, minimum, power_of_two, round_even

_F = np.float32
_LOG2_E = _F(1.44269504088896341)
_LN2_HIGH, _LN2_LOW = _F(-0.693359375), _F(2.12194440e-4)
_C0, _C1, _C2 = _F(1.9875691500e-4), _F(1.3981999507e-3), _F(8.3334519073e-3)
_C3, _C4, _C5 = _F(4.1665795894e-2), _F(1.6666665459e-1), _F(5.0000001201e-1)
_LOWEST, _HIGHEST = _F(-87.0), _F(88.0)
_ONE, _TWO = _F(1.0), _F(2.0)
_GELU_INNER, _GELU_CUBE = _F(-2.0 * 0.7978845608028654), _F(-2.0 * 0.7978845608028654 * 0.044715)


@kernel
def exp(x: Any) -> Any:
    """e**x, within 2 units of the last place; x is clamped to -87..88 (Cephes' polynomial)."""
    x = maximum(minimum(x, full(_HIGHEST)), full(_LOWEST))
    n = round_even(x * full(_LOG2_E))
    r = fma(n, full(_LN2_LOW), fma(n, full(_LN2_HIGH), x))
    p = fma(full(_C0), r, full(_C1))
    p = fma(p, r, full(_C2))
    p = fma(p, r, full(_C3))
    p = fma(p, r, full(_C4))
    p = fma(p, r, full(_C5))
    return (fma(p, r * r, r) + full(_ONE)) * power_of_two(n)


@kernel
def tanh(x: Any) -> Any:
    """tanh(x) = 1 - 2 / (e**2x + 1), with an absolute error of about 1e-7, as a softcap allows."""
    return full(_ONE) - full(_TWO) / (exp(x + x) + full(_ONE))


@kernel
def gelu(x: Any) -> Any:
    """GELU in its tanh form: x / 2 * (1 + tanh(u)) = x / (1 + e**-2u), u = sqrt(2 / pi) * (x + 0.044715 x**3)."""
    inner = fma(x * x, full(_GELU_CUBE), full(_GELU_INNER))
    return x / (full(_ONE) + exp(x * inner))
