"""Frozen applications: a package without source files, and the process that builds its kernels."""

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
from ondevice.native import building, library

CALL = """
import ondevice
from ondevice.native import library
from ondevice.generate.drafters.ngram import SuffixAutomaton
automaton = SuffixAutomaton()
automaton.extend([1, 2, 1])
assert ".zip" in ondevice.__file__
print(len(automaton.continuation(1)[0]), library.stamp())
"""

APP = """#!{python}
import sys
sys.frozen, sys.executable = True, __file__
import ondevice
{support}
from ondevice.generate.drafters.ngram import SuffixAutomaton
from ondevice.native.sets import parts_of
from ondevice.preparation import Preparation
shares = []
with Preparation(lambda stage, share: shares.append(share)) as preparing:
    preparing.compile(parts_of("ort"))
    preparing.finish()
automaton = SuffixAutomaton()
automaton.extend([1, 2, 1])
print(len(automaton.continuation(1)[0]), shares == sorted(shares), shares[-1], "numba" in sys.modules)
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


def called(archive: Path, directory: Path, cache: Path) -> tuple[str, str]:
    """The stamp and the messages of a new process, started from a directory."""
    directory.mkdir(exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(archive), "ONDEVICE_CACHE": str(cache), "HOME": str(directory)}
    command = [sys.executable, "-c", CALL]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, cwd=directory)
    length, stamp = ended.stdout.split()
    assert length == "1"
    assert list(directory.iterdir()) == []
    return stamp, ended.stderr


def test_a_frozen_package_builds_once_wherever_it_is_started(sources: Path, tmp_path: Path) -> None:
    archive, cache = frozen(sources, tmp_path / "app.zip"), tmp_path / "cache"
    before, said = called(archive, tmp_path / "one", cache)
    assert "compiling kernels for this CPU (once)" in said
    assert called(archive, tmp_path / "two", cache) == (before, "")

    with (sources / "generate/drafters/ngram.py").open("a", encoding="utf-8") as file:
        file.write("\nEDITED = True\n")
    updated = frozen(sources, tmp_path / "updated.zip")
    after, said = called(updated, tmp_path / "one", cache)
    assert after != before
    assert "compiling kernels for this CPU (once)" in said
    assert called(archive, tmp_path / "two", cache) == (before, ""), "both versions are kept"


def test_a_frozen_package_without_a_cache_writes_nothing(sources: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", "utf-8")
    archive = frozen(sources, tmp_path / "app.zip")
    assert "at every start" in called(archive, tmp_path / "one", tmp_path / "file" / "below")[1]
    assert {path.name for path in tmp_path.iterdir()} == {"file", "sources", "app.zip", "made.pyc", "one"}


@pytest.mark.skipif(os.name != "posix", reason="its executable is a script")
@pytest.mark.parametrize("support", ["ondevice.freeze_support()", ""])
def test_a_frozen_application_builds_in_a_process_that_it_supports(tmp_path: Path, support: str) -> None:
    if library.choice().file is not None:
        pytest.skip("a library is shipped here: nothing is built")
    app = tmp_path / "app"
    app.write_text(APP.format(python=sys.executable, support=support), "utf-8")
    app.chmod(0o755)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "ONDEVICE_CACHE": str(tmp_path / "cache")}
    ended = subprocess.run([app], capture_output=True, text=True, check=False, env=environment)
    if support:
        assert ended.stdout.split() == ["1", "True", "1.0", "False"]
    else:
        assert "it must call ondevice.freeze_support()" in ended.stderr.splitlines()[-1]


def test_what_is_not_frozen_starts_its_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["app", building.FROZEN_COMPILE])
    ondevice.freeze_support()
    assert building._command() == [sys.executable, "-P", "-m", "ondevice.native.builder"]
    monkeypatch.setattr(sys, "executable", "/opt/editor")
    with pytest.raises(ondevice.OndeviceError, match="no Python interpreter"):
        building._command()


def test_freeze_support_imports_no_compiler() -> None:
    """An application calls it first at every start, before it shows anything."""
    code = "from ondevice import freeze_support; freeze_support(); import sys; assert 'numba' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
