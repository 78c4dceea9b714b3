"""ONNX Runtime inside an application's process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_it_keeps_no_telemetry(tmp_path: Path) -> None:
    """ONNX Runtime's packages store an id of the computer in the home directory before they send telemetry.

    They store none where the variable CI is set.
    """
    unset = ("ORT_DISABLE_TELEMETRY", "CI", "XDG_CACHE_HOME")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    code = "import ondevice.engines.ort"
    subprocess.run([sys.executable, "-c", code], env={**environment, "HOME": str(tmp_path)}, check=True)
    assert not list(tmp_path.rglob("*onnxruntime*"))
