"""Compiled kernels are cached on disk, and recompiled when any source file that they are compiled from has changed.

Numba by itself compares only the file of the kernel, although the compiled code includes the functions it calls.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ondevice

CALL = """
import numpy as np
from ondevice.engines.simd.kernels.matmul.project import softcap
row = np.full(16, 1.0, np.float32)
softcap(row.ctypes.data, 64, 1, np.float32(30.0))
print(float(row[0]), sum(softcap.stats.cache_hits.values()))
"""
"""`project.softcap` calls `vector.tanh`, which is in another file."""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package for tests to edit."""
    source = Path(ondevice.__file__).parent
    return Path(shutil.copytree(source, tmp_path / "copy" / "ondevice", ignore=shutil.ignore_patterns("__pycache__")))


def called(package: Path) -> tuple[float, int]:
    """Call `softcap` of the copy in a new process; returns its result and the number of hits in the kernel cache."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(package.parent),
        "NUMBA_CACHE_DIR": str(package.parent / "cache"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    ended = subprocess.run(
        [sys.executable, "-c", CALL], capture_output=True, text=True, check=True, env=environment, cwd=package.parent
    )
    number, hits = ended.stdout.split()
    return float(number), int(hits)


def test_an_edited_callee_is_compiled_anew(package: Path) -> None:
    before, hits = called(package)
    assert before == pytest.approx(30 * 0.0333210, rel=1e-3)
    assert hits == 0
    assert called(package) == (before, 1)
    callee = package / "engines/simd/kernels/isa/vector.py"
    text = callee.read_text("utf-8")
    old = "return full(_ONE) - full(_TWO)"
    assert text.count(old) == 1
    callee.write_text(text.replace(old, "return full(_TWO) - full(_TWO)"), "utf-8")
    after, hits = called(package)
    assert after == pytest.approx(30 + before, rel=1e-3)
    assert hits == 0
