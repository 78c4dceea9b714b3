"""Projections against their numpy twins, bit for bit."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from ondevice.engines.simd.graph.model import Matrix
from ondevice.engines.simd.kernels import instruction_set
from ondevice.engines.simd.kernels.codes import NUMBERS
from ondevice.engines.simd.kernels.project import (
    SCRATCH_BYTES,
    Activations,
    FloatRows,
    PackedMatrix,
    QuantizedRows,
    gated,
    project,
)
from ondevice.engines.simd.pack.layout import Packed, PackLayout
from ondevice.weight_format import INT4, INT8, WeightFormat
from tests.simd import twins
from tests.simd.memory import read_records, records_of


def random_matrix(rng: np.random.Generator, rows: int, width: int, form: WeightFormat) -> Matrix:
    codes = rng.integers(0, 256, (rows, width // 32, form.bytes(32)), dtype=np.uint8)
    scales = rng.uniform(-0.02, 0.02, (rows, width // 32)).astype(np.float16).astype(np.float32)
    return Matrix(codes, scales, form)


def zero(form: WeightFormat) -> int:
    return 8 if form == INT4 else instruction_set.current().int8_zero


def pack_of(layout: PackLayout) -> npt.NDArray[np.uint8]:
    room = np.zeros(layout.size + 64, np.uint8)
    pack = room[-room.ctypes.data % 64 :][: layout.size]
    layout.write(pack, 1)
    return pack


def matrix_of(pack: npt.NDArray[np.uint8], packed: Packed) -> PackedMatrix:
    at = pack.ctypes.data
    return PackedMatrix(
        NUMBERS[packed.format], packed.tile_bytes, at + packed.weights, at + packed.scales, packed.blocks
    )


def run(pack: npt.NDArray[np.uint8], packed: Packed, x: twins.Floats, cap: float = 0.0) -> twins.Floats:
    out = np.zeros((len(x), packed.tiles * 16), np.float32)
    records = records_of(x, zero(packed.format))
    project(
        matrix_of(pack, packed),
        Activations(records.ctypes.data, len(x)),
        FloatRows(out.ctypes.data, out.strides[0]),
        np.float32(cap),
        0,
        packed.tiles,
    )
    return out


def expected(matrix: Matrix, x: twins.Floats) -> twins.Floats:
    codes = twins.unpack(matrix.codes, matrix.format)
    return twins.project(twins.quantize(x), codes, matrix.scales.astype(np.float16))


@pytest.mark.parametrize("form", [INT4, INT8], ids=lambda form: form.name)
@pytest.mark.parametrize("rows", [*range(1, 10), 16, 19])
def test_a_projection_equals_its_twin(form: WeightFormat, rows: int) -> None:
    rng = np.random.default_rng(rows)
    matrix = random_matrix(rng, 72, 96, form)
    layout = PackLayout()
    packed = layout.add(matrix)
    x = rng.standard_normal((rows, 96)).astype(np.float32)
    out = run(pack_of(layout), packed, x)
    np.testing.assert_array_equal(out[:, :72], expected(matrix, x))
    assert not out[:, 72:].any(), "rows beyond the last are zero"


@pytest.mark.parametrize("form", [INT4, INT8], ids=lambda form: form.name)
def test_extreme_values_do_not_overflow(form: WeightFormat) -> None:
    codes = np.zeros((32, 3, form.bytes(32)), np.uint8)
    codes[::2] = 255
    matrix = Matrix(codes, np.full((32, 3), 1.0, np.float32), form)
    x = np.array([[127.0] * 96, [-127.0] * 96, [1e-38] * 96, [3e30] * 96, [0.0] * 96], np.float32)
    layout = PackLayout()
    packed = layout.add(matrix)
    out = run(pack_of(layout), packed, x)
    np.testing.assert_array_equal(out, expected(matrix, x))


def test_matrices_with_one_input_lie_one_after_another() -> None:
    rng = np.random.default_rng(1)
    parts = [random_matrix(rng, rows, 64, INT4) for rows in (64, 32, 32)]
    layout = PackLayout()
    packed = layout.add(*parts)
    x = rng.standard_normal((3, 64)).astype(np.float32)
    out = run(pack_of(layout), packed, x)
    np.testing.assert_array_equal(out, np.concatenate([expected(part, x) for part in parts], axis=1))


def test_the_softcap() -> None:
    rng = np.random.default_rng(2)
    matrix = random_matrix(rng, 32, 64, INT8)
    layout = PackLayout()
    packed = layout.add(matrix)
    x = 10 * rng.standard_normal((2, 64)).astype(np.float32)
    plain = expected(matrix, x).astype(np.float64)
    np.testing.assert_allclose(run(pack_of(layout), packed, x, cap=30.0), 30 * np.tanh(plain / 30), atol=1e-5)


@pytest.mark.parametrize("with_up", [True, False])
@pytest.mark.parametrize("rows", [1, 5, 11])
def test_gelu_of_the_gate_times_up(rows: int, with_up: bool) -> None:
    rng = np.random.default_rng(rows)
    width, inner = 64, 96
    gate, up = (random_matrix(rng, inner, width, INT4) for _ in range(2))
    x = 4 * rng.standard_normal((rows, width)).astype(np.float32)
    factor = rng.standard_normal((rows, inner)).astype(np.float32)
    layout = PackLayout()
    packed = layout.add_gated(gate, up) if with_up else layout.add(gate)
    pack = pack_of(layout)
    out = np.zeros(rows * inner // 32 * 40, np.uint8)
    scratch = np.zeros(SCRATCH_BYTES, np.uint8)
    records = records_of(x, 8)
    gated(
        matrix_of(pack, packed),
        Activations(records.ctypes.data, rows),
        FloatRows(0 if with_up else factor.ctypes.data, factor.strides[0]),
        QuantizedRows(out.ctypes.data, inner // 32, 8),
        scratch.ctypes.data,
        0,
        inner // 32,
    )
    other = expected(up, x) if with_up else factor
    product = twins.gelu(expected(gate, x).astype(np.float64)) * other
    found = read_records(out, rows)
    step = np.exp2(found.exponents).repeat(32, axis=1)
    assert (np.abs(found.values() - product) <= 0.5001 * step + 1e-5 * np.abs(product)).all()
    assert (np.abs(found.codes).max(axis=-1) > 62).all(), "the finest scale that fits"
