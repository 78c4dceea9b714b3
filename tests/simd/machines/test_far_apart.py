"""Kernels can be loaded at any address: gigabytes that are mapped before and between loads change no output."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from ondevice.bundle import Bundle
from ondevice.native import library
from tests.simd.outputs import digest

ROOT = Path(__file__).parents[3]
RUNS = [(2, 0), (6, 0), *(pytest.param(*run, marks=pytest.mark.slow) for run in product((1, 2, 3, 6), range(1, 13)))]
"""Gigabytes, and seeds of the sizes of mappings."""


@pytest.fixture(scope="module")
def expected(bundles: dict[str, Bundle]) -> str:
    """The outputs in an address space with room."""
    return digest(bundles["e2b"])


@pytest.mark.skipif(sys.platform != "linux", reason="maps memory with Linux's flags")
@pytest.mark.parametrize(("gigabytes", "seed"), RUNS)
def test_outputs_are_the_same_in_a_full_address_space(tiny: Path, expected: str, gigabytes: int, seed: int) -> None:
    if library.choice().file is not None:
        pytest.skip("a shared library is used")
    command = [sys.executable, "-m", "tests.simd.machines.far_apart", str(gigabytes), str(seed), str(tiny)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    found = json.loads(ended.stdout)
    assert found["digest"] == expected
    assert found["loaded"] >= 3
