"""Sums of the lanes of several vectors at once have the bits of each vector's own sum."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import pytest
from llvmlite import ir
from numba import types

from ondevice.engines.simd.kernels.attention.float_tile import sums_of_lanes
from ondevice.engines.simd.kernels.isa.jit import LITERAL, emits
from ondevice.engines.simd.kernels.isa.vector import I64, VF32, load, pointer_to, sum_lanes


@emits(types.void, LITERAL, types.int64, types.int64)
def store_sums(builder: Any, count: int, vectors: Any, out: Any) -> None:
    """out[i] = sum of vectors[i], float32[count, 16]."""
    addresses = [builder.add(vectors, I64(64 * i)) for i in range(count)]
    read = [builder.load(pointer_to(builder, address), typ=VF32, align=4) for address in addresses]
    sums = sums_of_lanes(builder, read)
    assert sums.type == ir.VectorType(ir.FloatType(), count)
    builder.store(sums, pointer_to(builder, out), align=4)


@numba.njit
def four(vectors: int, out: int) -> None:
    store_sums(4, vectors, out)


@numba.njit
def sixteen(vectors: int, out: int) -> None:
    store_sums(16, vectors, out)


@numba.njit
def one(vector: int) -> float:
    return sum_lanes(load(vector))


@pytest.mark.parametrize(("count", "function"), [(4, four), (16, sixteen)])
def test_sums_are_in_order_and_each_is_the_vector_s_own(count: int, function: Any) -> None:
    rng = np.random.default_rng(count)
    for _ in range(20):
        # of many magnitudes: another order of additions would give other bits
        vectors = (rng.standard_normal((count, 16)) * 10.0 ** rng.integers(-4, 5, (count, 16))).astype(np.float32)
        found = np.zeros(count, np.float32)
        function(vectors.ctypes.data, found.ctypes.data)
        np.testing.assert_array_equal(found, [one(vector.ctypes.data) for vector in vectors])
        halves = vectors
        while halves.shape[1] > 1:
            width = halves.shape[1] // 2
            halves = halves[:, :width] + halves[:, width:]
        np.testing.assert_array_equal(found, halves[:, 0])
