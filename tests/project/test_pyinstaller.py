"""The desktop example, frozen without its window: the hook that ships with the wheel is all that PyInstaller needs."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from ondevice.native import shipping
from ondevice.native.sets import PLATFORMS, best_set, native_platform
from tests.conftest import ROOT

pytestmark = pytest.mark.slow

ENTRY = ROOT / "examples/desktop/headless.py"
APART = ("onnxruntime", "matplotlib", "torch", "transformers")
"""Packages that are installed for the tests, of which an application has none: `simd` needs no ONNX Runtime."""


def unpack(wheel: Path, directory: Path) -> Path:
    """Install the wheel in a new directory below another one; returns it."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(directory / "site")
    return directory / "site"


def freeze(directory: Path, apart: Sequence[str] = APART) -> Path:
    """The executable that PyInstaller makes where the wheel is unpacked, without the modules `apart`."""
    excluded = [word for name in apart for word in ("--exclude-module", name)]
    places = [f"--{kind}path={directory / kind}" for kind in ("dist", "work", "spec")]
    subprocess.run(
        [sys.executable, "-m", "PyInstaller", "--log-level=ERROR", "--name=app", "--onedir", *excluded, *places, ENTRY],
        check=True,
        env={**os.environ, "PYTHONPATH": str(directory / "site")},
        cwd=directory,
    )
    suffix = ".exe" if os.name == "nt" else ""
    return directory / f"dist/app/app{suffix}"


def kept(cache: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in cache.rglob("*.block")}


def test_the_second_start_builds_nothing_wherever_it_is(wheel: Path, reference_bundle: Path, tmp_path: Path) -> None:
    unpack(wheel, tmp_path)
    app, cache = freeze(tmp_path), tmp_path / "cache"
    before = {path: path.stat().st_mtime_ns for path in app.parent.rglob("*")}
    said, compiled = [], []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        ended = subprocess.run(
            [app, reference_bundle, "def is_prime(n):"],
            capture_output=True,
            text=True,
            check=True,
            env={"ONDEVICE_CACHE": str(cache), "HOME": str(tmp_path / name), "PATH": os.environ["PATH"]},
            cwd=tmp_path / name,
        )
        said.append((ended.stdout, ended.stderr))
        compiled.append(kept(cache))
        assert list((tmp_path / name).iterdir()) == []
    assert said == [(said[0][0], "preparing for this machine: compiling kernels once\n"), (said[0][0], "")]
    assert said[0][0].strip()
    assert {path.stem for path in compiled[0]} == {"packing", "tokens", "forward"}
    assert compiled[1] == compiled[0]
    assert {path: path.stat().st_mtime_ns for path in app.parent.rglob("*")} == before


@pytest.mark.skipif(native_platform() not in PLATFORMS, reason="no libraries are shipped for this platform")
def test_a_library_of_the_wheel_is_carried_and_builds_nothing(
    wheel: Path, reference_bundle: Path, tmp_path: Path
) -> None:
    """The application has no compiler."""
    pytest.importorskip("ziglang")
    libraries = unpack(wheel, tmp_path) / "ondevice/native/libraries"
    file = shipping.ship(best_set(), native_platform(), libraries)
    app, cache = freeze(tmp_path, (*APART, "numba", "llvmlite")), tmp_path / "cache"
    carried = [path for path in app.parent.rglob(file.name) if path.parent.name == native_platform()]
    assert [path.read_bytes() for path in carried] == [file.read_bytes()]
    ended = subprocess.run(
        [app, reference_bundle, "def is_prime(n):"],
        capture_output=True,
        text=True,
        check=True,
        env={"ONDEVICE_CACHE": str(cache), "HOME": str(tmp_path), "PATH": os.environ["PATH"]},
        cwd=tmp_path,
    )
    assert ended.stdout.strip()
    assert ended.stderr == ""
    assert kept(cache) == {}
