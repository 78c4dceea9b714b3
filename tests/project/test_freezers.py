"""The desktop example, frozen without its window by PyInstaller and by cx_Freeze, from the wheel."""

from __future__ import annotations

import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.memory.frozen import COMPILER, FREEZERS, Freezer, start
from ondevice.native import shipping
from ondevice.native.sets import PLATFORMS, best_set, native_platform

pytestmark = pytest.mark.slow

APART = ("onnxruntime", "matplotlib", "torch", "transformers", "PySide6", "av", "PIL", "soundfile", "llguidance")
"""Packages that are installed for the tests, of which an application has none: `simd` needs no ONNX Runtime."""


@pytest.fixture(params=FREEZERS)
def freeze(request: pytest.FixtureRequest) -> Freezer:
    """A freezer that is installed."""
    if find_spec(request.param) is None:
        pytest.skip(f"there is no {request.param}")
    return FREEZERS[request.param]


def unpack(wheel: Path, directory: Path) -> Path:
    """Install the wheel in a new directory below another one; returns it."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(directory / "site")
    return directory / "site"


def dates(directory: Path, pattern: str = "*") -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in directory.rglob(pattern)}


def test_the_second_start_builds_nothing_wherever_it_is(
    freeze: Freezer, wheel: Path, reference_bundle: Path, tmp_path: Path
) -> None:
    app = freeze(tmp_path, APART, [unpack(wheel, tmp_path)])
    before = dates(app.parent)
    said, compiled = [], []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        ended = start(app, reference_bundle, tmp_path / name, tmp_path / "cache")
        assert ended.returncode == 0, ended.stderr
        said.append((ended.stdout, ended.stderr))
        compiled.append(dates(tmp_path / "cache", "*.block"))
        assert list((tmp_path / name).iterdir()) == []
    assert said == [(said[0][0], "preparing for this machine: compiling kernels once\n"), (said[0][0], "")]
    assert said[0][0].strip()
    assert {path.stem for path in compiled[0]} == {"packing", "tokens", "forward"}
    assert compiled[1] == compiled[0]
    assert dates(app.parent) == before


@pytest.mark.skipif(native_platform() not in PLATFORMS, reason="no libraries are shipped for this platform")
def test_a_library_of_the_wheel_is_carried_and_builds_nothing(
    freeze: Freezer, wheel: Path, reference_bundle: Path, tmp_path: Path
) -> None:
    """The application has no compiler."""
    pytest.importorskip("ziglang")
    site = unpack(wheel, tmp_path)
    file = shipping.ship(best_set(), native_platform(), site / "ondevice/native/libraries")
    app = freeze(tmp_path, (*APART, *COMPILER), [site])
    carried = [path for path in app.parent.rglob(file.name) if path.parent.name == native_platform()]
    assert [path.read_bytes() for path in carried] == [file.read_bytes()]
    ended = start(app, reference_bundle, tmp_path, tmp_path / "cache")
    assert ended.stdout.strip()
    assert (ended.returncode, ended.stderr) == (0, "")
    assert dates(tmp_path / "cache", "*.block") == {}
