"""The quantiser: exact on grids, better than absmax elsewhere, and what ONNX Runtime reads is what it wrote."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from ondevice.bundle_format.weight_format import INT4, INT8, WeightFormat
from ondevice_export.quantize import BLOCK, dequantize, quantize

FloatArray = npt.NDArray[np.float32]


def absmax(weights: FloatArray, bits: int) -> FloatArray:
    """The plain rule at the same size: the largest weight maps to the largest code."""
    top = (1 << (bits - 1)) - 1
    blocks = weights.reshape(-1, BLOCK)
    scales = (np.abs(blocks).max(1, keepdims=True) / top).astype(np.float16).astype(np.float32)
    return (np.clip(np.rint(blocks / scales), -top - 1, top) * scales).reshape(weights.shape)


def squared_error(weights: FloatArray, approximation: FloatArray) -> float:
    return float(((weights - approximation).astype(np.float64) ** 2).mean())


@pytest.mark.parametrize(("form", "at_most"), [(INT4, 0.75), (INT8, 0.92)])
@pytest.mark.parametrize("distribution", ["normal", "heavy"])
def test_beats_absmax(form: WeightFormat, at_most: float, distribution: str) -> None:
    random = np.random.default_rng(0)
    sample = random.standard_normal if distribution == "normal" else lambda shape: random.standard_t(4, shape)
    weights = (sample((128, 512)) * 0.02).astype(np.float32)
    packed, scales, finite = quantize(weights, form)
    assert finite
    ratio = squared_error(weights, dequantize(packed, scales, form)) / squared_error(
        weights, absmax(weights, form.bits)
    )
    assert ratio < at_most


@pytest.mark.parametrize("form", [INT4, INT8])
def test_scales_fit_fp16(form: WeightFormat) -> None:
    random = np.random.default_rng(1)
    # From subnormal fp16 scales to large ones.
    weights = (random.standard_normal((64, 64)) * 10.0 ** random.uniform(-6, 3, (64, 1))).astype(np.float32)
    _, scales, _ = quantize(weights, form)
    np.testing.assert_array_equal(scales, scales.astype(np.float16).astype(np.float32))


@pytest.mark.parametrize("levels", [(-8, 7), (-7, 7), (-5, 4), (0, 3), (-8, 0), (-1, 1)])
def test_reproduces_a_q4_0_grid(levels: tuple[int, int]) -> None:
    random = np.random.default_rng(2)
    scales = random.uniform(1e-4, 2.0, (256, 1)).astype(np.float16).astype(np.float32)
    scales *= random.choice([-1.0, 1.0], (256, 1)).astype(np.float32)
    weights = (scales * random.integers(levels[0], levels[1] + 1, (256, BLOCK))).astype(np.float32)
    packed, found, _ = quantize(weights, INT4)
    np.testing.assert_array_equal(dequantize(packed, found, INT4), weights)


def test_finds_the_codes_of_a_grid_stored_as_bf16() -> None:
    """Quantisation-aware checkpoints come as bf16, which rounds scale * code to 8 bits."""
    random = np.random.default_rng(3)
    scales = random.uniform(1e-3, 1.0, (256, 1)).astype(np.float16).astype(np.float32)
    codes = random.integers(-8, 8, (256, BLOCK))
    codes[:, 0] = -8
    exact = (scales * codes).astype(np.float32)
    bits = exact.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).view(np.float32)
    packed, _, _ = quantize(rounded, INT4)
    found = np.stack([packed & 15, packed >> 4], axis=-1).reshape(256, BLOCK).astype(int) - 8
    np.testing.assert_array_equal(found, codes)


@pytest.mark.parametrize("form", [INT4, INT8])
def test_zero_and_extreme_blocks(form: WeightFormat) -> None:
    weights = np.zeros((4, BLOCK), np.float32)
    weights[1, 3] = 1e-9  # below the smallest scale: becomes zero, not NaN
    weights[2, 5] = -3.0
    weights[3] = 1e5
    packed, scales, finite = quantize(weights, form)
    assert finite
    restored = dequantize(packed, scales, form)
    np.testing.assert_array_equal(restored[:2], 0)
    np.testing.assert_allclose(restored[2:], weights[2:], rtol=5e-4)


@pytest.mark.parametrize("form", [INT4, INT8])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_reports_weights_that_are_not_finite(form: WeightFormat, poison: float) -> None:
    weights = np.ones((2, 2 * BLOCK), np.float32)
    weights[1, 40] = poison
    assert not quantize(weights, form)[2]
