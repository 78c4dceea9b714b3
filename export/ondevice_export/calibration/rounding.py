"""Rounding of a matrix that knows the second moments H of its inputs: least error of its outputs, not of its weights.

For inputs x and the error e of a row of weights, the squared error of the output is e^T H e, summed over the tokens
from which H was taken. Three steps reduce it. Columns that multiply large inputs are made larger, and their inputs
smaller, so that they are rounded finer among the weights with which they share a scale (AWQ, Lin et al. 2023). The
scale of each block of 32 is searched for, with errors weighted by what the later columns cannot make up for. And the
columns are rounded one after the other, each with the errors of those before it carried to the columns that are left
(GPTQ, Frantar et al. 2022): with R upper triangular and H^-1 = R^T R, the error e_j of column j changes column k by
-e_j R_jk / R_jj.

A `Grid` says which weights a block can hold, so that one search and one feedback serve all formats. Rows are
independent of each other, so that a matrix is rounded in chunks of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ondevice.arrays import Float32Array, Float64Array
from ondevice.bundle_format.weight_format import WeightFormat
from ondevice_export.calibration.round_block import round_block
from ondevice_export.quantize import BLOCK, NEAREST


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

STRIP = 256
"""Rows of a block of moments that are multiplied together, so that little is computed twice."""

RESCALING = 0.25
"""Power of the inputs' magnitudes in `column_factors`. KL divergences of int4-table with 0, 0.25 and 0.4: SmolLM2-135M
0.0571, 0.0503 and 0.0497. Gemma 3 270M 0.0543 with 0 and 0.0506 with 0.25; rounded to F16 before, 0.0487 with 0.25 and
0.0488 with 0.4. Scaled between the up and the down projection too, SmolLM2 has 0.0511."""

DAMPING = 0.01
"""Share of the mean of H's diagonal that is added to it, so that inputs that the text never uses keep their weights."""


@dataclass(frozen=True)
class Moments:
    """Sums of x x^T over the inputs x of a matrix: square blocks along the diagonal, float32[n, n].

    Below the diagonal, a block lacks the products that its upper triangle has: `symmetric` has both.
    """

    blocks: tuple[NDArray[np.float32], ...]

    @classmethod
    def zeros(cls, width: int) -> Moments:
        """No tokens yet. The blocks are whole blocks of 32 inputs and of one size, or of two that differ by 32."""
        parts, count = -(-width // MAX_TOGETHER), width // BLOCK
        bounds = [BLOCK * (count * part // parts) for part in range(parts + 1)]
        return cls(tuple(np.zeros((stop - start, stop - start), np.float32) for start, stop in pairwise(bounds)))

    def add(self, inputs: NDArray[np.float32]) -> None:
        """Add the inputs [T, width] of some tokens."""
        start = 0
        for block in self.blocks:
            part = inputs[:, start : start + len(block)]
            for first in range(0, len(block), STRIP):
                strip = slice(first, first + STRIP)
                block[strip, first:] += part[:, strip].T @ part[:, first:]
            start += len(block)

    def divided(self, factors: Float32Array) -> Moments:
        """The moments of the inputs divided by factors, float32[width]."""
        bounds = np.cumsum([len(block) for block in self.blocks])[:-1]
        parts = np.split(factors, bounds)
        return Moments(tuple(block / np.outer(part, part) for block, part in zip(self.blocks, parts, strict=True)))


def symmetric(block: NDArray[np.float32]) -> NDArray[np.float32]:
    """A block of moments with its lower triangle."""
    return np.triu(block) + np.triu(block, 1).T


class Grid(NamedTuple):
    """The weights that a block of 32 can hold: scale * levels[code], plus a minimum in an affine format."""

    levels: Float32Array
    """float32[codes], ascending: numbers one apart, or those of a table. With a minimum, from 0 on."""
    nearest: NDArray[np.uint8]
    """For a table `quantize.NEAREST`, else empty."""
    affine: bool

    @classmethod
    def of(cls, form: WeightFormat) -> Grid:
        """The grid of a weight format in blocks of 32."""
        return cls(form.levels, NEAREST if form.table else NEAREST[:0], form.affine)


def column_factors(moments: Moments) -> Float32Array:
    """Factors for the columns of matrices that multiply the same inputs, float32[width], with a geometric mean of 1.

    They are the root mean squares of the inputs to the power `RESCALING`. AWQ searches for a power for each input.
    """
    squares = np.concatenate([np.diagonal(block) for block in moments.blocks]).astype(np.float64)
    squares += max(DAMPING * float(squares.mean()), 1e-30)
    logarithms: Float64Array = RESCALING / 2 * np.log(squares)
    return np.asarray(np.exp(logarithms - logarithms.mean()), np.float32)


def feedback(moments: Moments, damping: float = DAMPING) -> Factors:
    """The upper triangular R with (H + d I)^-1 = R^T R of every block H of moments, d being `damping` times the mean of
    its diagonal.

    With rows and columns reversed, the Cholesky factor of H is upper triangular: H = U U^T, and R is its inverse.
    Columns with the largest inputs come first, in whole blocks of 32, while many are left that their errors can be
    carried to: 2 to 8 % less error than from left to right (matrices of SmolLM2-135M).
    """
    factors = []
    for block in map(symmetric, moments.blocks):
        order = np.argsort(-np.diagonal(block).reshape(-1, BLOCK).sum(1), kind="stable")
        columns = (BLOCK * order[:, None] + np.arange(BLOCK)).reshape(-1)
        matrix = block[np.ix_(columns, columns)].astype(np.float64)
        diagonal = np.einsum("ii->i", matrix)
        unused = diagonal == 0
        diagonal += max(damping * float(diagonal.mean()), 1e-30)
        diagonal[unused] += 1
        upper = np.linalg.cholesky(matrix[::-1, ::-1])[::-1, ::-1]
        factors.append(Factor(np.ascontiguousarray(_inverse(upper).astype(np.float32)), order))
    return factors


def _inverse(upper: Float64Array) -> Float64Array:
    """The inverse of an upper triangular matrix, by halves: a third of the multiplications of `numpy.linalg.inv`."""
    half = len(upper) // 2
    if half < STRIP:
        return np.asarray(np.linalg.inv(upper), np.float64)
    out = np.zeros_like(upper)
    out[:half, :half], out[half:, half:] = _inverse(upper[:half, :half]), _inverse(upper[half:, half:])
    out[:half, half:] = -out[:half, :half] @ (upper[:half, half:] @ out[half:, half:])
    return out


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
    found, scratch = np.empty((rows, BLOCK), np.uint8), np.empty(BLOCK, np.float32)
    scale, minimum = np.empty(rows, np.float32), np.empty(rows, np.float32)
    begin = 0
    for upper, order in factors:
        blocks = weights[:, begin : begin + len(upper)].reshape(rows, -1, BLOCK)[:, order].reshape(rows, -1)
        for place, number in enumerate(order + begin // BLOCK):
            round_block(blocks, BLOCK * place, upper, *grid, scratch, found, scale, minimum)
            codes[:, BLOCK * number : BLOCK * (number + 1)] = found
            scales[:, number], minimums[:, number] = scale, minimum
        begin += len(upper)
    return codes, scales, minimums if grid.affine else None
