"""The kernel of calibrated rounding: a block of 32 columns of some rows, with their errors carried to later columns."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ondevice.arrays import Float32Array
from ondevice.engines.simd.kernels.contract.entries import subtract_product
from ondevice.native.functions import entry, kernel
from ondevice_export.quantize import BLOCK, largest, to_fp16

_TRIES = 24
"""Scales that are tried for a block."""

_SHRUNK = (np.float32(0.0), np.float32(0.04), np.float32(0.08), np.float32(0.14))
"""Shares of a block's range that are left out below it, and above."""

_LEAST = np.float32(1e-30)
"""Least scale of an affine block; it becomes 0 in fp16."""


@entry("export", "f32[,] i64 f32[,] f32[] u8[] i64 f32[] u8[,] f32[] f32[]")
def round_block(  # noqa: PLR0917
    rows: Float32Array,
    first: int,
    upper: Float32Array,
    levels: Float32Array,
    nearest: NDArray[np.uint8],
    affine: bool,
    weights: Float32Array,
    codes: NDArray[np.uint8],
    scales: Float32Array,
    minimums: Float32Array,
) -> None:
    """Round a block of 32 columns of some rows, column by column, and carry the errors to the following columns.

    Args:
        rows: [n, width], the weights, of which the block's become their errors.
        first: the block's first column.
        upper: R, [width, width].
        levels, nearest, affine: see `Grid`.
        weights: [32], scratch.
        codes, scales, minimums: [n, 32], [n] and [n], are written.
    """
    total, factor = np.float32(0.0), upper[first : first + BLOCK, first:]
    for i in range(BLOCK):
        weights[i] = np.float32(1.0) / (factor[i, i] * factor[i, i])
        total += weights[i]
    for row in range(len(rows)):
        own, minimum = rows[row, first:], np.float32(0.0)
        if affine:
            scale, minimum = _affine_scale(own, weights, total, levels)
        else:
            scale = _scale(own, weights, levels, nearest)
        inverse = np.float32(1.0) / scale if scale != 0 else np.float32(0.0)
        for i in range(BLOCK):
            code = nearest_code((own[i] - minimum) * inverse, levels, nearest)
            error = (own[i] - (scale * levels[code] + minimum)) / factor[i, i]
            for later in range(i + 1, BLOCK):
                own[later] -= factor[i, later] * error
            own[i] = error
            codes[row, i] = np.uint8(code)
        scales[row], minimums[row] = scale, minimum
    stride = 4 * rows.shape[1]
    errors, carried = rows.ctypes.data + 4 * first, upper.ctypes.data + stride * first
    for column in range(first + BLOCK, rows.shape[1], BLOCK):
        subtract_product(rows.ctypes.data + 4 * column, errors, carried + 4 * column, stride, len(rows))


@kernel
def nearest_code(value: np.float32, levels: Float32Array, nearest: NDArray[np.uint8]) -> np.int64:
    """The code of the level that is nearest to a value; 0 for NaN. `levels` and `nearest` are those of a `Grid`."""
    if len(nearest) > 0:
        place = np.float32(2.0) * value + np.float32(256.0)
        return np.int64(nearest[np.int64(min(place, np.float32(511.0)))]) if place > 0 else np.int64(0)
    place = np.float32(np.rint(value - levels[0]))
    return np.int64(min(place, np.float32(len(levels) - 1))) if place > 0 else np.int64(0)


@kernel
def _scale(block: Float32Array, weights: Float32Array, levels: Float32Array, nearest: NDArray[np.uint8]) -> np.float32:
    """The scale of a block with least squared error, weighted: those are tried that map the weight of largest
    magnitude to levels of either sign.

    For given codes the best scale is sum(w x q) / sum(w q q), and takes sum(w x q)**2 / sum(w q q) off the error.
    """
    top, best, best_gain = largest(block), np.float32(0.0), np.float32(0.0)
    for tried in range(_TRIES if top != 0 else 0):
        share = np.float32(0.75) + np.float32(0.4 / (_TRIES // 2 - 1)) * np.float32(tried // 2)
        inverse = share * (levels[0] if tried % 2 == 0 else levels[-1]) / top
        cross, square = np.float32(0.0), np.float32(0.0)
        for i in range(BLOCK):
            level = levels[nearest_code(block[i] * inverse, levels, nearest)]
            cross += weights[i] * block[i] * level
            square += weights[i] * level * level
        if square > 0 and cross * cross > best_gain * square:
            best, best_gain = cross / square, cross * cross / square
    return to_fp16(best)


@kernel
def _affine_scale(
    block: Float32Array, weights: Float32Array, total: np.float32, levels: Float32Array
) -> tuple[np.float32, np.float32]:
    """Scale and minimum of a block: ranges somewhat smaller than its own are tried, and both are refitted by weighted
    least squares, twice.

    total : the sum of `weights`
    """
    low, high, mean = block[0], block[0], np.float32(0.0)
    for i in range(BLOCK):
        low, high = min(low, block[i]), max(high, block[i])
        mean += weights[i] * block[i]
    mean /= total
    span, top = high - low, levels[-1]
    best_scale, best_minimum, best_error = span / top, low, np.float32(np.inf)
    for tried in range(len(_SHRUNK) * len(_SHRUNK)):
        below, above = _SHRUNK[tried // len(_SHRUNK)], _SHRUNK[tried % len(_SHRUNK)]
        minimum = low + below * span
        scale = max(span * (np.float32(1.0) - below - above) / top, _LEAST)
        for _ in range(2):
            middle = np.float32(0.0)
            for i in range(BLOCK):
                middle += weights[i] * _affine_level(block[i], scale, minimum, top)
            middle /= total
            cross, square = np.float32(0.0), np.float32(0.0)
            for i in range(BLOCK):
                off = _affine_level(block[i], scale, minimum, top) - middle
                cross += weights[i] * off * (block[i] - mean)
                square += weights[i] * off * off
            if square > 0:
                scale = max(cross / square, _LEAST)
            minimum = mean - scale * middle
        error = np.float32(0.0)
        for i in range(BLOCK):
            miss = block[i] - scale * _affine_level(block[i], scale, minimum, top) - minimum
            error += weights[i] * miss * miss
        if error < best_error:
            best_scale, best_minimum, best_error = scale, minimum, error
    return to_fp16(best_scale), to_fp16(best_minimum)


@kernel
def _affine_level(weight: np.float32, scale: np.float32, minimum: np.float32, top: np.float32) -> np.float32:
    """The level 0, 1, ..., top that is nearest to a weight."""
    return min(max(np.float32(np.rint((weight - minimum) / scale)), np.float32(0.0)), top)
