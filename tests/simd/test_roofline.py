"""The roofline measurement runs with any number of cores and any memory; values are compared with each other only."""

from __future__ import annotations

import numpy as np
import pytest

from ondevice import machine
from ondevice.engines.simd.kernels.contract.entries import CHAINS, VECTORS, dots, read
from ondevice.engines.simd.kernels.contract.instruction_sets import instruction_set
from ondevice.engines.simd.kernels.roofline import NUMBERS
from ondevice.engines.simd.roofline import DISTANCES, Roofline, RooflineMeasurement, readable_bytes


@pytest.mark.parametrize(
    ("threads", "available", "size"),
    [
        (2, 64 << 30, 256 << 20),
        (64, 256 << 30, 2 << 30),
        (4, 700 << 20, 175 << 20),
        (64, 4 << 30, 1 << 30),
        (4, 100 << 20, 64 << 20),
        (1, 0, 64 << 20),
    ],
)
def test_a_quarter_of_the_memory_at_most(threads: int, available: int, size: int) -> None:
    assert readable_bytes(threads, available) == size


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_reading(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    monkeypatch.setattr(machine, "available_bytes", lambda: 0)
    with RooflineMeasurement(threads) as measuring:
        measuring.read()
        measuring.read()
    found = measuring.median()
    assert found.bandwidth > 0
    assert found.peak > 0


def test_the_slower_of_both_decides() -> None:
    roofline = Roofline(bandwidth=100.0, peak=1000.0)
    assert roofline.seconds(200, 1000) == 2.0
    assert roofline.seconds(200, 5000) == 5.0


def test_the_kernels_do_what_is_counted() -> None:
    """The kernels read all of the memory and compute the number of products that the measurement assumes."""
    values = np.arange(128, dtype=np.float32)
    total = np.zeros(1, np.float32)
    for far, near in DISTANCES:
        read(values.ctypes.data, values.nbytes, far, near, total.ctypes.data)
        assert total[0] == values.sum()
    lanes = instruction_set().lanes
    out = np.full((VECTORS, 4 * lanes), 2, np.uint8)
    dots(10, out.ctypes.data)
    words = sum(turn + chain % NUMBERS for turn in range(10) for chain in range(CHAINS))
    assert out[0].view(np.int32).tolist() == [VECTORS * 2 * words] * lanes
