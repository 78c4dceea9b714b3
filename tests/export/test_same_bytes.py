"""An export has the same bytes whatever vectors the exporting CPU has, in numpy and in kernels."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ondevice_export import export
from tests.fixtures.tiny_models import save_pair

ROOT = Path(__file__).parents[2]

OTHERS = {
    "numpy": {"NPY_DISABLE_CPU_FEATURES": " ".join(np.show_config(mode="dicts")["SIMD Extensions"].get("found", []))}
}
"""Environments by name: in the first, numpy keeps to what every CPU of this kind has."""

if platform.machine() in ("x86_64", "AMD64"):
    OTHERS |= {f"kernels for {name}": {"ONDEVICE_KERNELS": name} for name in ("generic", "avx2")}


@pytest.fixture(scope="module", params=["e2b", "31b"])
def here(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle that this process exports of a pair, beside its checkpoint."""
    directory = tmp_path_factory.mktemp(request.param)
    save_pair(directory, request.param)
    return export(directory / "target", directory / "here")


@pytest.mark.parametrize("name", OTHERS)
def test_an_export_does_not_depend_on_the_cpu(here: Path, name: str, tmp_path: Path) -> None:
    code = "import sys; from ondevice_export import export; export(sys.argv[1], sys.argv[2])"
    command = [sys.executable, "-c", code, str(here.with_name("target")), str(tmp_path / "there")]
    path = os.pathsep.join([str(ROOT), str(ROOT / "export"), os.environ.get("PYTHONPATH", "")])
    subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path, **OTHERS[name]}, check=True)
    assert contents(tmp_path / "there") == contents(here)


def contents(directory: Path) -> dict[str, int]:
    """A hash of every file, by name: a failure shows which ones differ."""
    return {path.name: hash(path.read_bytes()) for path in directory.iterdir()}
