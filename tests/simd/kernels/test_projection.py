"""Projections against their numpy twins, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from ondevice.bundle_format.weight_format import (
    BFLOAT16,
    BY_ROW,
    FLOAT32,
    IN_GROUPS,
    INT4,
    INT4_AFFINE,
    INT4_TABLE,
    INT8,
    MXFP4,
    WeightFormat,
)
from ondevice.engines.simd.kernels.activations import ROW_BYTES
from ondevice.engines.simd.kernels.contract.matrices import SCRATCH_BYTES, groups_form
from ondevice.engines.simd.kernels.contract.steps import CLAMPED, GELU, SILU, PackedMatrix
from ondevice.engines.simd.kernels.project import Activations, FloatRows, InputRows, gated, project
from ondevice.engines.simd.pack_layout import Packed, PackLayout
from ondevice.engines.simd.plan.builder import input_form, product_kind
from ondevice.engines.simd.tensor_files import Matrix
from tests.simd.kernels import twins
from tests.simd.kernels.memory import read_records, records_of


class Steps(NamedTuple):
    """Static scales of a matrix's input and output activations; 0 for none."""

    input: float = 0.0
    output: float = 0.0


NONE = Steps()
CASES = [
    *((form, NONE) for form in (*IN_GROUPS, BFLOAT16, FLOAT32)),
    *((form, steps) for form in BY_ROW.values() for steps in (NONE, Steps(0.021, 0.0), Steps(0.021, 0.013))),
    (BY_ROW[4], Steps(0.0, 0.017)),
]
ROWS = ([1, 4, 9, 19], [2, 5, 7, 16], [3, 6, 8, 19])
"""Tiles of every number of rows; the less usual formats take turns."""


def random_matrix(rng: np.random.Generator, rows: int, width: int, form: WeightFormat, steps: Steps = NONE) -> Matrix:
    codes = rng.integers(0, 256, (rows, form.bytes(width)), dtype=np.uint8)
    if not form.quantised:
        numbers = rng.standard_normal((rows, width)).astype(np.float32).view(np.uint16 if form.bits == 16 else np.uint8)
        codes = np.ascontiguousarray(numbers[:, 1::2] if form.bits == 16 else numbers).view(np.uint8)
    scales, minimums = (
        rng.uniform(-most, most, (rows, form.scales(width))).astype(np.float16).astype(np.float32)
        for most in (0.02, 0.16)
    )
    return Matrix(codes, scales, form, *steps, minimums=minimums if form.affine else None)


def pack_of(layout: PackLayout) -> npt.NDArray[np.uint8]:
    room = np.zeros(layout.size + 64, np.uint8)
    pack = room[-room.ctypes.data % 64 :][: layout.size]
    layout.write(pack, 1)
    return pack


def matrix_of(pack: npt.NDArray[np.uint8], packed: Packed, bias: int = 0, streamed: int = 0) -> PackedMatrix:
    at, kind = pack.ctypes.data, product_kind(packed.matrix)
    places = at + packed.weights, at + packed.scales, packed.blocks
    return PackedMatrix(kind, packed.tile_bytes, *places, bias, streamed)


def run(
    pack: npt.NDArray[np.uint8],
    packed: Packed,
    x: twins.Floats,
    cap: float = 0.0,
    bias: int = 0,
    streamed: int = 0,
) -> twins.Floats:
    out = np.zeros((len(x), packed.tiles * 16), np.float32)
    form = input_form(packed.matrix)
    records = records_of(x, form)
    project(
        matrix_of(pack, packed, bias, streamed),
        Activations(records.ctypes.data, len(x), form),
        FloatRows(out.ctypes.data, out.strides[0]),
        np.float32(cap),
        0,
        packed.tiles,
    )
    return out


def expected(matrix: Matrix, x: twins.Floats) -> twins.Floats:
    form = matrix.format
    if not form.quantised:
        numbers = matrix.codes.view(np.uint16).astype(np.uint32) << 16 if form.bits == 16 else matrix.codes
        return twins.project_floats(x, numbers.view(np.float32), np.ones(matrix.rows, np.float32), 0.0)
    if form.group:
        codes = twins.unpack(matrix.codes.reshape(matrix.rows, -1, form.bytes(32)), form)
        minimums = None if matrix.minimums is None else matrix.minimums.astype(np.float16)
        return twins.project(twins.quantize(x), codes, matrix.scales.astype(np.float16), minimums)
    codes = twins.unpack(matrix.codes, form)
    if matrix.input_step:
        return twins.project_steps(x, codes, matrix.scales[:, 0], matrix.input_step, matrix.output_step)
    return twins.project_floats(x, codes.astype(np.float32), matrix.scales[:, 0], matrix.output_step)


@pytest.mark.parametrize(
    ("form", "steps", "rows"),
    [
        (form, steps, rows)
        for number, (form, steps) in enumerate(CASES)
        for rows in ([*range(1, 14), 16, 19] if form in IN_GROUPS else ROWS[number % 3])
    ],
    ids=str,
)
def test_a_projection_equals_its_twin(form: WeightFormat, steps: Steps, rows: int) -> None:
    rng = np.random.default_rng(rows)
    matrix = random_matrix(rng, 72, 96, form, steps)
    layout = PackLayout()
    packed = layout.add(matrix)
    x = rng.standard_normal((rows, 96)).astype(np.float32)
    for streamed in (0, 1):
        out = run(pack_of(layout), packed, x, streamed=streamed)
        np.testing.assert_array_equal(out[:, :72], expected(matrix, x))
        assert not out[:, 72:].any(), "rows beyond the last are zero"


@pytest.mark.parametrize("rows", [*range(1, 10), 19])
@pytest.mark.parametrize("form", [INT4_TABLE, MXFP4], ids=lambda form: form.name)
def test_codes_of_a_table_are_multiplied_as_their_levels_in_8_bits(form: WeightFormat, rows: int) -> None:
    """All codes, with scales from the least of fp16 to the largest; a row has the same bits alone."""
    rng = np.random.default_rng(rows)
    levels = random_matrix(rng, 72, 96, form)
    levels.codes[:16] = np.arange(48, dtype=np.uint8) * 17
    exponents = rng.integers(-24, 16, levels.scales.shape)
    scales = np.ldexp(np.float32(1), exponents).astype(np.float32)
    bytes8 = (form.levels[form.unpack(levels.codes)] + 128).astype(np.uint8)
    x = rng.standard_normal((rows, 96)).astype(np.float32)
    found = []
    for matrix in (replace(levels, scales=scales), Matrix(bytes8, scales, INT8)):
        layout = PackLayout()
        packed = layout.add(matrix)
        pack = pack_of(layout)
        found.append(run(pack, packed, x))
        for row in range(rows):
            np.testing.assert_array_equal(run(pack, packed, x[row : row + 1])[0], found[-1][row])
    np.testing.assert_array_equal(found[0], found[1])


@pytest.mark.parametrize("form", IN_GROUPS, ids=lambda form: form.name)
def test_extreme_values_do_not_overflow(form: WeightFormat) -> None:
    codes = np.zeros((32, form.bytes(96)), np.uint8)
    codes[::2] = 255
    ones = np.full((32, 3), 1.0, np.float32)
    matrix = Matrix(codes, ones, form, minimums=-8 * ones if form.affine else None)
    x = np.array([[127.0] * 96, [-127.0] * 96, [1e-38] * 96, [3e30] * 96, [2e33] * 96, [0.0] * 96], np.float32)
    layout = PackLayout()
    packed = layout.add(matrix)
    out = run(pack_of(layout), packed, x)
    np.testing.assert_array_equal(out, expected(matrix, x))


@pytest.mark.parametrize("bits", BY_ROW)
def test_extreme_codes_do_not_overflow(bits: int) -> None:
    """Activations of -128, which dynamic scales never produce, times the largest weights, at a model's widest row."""
    codes = np.zeros((32, BY_ROW[bits].bytes(12288)), np.uint8)
    codes[::2] = 255
    matrix = Matrix(codes, np.full((32, 1), 1.0, np.float32), BY_ROW[bits], input_step=0.5)
    x = np.array([[-1e30], [1e30], [-64.0], [63.5], [0.0]], np.float32).repeat(12288, axis=1)
    layout = PackLayout()
    packed = layout.add(matrix)
    np.testing.assert_array_equal(run(pack_of(layout), packed, x), expected(matrix, x))


def test_rows_of_one_pack_may_have_steps_of_their_own() -> None:
    rng = np.random.default_rng(4)
    parts = [random_matrix(rng, 32, 64, BY_ROW[2], Steps(0.03, step)) for step in (0.0, 0.01, 0.002)]
    layout = PackLayout()
    packed = layout.add(*parts)
    x = rng.standard_normal((5, 64)).astype(np.float32)
    np.testing.assert_array_equal(
        run(pack_of(layout), packed, x), np.concatenate([expected(part, x) for part in parts], axis=1)
    )


@pytest.mark.parametrize("form", [INT4, INT4_AFFINE, INT4_TABLE, MXFP4], ids=lambda form: form.name)
def test_matrices_with_one_input_lie_one_after_another(form: WeightFormat) -> None:
    rng = np.random.default_rng(1)
    parts = [random_matrix(rng, rows, 64, form) for rows in (64, 32, 32)]
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


@pytest.mark.parametrize("rows", [1, 3, 8, 11])
@pytest.mark.parametrize("form", [INT4, FLOAT32], ids=lambda form: form.name)
def test_a_bias_is_added_before_the_softcap(form: WeightFormat, rows: int) -> None:
    rng = np.random.default_rng(rows)
    matrix = random_matrix(rng, 48, 64, form)
    layout = PackLayout()
    packed = layout.add(matrix)
    pack, bias = pack_of(layout), rng.standard_normal(48).astype(np.float32)
    x = rng.standard_normal((rows, 64)).astype(np.float32)
    biased = expected(matrix, x) + bias
    np.testing.assert_array_equal(run(pack, packed, x, bias=bias.ctypes.data), biased)
    capped = run(pack, packed, x, cap=2.0, bias=bias.ctypes.data)
    np.testing.assert_allclose(capped, 2 * np.tanh(biased.astype(np.float64) / 2), atol=1e-5)


def first_of(
    function: Callable[[twins.Wide], twins.Wide],
) -> Callable[[twins.Wide, twins.Wide], twins.Wide]:
    """function(gate) * up."""
    return lambda gate, up: function(gate) * up


@pytest.mark.parametrize("form", [INT4, INT4_AFFINE, INT4_TABLE, MXFP4], ids=lambda form: form.name)
@pytest.mark.parametrize("with_up", [True, False])
@pytest.mark.parametrize("rows", [1, 5, 11])
@pytest.mark.parametrize(
    ("function", "twin"),
    [(GELU, first_of(twins.gelu)), (SILU, first_of(twins.silu)), (CLAMPED, twins.clamped_swiglu)],
    ids=["gelu", "silu", "clamped"],
)
def test_the_gate_times_up(
    function: int, twin: Callable[[twins.Wide, twins.Wide], twins.Wide], rows: int, with_up: bool, form: WeightFormat
) -> None:
    rng = np.random.default_rng(rows)
    width, inner = 64, 96
    gate, up = (random_matrix(rng, inner, width, form) for _ in range(2))
    x = 4 * rng.standard_normal((rows, width)).astype(np.float32)
    factor = rng.standard_normal((rows, inner)).astype(np.float32)
    layout = PackLayout()
    packed = layout.add_gated(gate, up) if with_up else layout.add(gate)
    pack = pack_of(layout)
    out, out_form = np.zeros(rows * inner // 32 * ROW_BYTES, np.uint8), groups_form(8)
    scratch = np.zeros(SCRATCH_BYTES, np.uint8)
    records = records_of(x, input_form(gate))
    biases = rng.standard_normal((2, inner)).astype(np.float32) * np.float32(function == CLAMPED)
    if not with_up:
        biases[1] = 0
    tiled = biases.reshape(2, -1, 32).swapaxes(0, 1).copy() if with_up else biases
    gated(
        matrix_of(pack, packed, tiled.ctypes.data if biases.any() else 0),
        Activations(records.ctypes.data, rows, input_form(gate)),
        FloatRows(0 if with_up else factor.ctypes.data, factor.strides[0]),
        function,
        InputRows(out.ctypes.data, inner // 32, out_form),
        scratch.ctypes.data,
        0,
        inner // 32,
    )
    other = expected(up, x) if with_up else factor
    product = twin(expected(gate, x).astype(np.float64) + biases[0], other.astype(np.float64) + biases[1])
    found = read_records(out, rows)
    step = found.scales.repeat(32, axis=1)
    assert (np.abs(found.values() - product) <= 0.5001 * step + 1e-5 * np.abs(product)).all()
    assert (np.abs(found.codes).max(axis=-1) > 62).all(), "the finest scale that fits"
