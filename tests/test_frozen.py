"""Compiled code of a package that has no source files, as in an application that was frozen."""

from __future__ import annotations

import os
import py_compile
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import ondevice

CALL = """
import sys
import numpy as np
import ondevice
from ondevice.drafters import suffix_automaton
from ondevice.engines.simd.kernels.project import softcap
row = np.full(16, 1.0, np.float32)
softcap(row.ctypes.data, 64, 1, np.float32(30.0))
suffix_automaton.warm_up()
stats = softcap.stats, suffix_automaton.append_all.stats
assert ".zip" in ondevice.__file__
print(float(row[0]), *(sum(each.cache_hits.values()) for each in stats))
"""


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A copy of the package that a test may edit."""
    source = Path(ondevice.__file__).parent
    return Path(shutil.copytree(source, tmp_path / "sources/ondevice", ignore=shutil.ignore_patterns("__pycache__")))


def frozen(sources: Path, path: Path) -> Path:
    """An archive of bytecode, whose file names lead nowhere, as a frozen application has it."""
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(sources.rglob("*.py")):
            name = file.relative_to(sources.parent).as_posix()
            made = py_compile.compile(str(file), str(path.parent / "made.pyc"), dfile=name, doraise=True)
            assert made is not None
            archive.write(made, f"{name}c")
    return path


def called(archive: Path, directory: Path, cache: Path) -> tuple[float, int, int]:
    """What a new process computes, started from a directory, and how many functions of two it took from the disk."""
    directory.mkdir(exist_ok=True)
    environment = {
        **{name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"},
        "PYTHONPATH": str(archive),
        "ONDEVICE_CACHE": str(cache),
        "HOME": str(directory),
    }
    command = [sys.executable, "-c", CALL]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, cwd=directory)
    number, *hits = ended.stdout.split()
    assert list(directory.iterdir()) == []
    return float(number), int(hits[0]), int(hits[1])


def test_a_frozen_package_compiles_once_wherever_it_is_started(sources: Path, tmp_path: Path) -> None:
    archive, cache = frozen(sources, tmp_path / "app.zip"), tmp_path / "cache"
    before, *hits = called(archive, tmp_path / "one", cache)
    assert hits == [0, 0]
    assert called(archive, tmp_path / "two", cache) == (before, 1, 1)

    callee = sources / "engines/simd/kernels/functions.py"
    text, old = callee.read_text("utf-8"), "return full(_ONE) - full(_TWO)"
    assert text.count(old) == 1
    callee.write_text(text.replace(old, "return full(_TWO) - full(_TWO)"), "utf-8")
    updated = frozen(sources, tmp_path / "updated.zip")
    after, *hits = called(updated, tmp_path / "one", cache)
    assert after == pytest.approx(30 + before, rel=1e-3)
    assert hits == [0, 1]
    assert called(archive, tmp_path / "two", cache) == (before, 1, 1), "both versions are kept"


def test_a_frozen_package_without_a_cache_writes_nothing(sources: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", "utf-8")
    archive = frozen(sources, tmp_path / "app.zip")
    for _ in range(2):
        assert called(archive, tmp_path / "one", tmp_path / "file" / "below")[1:] == (0, 0)
    assert {path.name for path in tmp_path.iterdir()} == {"file", "sources", "app.zip", "made.pyc", "one"}
