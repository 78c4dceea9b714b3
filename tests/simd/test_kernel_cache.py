"""Compiled kernels are kept on disk, and are never older than any source that went into them.

Numba asks only whether the file of the kernel itself has changed; a kernel has the code of those that it calls in it.
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
from ondevice.engines.simd.kernels.project import softcap
row = np.full(16, 1.0, np.float32)
softcap(row.ctypes.data, 64, 1, np.float32(30.0))
print(float(row[0]), sum(softcap.stats.cache_hits.values()))
"""
"""`project.softcap` calls `functions.tanh`, which lies in another file."""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package that a test may edit."""
    source = Path(ondevice.__file__).parent
    return Path(shutil.copytree(source, tmp_path / "copy" / "ondevice", ignore=shutil.ignore_patterns("__pycache__")))


def called(package: Path) -> tuple[float, int]:
    """What a new process computes with that copy, and how many kernels of one it took from the disk."""
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
    callee = package / "engines/simd/kernels/functions.py"
    text = callee.read_text("utf-8")
    old = "return full(_ONE) - full(_TWO)"
    assert text.count(old) == 1
    callee.write_text(text.replace(old, "return full(_TWO) - full(_TWO)"), "utf-8")
    after, hits = called(package)
    assert after == pytest.approx(30 + before, rel=1e-3)
    assert hits == 0
