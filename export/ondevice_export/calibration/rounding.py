"""Rounding of a matrix that knows the second moments H of its inputs: least error of its outputs, not of its weights.

For inputs x and the error e of a row of weights, the squared error of the output is e^T H e, summed over the tokens
from which H was taken. Two steps reduce it. The scale of each block of 32 is searched for, with errors weighted by what
the later columns cannot make up for. And the columns are rounded one after the other, each with the errors of those
before it carried to the columns that are left (GPTQ, Frantar et al. 2022): with R upper triangular and H^-1 = R^T R,
the error e_j of column j changes column k by -e_j R_jk / R_jj.

A `Grid` says which weights a block can hold, so that one search and one feedback serve all formats. Rows are
independent of each other, so that a matrix is rounded in chunks of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ondevice.arrays import Float32Array
from ondevice.bundle_format.weight_format import WeightFormat
from ondevice_export.quantize import BLOCK


class Factor(NamedTuple):
    """One of the blocks of `Moments`, factorised for `feedback`."""

    upper: Float32Array
    """R, upper triangular, float32[n, n], its columns in the order in which they are rounded."""
    order: NDArray[np.int64]
    """The block of 32 columns that is rounded first, second, ..., counted from the first one of these moments."""


Factors = list[Factor]
"""One for each of the blocks of `Moments`."""

MAX_TOGETHER = 2048
"""Inputs of a matrix whose moments are taken together at most: those of more inputs are blocks along the diagonal. The
12,288 inputs of E2B's wide layers would need 604 MB and six times the arithmetic."""

DAMPING = 0.01
"""Share of the mean of H's diagonal that is added to it, so that inputs that the text never uses keep their weights."""

_TRIES = 24
"""Scales that are tried for a block."""


@dataclass(frozen=True)
class Moments:
    """Sums of x x^T over the inputs x of a matrix: square blocks along the diagonal, float32[n, n]."""

    blocks: tuple[NDArray[np.float32], ...]

    @classmethod
    def zeros(cls, width: int) -> Moments:
        parts = -(-width // MAX_TOGETHER)
        sizes = [width // parts] * parts
        assert sum(sizes) == width
        return cls(tuple(np.zeros((size, size), np.float32) for size in sizes))

    def add(self, inputs: NDArray[np.float32]) -> None:
        """Add the inputs [T, width] of some tokens."""
        start = 0
        for block in self.blocks:
            part = inputs[:, start : start + len(block)]
            np.add(block, part.T @ part, out=block)
            start += len(block)


@dataclass(frozen=True)
class Grid:
    """The weights that a block of 32 can hold: scale * levels[code], plus a minimum in an affine format.

    Attributes:
        levels: float32[codes], ascending. With a minimum, counted from 0.
        affine: whether each block has a minimum.
    """

    levels: Float32Array
    affine: bool = False

    def codes(self, values: Float32Array) -> NDArray[np.uint8]:
        """The codes of the levels that are nearest to some values."""
        steps = np.diff(self.levels)
        if (steps == steps[0]).all():
            places = np.rint((values - self.levels[0]) / steps[0])
            codes: NDArray[np.uint8] = np.clip(places, 0, len(self.levels) - 1, out=places).astype(np.uint8)
            return codes
        return np.searchsorted((self.levels[1:] + self.levels[:-1]) / 2, values).astype(np.uint8)

    @classmethod
    def of(cls, form: WeightFormat) -> Grid:
        """The grid of a weight format in blocks of 32."""
        return cls(np.arange(1 << form.bits, dtype=np.float32) - form.zero, form.affine)


def feedback(moments: Moments) -> Factors:
    """The upper triangular R with (H + damping)^-1 = R^T R of every block of moments.

    With rows and columns reversed, the Cholesky factor of H is upper triangular: H = U U^T, and R is its inverse.
    Columns with the largest inputs come first, in whole blocks of 32, while many are left that their errors can be
    carried to: 2 to 8 % less error than from left to right (matrices of SmolLM2-135M).
    """
    factors = []
    for block in moments.blocks:
        order = np.argsort(-np.diagonal(block).reshape(-1, BLOCK).sum(1), kind="stable")
        columns = (BLOCK * order[:, None] + np.arange(BLOCK)).reshape(-1)
        matrix = block[np.ix_(columns, columns)].astype(np.float64)
        diagonal = np.einsum("ii->i", matrix)
        unused = diagonal == 0
        diagonal += max(DAMPING * float(diagonal.mean()), 1e-30)
        diagonal[unused] += 1
        upper = np.linalg.cholesky(matrix[::-1, ::-1])[::-1, ::-1]
        factors.append(Factor(np.ascontiguousarray(np.linalg.inv(upper).astype(np.float32)), order))
    return factors


def round_rows(
    weights: Float32Array, grid: Grid, factors: Factors
) -> tuple[NDArray[np.uint8], Float32Array, Float32Array | None]:
    """Round rows of a matrix.

    Args:
        weights: float32[rows, width].
        grid: the weights that a block can hold.
        factors: of `feedback`, for the matrix's inputs.

    Returns:
        Codes uint8[rows, width], scales and minimums float32[rows, width / 32], both exact in fp16.
    """
    rows, width = weights.shape
    codes = np.empty((rows, width), np.uint8)
    scales = np.empty((rows, width // BLOCK), np.float32)
    minimums = np.zeros_like(scales)
    begin = 0
    for upper, order in factors:
        blocks = weights[:, begin : begin + len(upper)].reshape(rows, -1, BLOCK)[:, order].reshape(rows, -1)
        for place, number in enumerate(order + begin // BLOCK):
            own, later = slice(BLOCK * place, BLOCK * (place + 1)), slice(BLOCK * (place + 1), None)
            scale, minimum = search(blocks[:, own], grid, np.diagonal(upper)[own] ** np.float32(-2))
            columns = slice(BLOCK * number, BLOCK * (number + 1))
            codes[:, columns], errors = _carried(blocks[:, own], grid, scale, minimum, upper[own, own])
            blocks[:, later] -= errors @ upper[own, later]
            scales[:, number], minimums[:, number] = scale, minimum
        begin += len(upper)
    return codes, scales, minimums if grid.affine else None


def _carried(
    block: Float32Array, grid: Grid, scale: Float32Array, minimum: Float32Array, factor: Float32Array
) -> tuple[NDArray[np.uint8], Float32Array]:
    """Round a block [rows, 32] column by column: codes, and errors over the factor's diagonal, for later blocks."""
    columns = np.array(block.T, order="C")
    codes, errors = np.empty(columns.shape, np.uint8), np.empty_like(columns)
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)
    for index, column in enumerate(columns):
        codes[index] = grid.codes((column - minimum) * inverse)
        errors[index] = (column - (scale * grid.levels[codes[index]] + minimum)) / factor[index, index]
        columns[index + 1 :] -= factor[index, index + 1 :, None] * errors[index]
    return codes.T, errors.T


def search(block: Float32Array, grid: Grid, weights: Float32Array) -> tuple[Float32Array, Float32Array]:
    """Scales and minimums of blocks [rows, 32] with least squared error, weighted by `weights` [32]."""
    return _search_affine(block, grid, weights) if grid.affine else _search(block, grid, weights)


def _search(block: Float32Array, grid: Grid, weights: Float32Array) -> tuple[Float32Array, Float32Array]:
    """Try scales that map the weight of largest magnitude to levels of either sign; refit each by least squares.

    For given codes the best scale is sum(w x q) / sum(w q q), and takes sum(w x q)**2 / sum(w q q) off the error.
    """
    rows = len(block)
    peak = np.take_along_axis(block, np.abs(block).argmax(1)[:, None], 1)[:, 0]
    low, high = float(grid.levels[0]), float(grid.levels[-1])
    weighted = block * weights
    best, best_gain = np.zeros(rows, np.float32), np.zeros(rows, np.float32)
    for share in np.linspace(0.75, 1.15, _TRIES // 2, dtype=np.float32):
        for level in (low, high):
            inverse = np.divide(share * np.float32(level), peak, out=np.zeros_like(peak), where=peak != 0)
            found = grid.levels[grid.codes(block * inverse[:, None])]
            cross = np.einsum("rc,rc->r", weighted, found)
            square = np.einsum("rc,rc,c->r", found, found, weights)
            gain = np.divide(cross * cross, square, out=np.zeros_like(cross), where=square > 0)
            better = gain > best_gain
            best_gain[better] = gain[better]
            best[better] = (cross / np.where(square > 0, square, 1))[better]
    return _to_fp16(best), np.zeros(rows, np.float32)


def _search_affine(block: Float32Array, grid: Grid, weights: Float32Array) -> tuple[Float32Array, Float32Array]:
    """Try ranges somewhat smaller than a block's; refit scale and minimum of each by weighted least squares, twice."""
    low, high = block.min(1), block.max(1)
    top, total = grid.levels[-1], float(weights.sum())
    best = np.where(high > low, (high - low) / top, 0), low.copy()
    best_error = np.full(len(block), np.inf, np.float32)
    mean = block @ weights / total
    centred = block - mean[:, None]
    for shrink_low in (0.0, 0.04, 0.08, 0.14):
        for shrink_high in (0.0, 0.04, 0.08, 0.14):
            span = high - low
            minimum = low + np.float32(shrink_low) * span
            scale = np.maximum(span * np.float32(1 - shrink_low - shrink_high) / top, 1e-30)
            for _ in range(2):
                found = grid.levels[grid.codes((block - minimum[:, None]) / scale[:, None])]
                middle = found @ weights / total
                off = found - middle[:, None]
                square = np.einsum("rc,rc,c->r", off, off, weights)
                cross = np.einsum("rc,rc,c->r", off, centred, weights)
                scale = np.maximum(np.divide(cross, square, out=scale.copy(), where=square > 0), 1e-30)
                minimum = mean - scale * middle
            codes = grid.codes((block - minimum[:, None]) / scale[:, None])
            miss = block - scale[:, None] * grid.levels[codes] - minimum[:, None]
            error = np.einsum("rc,rc,c->r", miss, miss, weights)
            better = error < best_error
            best_error[better] = error[better]
            for kept, tried in zip(best, (scale, minimum), strict=True):
                kept[better] = tried[better]
    return _to_fp16(best[0]), _to_fp16(best[1])


def _to_fp16(values: NDArray[np.floating]) -> Float32Array:
    rounded: Float32Array = np.clip(values, -65504, 65504).astype(np.float16).astype(np.float32)
    return rounded
