"""The quantiser: exact on grids, better than absmax elsewhere, and what ONNX Runtime reads is what it wrote."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from ondevice.bundle_format.weight_format import INT4, INT4_AFFINE, INT4_TABLE, INT8, WeightFormat
from ondevice_export.quantize import BLOCK, ROUNDED, dequantize, quantize

FloatArray = npt.NDArray[np.float32]


def absmax(weights: FloatArray, bits: int) -> FloatArray:
    """The plain rule at the same size: the largest weight maps to the largest code."""
    top = (1 << (bits - 1)) - 1
    blocks = weights.reshape(-1, BLOCK)
    scales = (np.abs(blocks).max(1, keepdims=True) / top).astype(np.float16).astype(np.float32)
    return (np.clip(np.rint(blocks / scales), -top - 1, top) * scales).reshape(weights.shape)


def plain_affine(weights: FloatArray) -> FloatArray:
    """The rule of llama.cpp's Q4_1: the smallest weight has code 0, the largest 15."""
    blocks = weights.reshape(-1, BLOCK)
    low = blocks.min(1, keepdims=True)
    scales = ((blocks.max(1, keepdims=True) - low) / 15).astype(np.float32)
    codes = np.clip(np.floor((blocks - low) / scales + 0.5), 0, 15)
    rounded = [each.astype(np.float16).astype(np.float32) for each in (scales, low)]
    return (codes.astype(np.float32) * rounded[0] + rounded[1]).reshape(weights.shape)


def squared_error(weights: FloatArray, approximation: FloatArray) -> float:
    return float(((weights - approximation).astype(np.float64) ** 2).mean())


@pytest.mark.parametrize(("form", "at_most"), [(INT4, 0.75), (INT4_AFFINE, 0.82), (INT8, 0.92)])
@pytest.mark.parametrize("distribution", ["normal", "heavy"])
def test_beats_the_plain_rule(form: WeightFormat, at_most: float, distribution: str) -> None:
    random = np.random.default_rng(0)
    sample = random.standard_normal if distribution == "normal" else lambda shape: random.standard_t(4, shape)
    weights = (sample((128, 512)) * 0.02).astype(np.float32)
    quantized = quantize(weights, form)
    assert quantized.finite
    plain = plain_affine(weights) if form.affine else absmax(weights, form.bits)
    assert squared_error(weights, dequantize(quantized, form)) < at_most * squared_error(weights, plain)


@pytest.mark.parametrize(("distribution", "at_most"), [("normal", 0.83), ("heavy", 0.66)])
def test_levels_of_a_table_lose_less(distribution: str, at_most: float) -> None:
    """Than int4's, at the same size; and the search of the scale is near the best of many scales."""
    random = np.random.default_rng(0)
    sample = random.standard_normal if distribution == "normal" else lambda shape: random.standard_t(4, shape)
    weights = (sample((128, 512)) * 0.02).astype(np.float32)
    error, even = (squared_error(weights, dequantize(quantize(weights, form), form)) for form in (INT4_TABLE, INT4))
    assert error < at_most * even
    blocks, levels = weights.reshape(-1, BLOCK), INT4_TABLE.levels
    best = np.full(len(blocks), np.inf)
    for share in np.linspace(0.7, 1.25, 60):
        for level in (levels[0], levels[-1]):
            scales = np.abs(blocks).max(1, keepdims=True) / (share * level)
            for signed in (scales, -scales):
                miss = blocks - signed * levels[np.searchsorted((levels[1:] + levels[:-1]) / 2, blocks / signed)]
                best = np.minimum(best, np.square(miss).mean(1))
    assert error < 1.03 * best.mean()


def test_reproduces_blocks_of_a_table() -> None:
    """Blocks in which the largest weight has one of the codes at the ends."""
    random = np.random.default_rng(2)
    codes = random.integers(0, 16, (512, BLOCK))
    codes[:256, 7] = 0
    codes[256:] = np.where(codes[256:] > 1, codes[256:], 2)
    codes[256:, 7] = 15
    scales = random.uniform(1e-4, 2.0, (512, 1)).astype(np.float16).astype(np.float32)
    scales *= random.choice([-1.0, 1.0], (512, 1)).astype(np.float32)
    weights = scales * INT4_TABLE.levels[codes]
    quantized = quantize(weights, INT4_TABLE)
    np.testing.assert_array_equal(INT4_TABLE.unpack(quantized.packed)[:, 0], codes)
    np.testing.assert_array_equal(dequantize(quantized, INT4_TABLE), weights)


@pytest.mark.parametrize("form", ROUNDED)
def test_scales_fit_fp16(form: WeightFormat) -> None:
    random = np.random.default_rng(1)
    # From subnormal fp16 scales to large ones.
    weights = (random.standard_normal((64, 64)) * 10.0 ** random.uniform(-6, 3, (64, 1))).astype(np.float32)
    quantized = quantize(weights, form)
    assert (quantized.minimums is not None) == form.affine
    for values in (quantized.scales, quantized.minimums):
        if values is not None:
            np.testing.assert_array_equal(values, values.astype(np.float16).astype(np.float32))


@pytest.mark.parametrize("levels", [(-8, 7), (-7, 7), (-5, 4), (0, 3), (-8, 0), (-1, 1)])
def test_reproduces_a_q4_0_grid(levels: tuple[int, int]) -> None:
    random = np.random.default_rng(2)
    scales = random.uniform(1e-4, 2.0, (256, 1)).astype(np.float16).astype(np.float32)
    scales *= random.choice([-1.0, 1.0], (256, 1)).astype(np.float32)
    weights = (scales * random.integers(levels[0], levels[1] + 1, (256, BLOCK))).astype(np.float32)
    quantized = quantize(weights, INT4)
    np.testing.assert_array_equal(dequantize(quantized, INT4), weights)


def test_reproduces_q4_1_blocks() -> None:
    """Blocks as llama.cpp writes them: codes 0 and 15 occur."""
    random = np.random.default_rng(2)
    weights = (random.standard_normal((512, BLOCK)) * 10.0 ** random.uniform(-3, 1, (512, 1))).astype(np.float32)
    weights += random.standard_normal((512, 1)).astype(np.float32) * weights.std(axis=1, keepdims=True)
    stored = plain_affine(weights)
    np.testing.assert_array_equal(dequantize(quantize(stored, INT4_AFFINE), INT4_AFFINE), stored)


def test_finds_the_codes_of_a_grid_stored_as_bf16() -> None:
    """Quantisation-aware checkpoints come as bf16, which rounds scale * code to 8 bits."""
    random = np.random.default_rng(3)
    scales = random.uniform(1e-3, 1.0, (256, 1)).astype(np.float16).astype(np.float32)
    codes = random.integers(-8, 8, (256, BLOCK))
    codes[:, 0] = -8
    exact = (scales * codes).astype(np.float32)
    bits = exact.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).view(np.float32)
    packed = quantize(rounded, INT4).packed
    found = np.stack([packed & 15, packed >> 4], axis=-1).reshape(256, BLOCK).astype(int) - 8
    np.testing.assert_array_equal(found, codes)


@pytest.mark.parametrize("form", ROUNDED)
def test_zero_and_extreme_blocks(form: WeightFormat) -> None:
    weights = np.zeros((4, BLOCK), np.float32)
    weights[1, 3] = 1e-9  # below the smallest scale: becomes zero, not NaN
    weights[2, 5] = -3.0
    weights[3] = 1e5
    quantized = quantize(weights, form)
    assert quantized.finite
    restored = dequantize(quantized, form)
    np.testing.assert_array_equal(restored[:2], 0)
    # a zero in the middle of an affine grid is as far off as the scale is rounded; the least level of a table is 1
    close = 1.5e-3 if form.affine else 3 / 113 if form.table else 0
    np.testing.assert_allclose(restored[2:], weights[2:], rtol=5e-4, atol=close)


@pytest.mark.parametrize("form", ROUNDED)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_reports_weights_that_are_not_finite(form: WeightFormat, poison: float) -> None:
    weights = np.ones((2, 2 * BLOCK), np.float32)
    weights[1, 40] = poison
    assert not quantize(weights, form).finite
