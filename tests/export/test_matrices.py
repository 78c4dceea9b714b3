"""Matrices that a checkpoint has in blocks already: stored unchanged, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ondevice.bundle_format.weight_format import IN_GROUPS, INT4_AFFINE, WeightFormat
from ondevice.errors import CheckpointError
from ondevice_export.data_file import DataFile, Region
from ondevice_export.matrices import MatrixWriter, StoredMatrix

ROWS, WIDTH = 70, 96


def stored(
    path: Path, form: WeightFormat, codes: npt.NDArray[np.uint8], *factors: npt.NDArray[Any] | None, half: bool = False
) -> StoredMatrix:
    """Write a matrix to a data file."""
    with DataFile(path) as file, MatrixWriter(lambda count: None) as writer:
        file.reserve(1)
        scales, minimums = factors
        assert scales is not None
        return writer.add_blocks(
            file,
            "w",
            (ROWS, WIDTH),
            form,
            lambda start, stop: (
                codes[start:stop],
                scales[start:stop],
                None if minimums is None else minimums[start:stop],
            ),
            half_scales=half,
        )


def bytes_of(path: Path, region: Region | None) -> npt.NDArray[np.uint8]:
    assert region is not None
    return np.fromfile(path, np.uint8, region.nbytes, offset=region.offset)


@pytest.mark.parametrize("half", [False, True], ids=["float32", "fp16"])
@pytest.mark.parametrize("form", IN_GROUPS, ids=lambda form: form.name)
def test_blocks_are_stored_unchanged(tmp_path: Path, form: WeightFormat, half: bool) -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 1 << form.bits, (ROWS, WIDTH), dtype=np.uint8)
    scales, minimums = (rng.standard_normal((ROWS, WIDTH // 32)).astype(np.float16) for _ in range(2))
    path = tmp_path / "data"
    matrix = stored(path, form, codes, scales, minimums if form.affine else None, half=half)
    packed = bytes_of(path, matrix.data).reshape(ROWS, -1)
    np.testing.assert_array_equal(form.unpack(packed), codes)
    dtype = np.float16 if half else np.float32
    np.testing.assert_array_equal(bytes_of(path, matrix.scales).view(dtype), scales.reshape(-1))
    if form.affine:
        np.testing.assert_array_equal(bytes_of(path, matrix.minimums).view(dtype), minimums.reshape(-1))
    tensor = matrix.tensor((ROWS, WIDTH))
    assert tensor.weight_format == form
    assert (tensor.minimums is not None) == form.affine


def test_products_of_scales_are_rounded_to_fp16(tmp_path: Path) -> None:
    """As those of Q4_K: a scale of 11 bits times a whole number of 6."""
    factors = np.outer(np.linspace(0.001, 0.01, ROWS).astype(np.float16), [63, 17, 1]).astype(np.float32)
    codes = np.zeros((ROWS, WIDTH), np.uint8)
    matrix = stored(tmp_path / "data", INT4_AFFINE, codes, factors, -factors)
    for region, exact in ((matrix.scales, factors), (matrix.minimums, -factors)):
        found = bytes_of(tmp_path / "data", region).view(np.float32).reshape(factors.shape)
        np.testing.assert_array_equal(found, exact.astype(np.float16).astype(np.float32))
        np.testing.assert_allclose(found, exact, rtol=2.0**-11)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 7e4])
@pytest.mark.parametrize("place", [0, 1], ids=["scales", "minimums"])
def test_factors_that_are_not_finite_in_fp16_are_refused(tmp_path: Path, place: int, bad: float) -> None:
    factors = [np.ones((ROWS, WIDTH // 32), np.float32) for _ in range(2)]
    factors[place][3, 1] = bad
    with pytest.raises(CheckpointError, match="w has scales or minimums that are NaN, infinite or beyond fp16"):
        stored(tmp_path / "data", INT4_AFFINE, np.zeros((ROWS, WIDTH), np.uint8), *factors)
