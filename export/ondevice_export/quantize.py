"""Block quantisation: 32 weights share one scale that is exact in fp16, w ~ scale * (q - zero), and in an affine
format also a minimum that is exact in fp16, w ~ scale * q + minimum, or in that of a table w ~ scale * level[q].

int4 codes q are in 0..15 with zero 8, int8 codes in 0..255 with zero 128: the zero points that MatMulNBits and
GatherBlockQuantized assume for unsigned data. Blocks whose weights already are on such a grid (checkpoints from
quantisation-aware training) are recognised and reproduced; other blocks get the scale of least squared error among a
few candidates. Affine codes are in 0..15. Their scale and minimum are fitted by least squares; a block whose smallest
and largest weights have the codes 0 and 15, as llama.cpp writes Q4_1, is reproduced. In a table format, so is a block
whose largest weight has the code 0 or 15.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ondevice.bundle_format.weight_format import INT4, INT4_AFFINE, INT4_TABLE, INT8, WeightFormat
from ondevice.native.functions import entry, kernel

BLOCK = 32

ROUNDED = (INT4, INT4_AFFINE, INT4_TABLE, INT8)
"""The formats in groups that weights are rounded to: all but MXFP4, which a checkpoint has or has not."""

_INT4_TARGETS = np.array([-8.0, 8.0, -7.5001, 7.5, -8.5, 8.5, 7.0, -7.0], np.float32)
"""Candidate codes for the block's largest weight.

-7.5001 instead of -7.5, which would round to -7, a case that 7.5 already covers.
"""

_INT8_TARGETS = np.array([127.0, -128.0], np.float32)

_TABLE_TARGETS = np.array([-127.0, 113.0, -120.0, 107.0, -135.0, 120.0], np.float32)
"""Candidate levels for the block's largest weight. On normally distributed weights, the squared error is 1.02 of that
of 60 candidates, and 0.82 of int4's (`tests/export/test_quantize.py`)."""

NEAREST = np.searchsorted(
    (INT4_TABLE.levels[1:] + INT4_TABLE.levels[:-1]) / 2, np.arange(-128, 128, 0.5), side="right"
).astype(np.uint8)
"""Codes of the levels that are nearest to numbers from -128 on, in steps of a half: all limits between two levels are
such numbers."""

_AFFINE_SPANS = np.array(
    [[15, 0], [14.4, 0.3], [15.7, -0.35], [15.8, 0], [15.8, -0.8], [16.4, -0.7], [17, 0], [17, -2]], np.float32
)
"""Candidates: codes between a block's smallest and largest weight, and the code of the smallest.

Beyond 0..15, weights at the ends share a code. On normally distributed weights, the squared error is 0.81 of that of
the first candidate without a fit, llama.cpp's rule for Q4_1 (`tests/export/test_quantize.py`).
"""


class Quantized(NamedTuple):
    """Rows of a matrix in blocks of 32 weights."""

    packed: npt.NDArray[np.uint8]
    """Codes, uint8[rows, k / 32, bytes of 32 codes], the lowest bits of a byte first."""
    scales: npt.NDArray[np.float32]
    """float32[rows, k / 32], exact in fp16."""
    minimums: npt.NDArray[np.float32] | None
    """As the scales; None for symmetric formats."""
    finite: bool
    """Whether every weight was finite."""


def quantize(weights: npt.NDArray[np.float32], form: WeightFormat) -> Quantized:
    """Quantise rows of a matrix in blocks of 32 weights.

    Args:
        weights: [rows, k], k a multiple of 32.
        form: one of ROUNDED.
    """
    rows, width = weights.shape
    size = form.bytes(BLOCK)
    packed = np.empty((rows, width // BLOCK, size), np.uint8)
    scales = np.empty((rows, width // BLOCK), np.float32)
    blocks = np.ascontiguousarray(weights).reshape(-1, BLOCK)
    codes, fixed = np.empty(BLOCK, np.uint8), np.empty(BLOCK, np.int32)
    to = packed.reshape(-1, size), scales.reshape(-1)
    if form == INT4_AFFINE:
        minimums = np.empty_like(scales)
        finite = quantize_affine_blocks(blocks, _AFFINE_SPANS, *to, minimums.reshape(-1), codes, fixed)
        return Quantized(packed, scales, minimums, bool(finite))
    if form == INT4_TABLE:
        levels = INT4_TABLE.levels.astype(np.int32)
        finite = quantize_table_blocks(blocks, _TABLE_TARGETS, levels, NEAREST, *to, codes, fixed)
        return Quantized(packed, scales, None, bool(finite))
    targets = {INT4: _INT4_TARGETS, INT8: _INT8_TARGETS}[form]
    return Quantized(packed, scales, None, bool(quantize_symmetric_blocks(blocks, targets, *to, codes, fixed)))


def dequantize(blocks: Quantized, form: WeightFormat) -> npt.NDArray[np.float32]:
    """The weights that quantised rows stand for, float32[rows, k]."""
    values = form.levels[form.unpack(blocks.packed)] * blocks.scales[..., None]
    if blocks.minimums is not None:
        values += blocks.minimums[..., None]
    return values.reshape(blocks.packed.shape[0], -1)


@kernel
def to_fp16(value: np.float32) -> np.float32:
    """Round to the nearest fp16 value. Compiled without fastmath, because both methods rely on exact rounding."""
    limit = np.float32(65504.0)
    if abs(value) >= limit:
        return limit if value > 0 else -limit
    if abs(value) < np.float32(2.0**-14):  # fp16 subnormals: multiples of 2**-24, the spacing of float32 at 0.75
        shift = np.float32(0.75)
        return np.float32(np.float32(value + shift) - shift)
    spread = np.float32(value * np.float32(8193.0))  # Veltkamp: keeps the upper 11 bits
    return np.float32(spread - np.float32(spread - value))


@kernel
def largest(block: npt.NDArray[np.float32]) -> np.float32:
    """The weight of largest magnitude, with its sign."""
    peak = np.float32(0.0)
    for i in range(BLOCK):
        if abs(block[i]) > abs(peak):
            peak = block[i]
    return peak


@kernel
def _on_grid(block: npt.NDArray[np.float32], scale: np.float32, slack: np.float32) -> bool:
    """Whether every weight is an int4 multiple of `scale`, within a relative error of `slack`."""
    for i in range(BLOCK):
        code = np.float32(np.rint(block[i] / scale))
        miss = abs(block[i] - scale * code)
        if code < -8 or code > 7 or miss > slack * abs(block[i]):
            return False
    return True


@kernel
def _grid_scale(block: npt.NDArray[np.float32], peak: np.float32) -> np.float32:
    """The scale of the int4 grid that all weights of the block are on; 0 if there is none.

    The second pass allows for grids that were stored as bf16, with relative errors of up to 2**-9.
    """
    for slack in (np.float32(0.0), np.float32(2.0**-8)):
        for level in range(8, 0, -1):
            scale = to_fp16(np.float32(-peak / np.float32(level)))
            if scale != 0 and _on_grid(block, scale, slack):
                return scale
            if level < 8 and scale != 0 and _on_grid(block, -scale, slack):
                return -scale
    return np.float32(0.0)


@kernel
def _moments(
    block: npt.NDArray[np.float32], fixed: npt.NDArray[np.int32], inverse: np.float32, low: np.float32
) -> tuple[np.int32, np.int32]:
    """Sums of fixed * code and code**2 for the codes from `low` to -low - 1 that `inverse` rounds the block to."""
    cross, square, first = np.int32(0), np.int32(0), np.int32(low)
    offset, most = np.float32(0.5) - low, np.float32(-2.0) * low - np.float32(1.0)
    for i in range(BLOCK):
        shifted = min(max(block[i] * inverse + offset, np.float32(0.0)), most)
        code = np.int32(np.int32(shifted) + first)
        cross = np.int32(cross + np.int32(fixed[i] * code))  # else numba widens to 64 bits, which halves the lanes
        square = np.int32(square + np.int32(code * code))
    return cross, square


@kernel
def _best_scale(
    block: npt.NDArray[np.float32],
    peak: np.float32,
    targets: npt.NDArray[np.float32],
    low: np.float32,
    fixed: npt.NDArray[np.int32],
) -> np.float32:
    """Map `peak` to each target code, refit the scale by least squares, and return the scale of least squared error.

    For given codes the best scale is cross / square, and it removes cross**2 / square from the squared error. Both are
    sums of integers: `fixed` has the weights in units of 2**-22 of the peak for int4 and 2**-18 for int8, the finest
    units for which 32 products fit int32. Float sums would need a fixed order of summation, or an export would depend
    on the CPU; LLVM does not vectorise a fixed order, which takes three times as long.
    """
    if abs(peak) < np.float32(2.0**-24):  # below the smallest positive fp16 scale
        return np.float32(0.0)
    one = np.float32(2.0**25) / -low
    unit = one / peak
    for i in range(BLOCK):
        fixed[i] = np.int32(np.rint(block[i] * unit))
    best, best_gain = 0.0, -1.0
    for target in targets:
        cross, square = _moments(block, fixed, target / peak, low)
        if square > 0 and float(cross) * float(cross) > best_gain * float(square):
            best = float(cross) / float(square)
            best_gain = best * float(cross)
    return to_fp16(np.float32(best * float(peak) / float(one)))


@entry("export", "f32[,] f32[] u8[,] f32[] u8[] i32[]")
def quantize_symmetric_blocks(  # noqa: PLR0917
    blocks: npt.NDArray[np.float32],
    targets: npt.NDArray[np.float32],
    packed: npt.NDArray[np.uint8],
    scales: npt.NDArray[np.float32],
    codes: npt.NDArray[np.uint8],
    fixed: npt.NDArray[np.int32],
) -> bool:
    """blocks [n, 32] -> packed [n, 16] of int4 or [n, 32] of int8, scales [n]; `codes` and `fixed` [32] are scratch.

    Only int4 has grids of checkpoints to recognise.
    """
    finite, is_int4 = True, packed.shape[1] < BLOCK
    low = np.float32(-8.0) if is_int4 else np.float32(-128.0)
    high = np.float32(7.0) if is_int4 else np.float32(127.0)
    for index in range(len(blocks)):
        block = blocks[index]
        peak, scale = largest(block), np.float32(0.0)
        if is_int4 and peak != 0:
            scale = _grid_scale(block, peak)
        if scale == 0:
            scale = _best_scale(block, peak, targets, low, fixed)
        finite &= _encode(block, scale, low, high, codes if is_int4 else packed[index])
        scales[index] = scale
        if is_int4:
            _pack_nibbles(codes, packed[index])
    return finite


@kernel
def _pack_nibbles(codes: npt.NDArray[np.uint8], packed: npt.NDArray[np.uint8]) -> None:
    """codes [32] of 4 bits -> packed [16], the first of two codes in the low bits."""
    for i in range(BLOCK // 2):
        packed[i] = codes[2 * i] | (codes[2 * i + 1] << 4)


@kernel
def _encode(
    block: npt.NDArray[np.float32],
    scale: np.float32,
    low: np.float32,
    high: np.float32,
    codes: npt.NDArray[np.uint8],
) -> bool:
    """Round each weight to its nearest code, stored minus `low`, so from 0 up; returns whether all were finite."""
    finite = True
    inverse = np.float32(1.0) / scale if scale != 0 else np.float32(0.0)
    for i in range(BLOCK):
        finite &= abs(block[i]) < np.float32(np.inf)
        code = min(max(np.float32(np.rint(block[i] * inverse)), low), high)
        codes[i] = np.uint8(np.int32(code - low))
    return finite


# Blocks of codes that are looked up.


@entry("export", "f32[,] f32[] i32[] u8[] u8[,] f32[] u8[] i32[]")
def quantize_table_blocks(  # noqa: PLR0917
    blocks: npt.NDArray[np.float32],
    targets: npt.NDArray[np.float32],
    levels: npt.NDArray[np.int32],
    nearest: npt.NDArray[np.uint8],
    packed: npt.NDArray[np.uint8],
    scales: npt.NDArray[np.float32],
    codes: npt.NDArray[np.uint8],
    fixed: npt.NDArray[np.int32],
) -> bool:
    """blocks [n, 32] -> packed [n, 16], scales [n]. `codes` [32] and `fixed` [32] are scratch.

    The scale is searched for as in `_best_scale`, with the units of int8.
    """
    finite, one = True, np.float32(2.0**18)
    for index in range(len(blocks)):
        block = blocks[index]
        peak, scale = largest(block), np.float32(0.0)
        if abs(peak) >= np.float32(2.0**-24):
            unit = one / peak
            for i in range(BLOCK):
                fixed[i] = np.int32(np.rint(block[i] * unit))
            best, best_gain = 0.0, -1.0
            for target in targets:
                _encode_table(block, target / peak, nearest, codes)
                cross, square = np.int32(0), np.int32(0)
                for i in range(BLOCK):
                    level = levels[codes[i]]
                    cross = np.int32(cross + np.int32(fixed[i] * level))
                    square = np.int32(square + np.int32(level * level))
                if float(cross) * float(cross) > best_gain * float(square):
                    best = float(cross) / float(square)
                    best_gain = best * float(cross)
            scale = to_fp16(np.float32(best * float(peak) / float(one)))
        finite &= _encode_table(block, np.float32(1.0) / scale if scale != 0 else np.float32(0.0), nearest, codes)
        scales[index] = scale
        _pack_nibbles(codes, packed[index])
    return finite


@kernel
def _encode_table(
    block: npt.NDArray[np.float32],
    inverse: np.float32,
    nearest: npt.NDArray[np.uint8],
    codes: npt.NDArray[np.uint8],
) -> bool:
    """Round each weight to its nearest level, given the inverse of the scale; returns whether all were finite."""
    finite = True
    for i in range(BLOCK):
        finite &= abs(block[i]) < np.float32(np.inf)
        place = np.float32(2.0) * block[i] * inverse + np.float32(256.0)
        if not place > 0:  # or NaN
            codes[i] = 0
        else:
            codes[i] = nearest[np.int32(min(place, np.float32(511.0)))]
    return finite


# Affine blocks.

_MOST = np.float32(2.0**20)
"""Weights beyond this are clipped: scale and minimum are fp16, so the largest weight is below 16 * 65504."""
_UNITS = np.float32(2.0**21)
"""Units between a block's smallest and largest weight, the finest for which 32 products with codes fit int32."""


@entry("export", "f32[,] f32[,] u8[,] f32[] f32[] u8[] i32[]")
def quantize_affine_blocks(  # noqa: PLR0917
    blocks: npt.NDArray[np.float32],
    spans: npt.NDArray[np.float32],
    packed: npt.NDArray[np.uint8],
    scales: npt.NDArray[np.float32],
    minimums: npt.NDArray[np.float32],
    codes: npt.NDArray[np.uint8],
    fixed: npt.NDArray[np.int32],
) -> bool:
    """blocks [n, 32] -> packed [n, 16], scales [n], minimums [n]. `codes` [32] and `fixed` [32] are scratch."""
    finite = True
    for index in range(len(blocks)):
        block = blocks[index]
        low, high = _MOST, -_MOST
        for i in range(BLOCK):
            low, high = min(low, block[i]), max(high, block[i])
        low, high = max(low, -_MOST), min(high, _MOST)
        minimum = to_fp16(low)
        scale = to_fp16(np.float32((low - minimum) / np.float32(15.0)))  # of equal weights, whose code is 15
        if high - low >= np.float32(2.0**-24):  # else below the smallest positive fp16 scale
            unit = np.float32(_UNITS / (high - low))
            for i in range(BLOCK):
                fixed[i] = np.int32(np.rint((min(max(block[i], low), high) - low) * unit))
            _best_codes(fixed, spans, codes)
            for _ in range(2):  # the codes of the fitted grid give a better fit
                scale, minimum = _affine_fit(fixed, codes, low, unit, scale, minimum)
                _encode_affine(block, scale, minimum, codes)
        finite &= _encode_affine(block, scale, minimum, codes)
        scales[index], minimums[index] = scale, minimum
        _pack_nibbles(codes, packed[index])
    return finite


@kernel
def _best_codes(fixed: npt.NDArray[np.int32], spans: npt.NDArray[np.float32], codes: npt.NDArray[np.uint8]) -> None:
    """Choose the candidate whose codes leave the least squared error after a fit, and write its codes.

    With n weights x and codes c, a fit removes (n * sum(xc) - sum(x) * sum(c))**2 / (n * sum(cc) - sum(c)**2) / n from
    the squared error around the mean. All are sums of integers, as in `_best_scale`.
    """
    best, best_gain = 0, -1.0
    for number in range(len(spans)):
        factor, offset = spans[number, 0] / _UNITS, spans[number, 1] + np.float32(0.5)
        for i in range(BLOCK):
            codes[i] = np.uint8(min(max(np.float32(fixed[i]) * factor + offset, np.float32(0.0)), np.float32(15.5)))
        across, spread, _, _ = _affine_moments(fixed, codes)
        gain = across * across / spread if spread > 0 else 0.0
        if gain > best_gain:
            best, best_gain = number, gain
    factor, offset = spans[best, 0] / _UNITS, spans[best, 1] + np.float32(0.5)
    for i in range(BLOCK):
        codes[i] = np.uint8(min(max(np.float32(fixed[i]) * factor + offset, np.float32(0.0)), np.float32(15.5)))


@kernel
def _affine_moments(
    fixed: npt.NDArray[np.int32], codes: npt.NDArray[np.uint8]
) -> tuple[float, float, np.int32, np.int32]:
    """n * sum(xc) - sum(x) * sum(c) and n * sum(cc) - sum(c)**2, exact, then sum(x) and sum(c)."""
    cross, square, total, sum_of_codes = np.int32(0), np.int32(0), np.int32(0), np.int32(0)
    for i in range(BLOCK):
        code = np.int32(codes[i])
        cross = np.int32(cross + np.int32(fixed[i] * code))
        square = np.int32(square + np.int32(code * code))
        total, sum_of_codes = np.int32(total + fixed[i]), np.int32(sum_of_codes + code)
    across = float(BLOCK) * float(cross) - float(total) * float(sum_of_codes)
    spread = float(BLOCK) * float(square) - float(sum_of_codes) * float(sum_of_codes)
    return across, spread, total, sum_of_codes


@kernel
def _affine_fit(  # noqa: PLR0917
    fixed: npt.NDArray[np.int32],
    codes: npt.NDArray[np.uint8],
    low: np.float32,
    unit: np.float32,
    scale: np.float32,
    minimum: np.float32,
) -> tuple[np.float32, np.float32]:
    """The scale and minimum of least squared error for given codes, rounded to fp16; those given if all codes are the
    same. The minimum makes up for the rounding of the scale.
    """
    across, spread, total, sum_of_codes = _affine_moments(fixed, codes)
    if spread == 0:
        return scale, minimum
    scale = to_fp16(np.float32(across / spread / float(unit)))
    mean = (float(total) / float(unit) - float(scale) * float(sum_of_codes)) / float(BLOCK)
    return scale, to_fp16(np.float32(float(low) + mean))


@kernel
def _encode_affine(
    block: npt.NDArray[np.float32], scale: np.float32, minimum: np.float32, codes: npt.NDArray[np.uint8]
) -> bool:
    """Round each weight to its nearest code, 0..15; returns whether all were finite."""
    finite = True
    inverse = np.float32(1.0) / scale if scale != 0 else np.float32(0.0)
    for i in range(BLOCK):
        finite &= abs(block[i]) < np.float32(np.inf)
        code = np.float32(np.rint(np.float32(block[i] - minimum) * inverse))
        codes[i] = np.uint8(np.int32(min(max(code, np.float32(0.0)), np.float32(15.0))))
    return finite
