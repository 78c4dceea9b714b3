"""What numpy computes for a bundle has the same bytes whatever vectors the exporting CPU has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ondevice_export import export
from tests.tiny_models import save_drafter, save_target

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("family", ["e2b", "31b"])
def test_an_export_does_not_depend_on_numpy_s_vectors(family: str, tmp_path: Path) -> None:
    save_target(tmp_path / "target", family)
    save_drafter(tmp_path / "drafter", family)
    here = export(tmp_path / "target", tmp_path / "here")
    plain = tmp_path / "plain"
    code = "import sys; from ondevice_export import export; export(sys.argv[1], sys.argv[2])"
    command = [sys.executable, "-c", code, str(tmp_path / "target"), str(plain)]
    subprocess.run(command, cwd=ROOT, env=oldest_cpu(), check=True)
    names = sorted(path.name for path in here.iterdir())
    assert names == sorted(path.name for path in plain.iterdir())
    differing = [name for name in names if (here / name).read_bytes() != (plain / name).read_bytes()]
    assert not differing


def oldest_cpu() -> dict[str, str]:
    """An environment in which numpy keeps to what every CPU of this kind has."""
    found = np.show_config(mode="dicts")["SIMD Extensions"].get("found", [])
    path = os.pathsep.join([str(ROOT), str(ROOT / "export"), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "NPY_DISABLE_CPU_FEATURES": " ".join(found), "PYTHONPATH": path}
