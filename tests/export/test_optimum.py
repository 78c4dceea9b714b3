"""The distribution optimum-ondevice, and that the main one leaves optimum's namespace alone."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.conftest import ROOT, build_wheel
from tests.export.conftest import Pair

SITE = Path(sysconfig.get_path("purelib"))


@pytest.fixture(scope="module")
def runtime(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the wheel of ondevice-runtime is unpacked."""
    return _unpacked(wheel, tmp_path_factory.mktemp("runtime"))


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the wheel of optimum-ondevice is unpacked."""
    wheel = build_wheel(ROOT / "export" / "optimum", tmp_path_factory.mktemp("wheel"))
    return _unpacked(wheel, tmp_path_factory.mktemp("plugin"))


@pytest.fixture(scope="module")
def without_optimum(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All that is installed here but optimum."""
    directory = tmp_path_factory.mktemp("without")
    try:
        for entry in SITE.iterdir():
            if not entry.name.startswith("optimum"):
                (directory / entry.name).symlink_to(entry)
    except OSError:
        pytest.skip("this system does not let everybody make links")
    return directory


def test_its_files_leave_the_namespaces_open(plugin: Path) -> None:
    """An `__init__.py` in one of them would hide the optimum that is installed."""
    files = {path.relative_to(plugin).as_posix() for path in plugin.rglob("*.py")}
    assert files == {
        "optimum/commands/export/ondevice.py",
        "optimum/commands/register/register_ondevice.py",
        "optimum/exporters/ondevice/__init__.py",
        "optimum/exporters/ondevice/__main__.py",
    }


def test_the_main_wheel_is_not_taken_for_optimum(runtime: Path, plugin: Path, without_optimum: Path) -> None:
    code = "from transformers.utils import is_optimum_available; print(is_optimum_available())"
    assert _python("-c", code, path=[runtime, without_optimum]).stdout == "False\n"
    assert _python("-c", code, path=[runtime, plugin, without_optimum]).stdout == "True\n"  # so it would be noticed


@pytest.mark.parametrize(
    "words", [("optimum.commands.optimum_cli", "export", "ondevice"), ("optimum.exporters.ondevice",)]
)
def test_the_command(e2b: Pair, runtime: Path, plugin: Path, tmp_path: Path, words: tuple[str, ...]) -> None:
    path = [plugin, runtime, SITE]
    model, out = e2b.directory / "target", tmp_path / "out"
    done = _python("-m", *words, "-m", str(model), str(out), "--quantize", "int8", path=path)
    assert done.returncode == 0, done.stderr
    assert (out / "bundle.json").is_file()
    failed = _python("-m", *words, "--model", str(tmp_path / "absent"), str(out), path=path)
    assert failed.returncode == 2
    assert failed.stderr.splitlines()[-1].startswith("ondevice: ")
    assert "Traceback" not in failed.stderr


def test_from_python(e2b: Pair, runtime: Path, plugin: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from optimum.exporters.ondevice import main_export; "
        "print(main_export(sys.argv[1], sys.argv[2], drafter='none', quantize='int8'))"
    )
    out = tmp_path / "out"
    done = _python("-c", code, str(e2b.directory / "target"), str(out), path=[plugin, runtime, SITE])
    assert done.stdout == f"{out}\n", done.stderr
    assert (out / "target.onnx").is_file()
    assert not (out / "drafter.onnx").exists()


def _unpacked(wheel: Path, directory: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(directory)
    return directory


def _python(*words: str, path: list[Path]) -> subprocess.CompletedProcess[str]:
    """Run an interpreter that has nothing but the standard library and `path`."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    command = [sys.executable, "-S", *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd="/", check=False)
