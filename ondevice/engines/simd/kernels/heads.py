"""What happens to q, k and v between projection and attention: head norm, rotation, the way into the cache."""

from __future__ import annotations

from ondevice.engines.simd.kernels.jit import kernel
from ondevice.engines.simd.kernels.norm import norm
from ondevice.engines.simd.kernels.vector import fma, load, store, store_half


@kernel
def rotate(x: int, cosines: int, sines: int, head_dim: int) -> None:
    """x * cos + rotate_half(x) * sin, in place; cosines and sines float32[head_dim / 2]."""
    half = 2 * head_dim
    for i in range(0, half, 64):
        low, high = load(x + i), load(x + half + i)
        c, s = load(cosines + i), load(sines + i)
        store(x + i, low * c - high * s)
        store(x + half + i, fma(high, c, low * s))


@kernel
def rotated_head(x: int, weight: int, cosines: int, sines: int, head_dim: int, eps: float) -> None:
    """Head norm with a weight, then rotation, in place."""
    norm(x, weight, x, head_dim, eps)
    rotate(x, cosines, sines, head_dim)


@kernel
def to_half(x: int, out: int, count: int) -> None:
    """Round `count` floats to fp16."""
    for i in range(0, count, 16):
        store_half(out + 2 * i, load(x + 4 * i))
