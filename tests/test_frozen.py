"""Frozen applications: compiled code of a package without source files, and the processes that compile it."""

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
from ondevice import preparation

CALL = """
import sys
import numpy as np
import ondevice
from ondevice.engines.simd.kernels.matmul.project import softcap
from ondevice.generate.drafters import ngram
row = np.full(16, 1.0, np.float32)
softcap(row.ctypes.data, 64, 1, np.float32(30.0))
ngram.warm_up()
stats = softcap.stats, ngram.append_all.stats
assert ".zip" in ondevice.__file__
print(float(row[0]), *(sum(each.cache_hits.values()) for each in stats))
"""

APP = """#!{python}
import sys
sys.frozen, sys.executable = True, __file__
import ondevice
{support}
from ondevice import jit, machine
from ondevice.preparation import TOKENS, Preparation
machine.processors = lambda: 2
compiled, shares = [], []
with jit.counting(lambda: compiled.append(1)), Preparation(lambda stage, share: shares.append(share)) as preparing:
    preparing.compile(TOKENS)
    print(len(preparing._processes))
    preparing.finish()
print(len(compiled), shares == sorted(shares), shares[-1])
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

    callee = sources / "engines/simd/kernels/isa/vector.py"
    text, old = callee.read_text("utf-8"), "return full(_ONE) - full(_TWO) /"
    assert text.count(old) == 1
    callee.write_text(text.replace(old, "return full(_TWO) - full(_TWO) /"), "utf-8")
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


@pytest.mark.skipif(os.name != "posix", reason="its executable is a script")
@pytest.mark.parametrize(("support", "processes"), [("ondevice.freeze_support()", 1), ("", 0)])
def test_a_frozen_application_compiles_in_processes_that_it_supports(
    tmp_path: Path, support: str, processes: int
) -> None:
    app = tmp_path / "app"
    app.write_text(APP.format(python=sys.executable, support=support), "utf-8")
    app.chmod(0o755)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "ONDEVICE_CACHE": str(tmp_path / "cache")}
    environment.pop("NUMBA_CACHE_DIR", None)
    ended = subprocess.run([app], capture_output=True, text=True, check=True, env=environment)
    started, compiled, *shares = ended.stdout.split()
    assert int(started) == processes
    assert (int(compiled) == 0) == bool(processes)
    assert shares == ["True", "1.0"]


def test_what_is_not_frozen_starts_its_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["app", preparation.FROZEN_COMPILE])
    ondevice.freeze_support()
    assert not preparation.is_supported()
    assert preparation._compile_command() == [sys.executable, "-m", "ondevice.preparation"]
    monkeypatch.setattr(sys, "executable", "/opt/editor")
    assert preparation._compile_command() is None


def test_freeze_support_imports_no_compiler() -> None:
    """An application calls it first at every start, before it shows anything."""
    code = "from ondevice import freeze_support; freeze_support(); import sys; assert 'numba' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
