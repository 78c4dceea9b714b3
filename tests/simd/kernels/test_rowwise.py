"""Kernels that work row by row, against their numpy twins."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from llvmlite import ir
from numba import njit, types

from ondevice.bundle_format.weight_format import IN_GROUPS, WeightFormat
from ondevice.engines.simd.kernels.activations import add_normed, inverse_rms, norm
from ondevice.engines.simd.kernels.attention.float_tile import to_half
from ondevice.engines.simd.kernels.attention.query_key_value import quantize_head, rotate
from ondevice.engines.simd.kernels.contract.matrices import groups_form
from ondevice.engines.simd.kernels.contract.steps import Table
from ondevice.engines.simd.kernels.isa import vector
from ondevice.engines.simd.kernels.isa.jit import emits
from ondevice.engines.simd.kernels.isa.vector import floats16, load, pointer_to, read, store, widen_half
from ondevice.engines.simd.kernels.tables import dot, dot_row, read_row
from tests.simd.kernels import twins
from tests.simd.kernels.memory import read_records, records_of

EPS = np.float32(1e-6)


@emits(floats16, types.int64)
def load_half(builder: Any, address: Any) -> Any:
    """Load 16 fp16 as float32."""
    return widen_half(builder, read(builder, pointer_to(builder, address), ir.VectorType(ir.IntType(16), 16), align=2))


@njit
def map_exp(x: int, out: int, count: int) -> None:
    for i in range(0, 4 * count, 64):
        store(out + i, vector.exp(load(x + i)))


@njit
def map_tanh(x: int, out: int, count: int) -> None:
    for i in range(0, 4 * count, 64):
        store(out + i, vector.tanh(load(x + i)))


@njit
def map_gelu(x: int, out: int, count: int) -> None:
    for i in range(0, 4 * count, 64):
        store(out + i, vector.gelu(load(x + i)))


@njit
def widen(x: int, out: int, count: int) -> None:
    for i in range(0, count, 16):
        store(out + 4 * i, load_half(x + 2 * i))


def mapped(function: object, x: twins.Floats) -> twins.Floats:
    out = np.empty_like(x)
    function(x.ctypes.data, out.ctypes.data, len(x))  # type: ignore[operator]
    return out


def test_exp() -> None:
    x = np.linspace(-87, 88, 16 * 4096, dtype=np.float32)
    np.testing.assert_allclose(mapped(map_exp, x), np.exp(x.astype(np.float64)), rtol=2.5e-7)
    assert mapped(map_exp, np.full(16, -1e30, np.float32))[0] < 2e-38


def test_tanh_and_gelu() -> None:
    x = np.linspace(-30, 30, 16 * 4096, dtype=np.float32)
    np.testing.assert_allclose(mapped(map_tanh, x), np.tanh(x.astype(np.float64)), atol=2e-7)
    np.testing.assert_allclose(mapped(map_gelu, x), twins.gelu(x.astype(np.float64)), rtol=2e-6, atol=1e-7)


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_every_fp16_number_there_and_back() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    wide = np.empty(1 << 16, np.float32)
    compiled: Any = widen
    compiled(bits.ctypes.data, wide.ctypes.data, 1 << 16)
    np.testing.assert_array_equal(wide, bits.view(np.float16).astype(np.float32))
    back = np.empty(1 << 16, np.uint16)
    to_half(wide.ctypes.data, back.ctypes.data, 1 << 16)
    numbers = ~np.isnan(wide)
    np.testing.assert_array_equal(back[numbers], bits[numbers])
    assert np.isnan(back.view(np.float16)[~numbers]).all()


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_fp16_rounds_to_even() -> None:
    exponents = np.random.default_rng(0).uniform(-30, 20, 1 << 16)
    x = np.exp2(exponents).astype(np.float32)
    x[::2] *= -1
    x[:2048] = (np.arange(2048) + 0.5) * 2.0**-24  # halfway between subnormals
    out = np.empty(len(x), np.uint16)
    to_half(x.ctypes.data, out.ctypes.data, len(x))
    np.testing.assert_array_equal(out, x.astype(np.float16).view(np.uint16))


@pytest.mark.parametrize("size", [1e-33, 1e-20, 0.7, 3e30])
def test_int8_rows_equal_their_twin(size: float) -> None:
    x = np.random.default_rng(0).standard_normal((50, 96)).astype(np.float32) * np.float32(size)
    x[7] = 0
    out = np.zeros(50, [("codes", np.int8, 96), ("scale", np.float32)])
    for row in range(50):
        out[row]["scale"] = quantize_head(x[row].ctypes.data, out[row : row + 1].ctypes.data, 96)
    codes, scales = twins.to_int8(x)
    np.testing.assert_array_equal(out["codes"], codes)
    np.testing.assert_array_equal(out["scale"], scales)
    assert (np.abs(codes * scales[:, None].astype(np.float64) - x) <= 0.501 * scales[:, None]).all()


@pytest.mark.parametrize("rows", [1, 3, 8, 13])
def test_quantised_rows_equal_their_twin(rows: int) -> None:
    rng = np.random.default_rng(rows)
    x = (rng.standard_normal((rows, 96)) * np.exp2(rng.integers(-20, 20, (rows, 1)))).astype(np.float32)
    x[0, :32] = 0
    x[-1, 32] = 127 * 2.0**5  # exactly the largest that fits
    x[-1, 64] = np.nextafter(np.float32(127 * 2.0**5), np.float32(np.inf))
    found, expected = read_records(records_of(x, groups_form(8)), rows), twins.quantize(x)
    np.testing.assert_array_equal(found.codes, expected.codes)
    np.testing.assert_array_equal(found.scales, expected.scales)


@pytest.mark.parametrize("width", [32, 96, 256, 1536])
def test_norms(width: int) -> None:
    rng = np.random.default_rng(width)
    h, x, weight = (rng.standard_normal(width).astype(np.float32) for _ in range(3))
    scalar = np.array([0.75], np.float32)
    normed = twins.rms_norm(x, weight, float(EPS))
    out = np.empty_like(x)
    norm(x.ctypes.data, weight.ctypes.data, out.ctypes.data, width, EPS)
    np.testing.assert_allclose(out, normed, rtol=1e-5, atol=1e-6)
    added = h.copy()
    add_normed(added.ctypes.data, x.ctypes.data, weight.ctypes.data, scalar.ctypes.data, width, EPS)
    np.testing.assert_allclose(added, (h + normed) * 0.75, rtol=1e-5, atol=1e-6)
    assert inverse_rms(x.ctypes.data, width, EPS) == pytest.approx(1 / np.sqrt((x.astype(float) ** 2).mean()), rel=1e-5)


def test_rotation() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal(64).astype(np.float32)
    angles = rng.uniform(-10, 10, 32)
    cosines, sines = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    expected = twins.rotate(x, cosines, sines)
    rotate(x.ctypes.data, cosines.ctypes.data, sines.ctypes.data, 64)
    np.testing.assert_allclose(x, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("form", IN_GROUPS, ids=lambda form: form.name)
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_table_rows(form: WeightFormat, dtype: type[np.floating]) -> None:
    rng = np.random.default_rng(form.bits)
    codes = rng.integers(0, 256, (5, form.bytes(96)), dtype=np.uint8)
    scales, minimums = (rng.uniform(-1, 1, (5, 3)).astype(dtype) for _ in range(2))
    rows = twins.unpack(codes.reshape(5, 3, form.bytes(32)), form) * scales.astype(np.float64)[..., None]
    if form.affine:
        rows += minimums.astype(np.float64)[..., None]
    rows = rows.reshape(5, 96)
    half, out = int(dtype == np.float16), np.empty(96, np.float32)
    factors = scales.ctypes.data, minimums.ctypes.data if form.affine else 0, half
    table = Table(codes.ctypes.data, *factors, form.bits, int(form.table), 32, 96)
    read_row(table, 3, np.float32(2.0), out.ctypes.data)
    np.testing.assert_allclose(out, 2 * rows[3], rtol=1e-6, atol=1e-7)
    x = rng.standard_normal(96).astype(np.float32)
    found = dot_row(table, 4, x.ctypes.data)
    assert found == pytest.approx(rows[4] @ x, rel=1e-4, abs=1e-3)
    assert dot(x.ctypes.data, x.ctypes.data, 96) == pytest.approx(float((x.astype(float) ** 2).sum()), rel=1e-5)
