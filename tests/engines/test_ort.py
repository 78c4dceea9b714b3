"""ONNX Runtime as a guest in somebody's process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_it_keeps_no_telemetry(tmp_path: Path) -> None:
    """Its packages give the computer an id, in the home, before they send anything; none when CI is set."""
    unset = ("ORT_DISABLE_TELEMETRY", "CI", "XDG_CACHE_HOME")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    code = "import ondevice.engines.ort.engine"
    subprocess.run([sys.executable, "-c", code], env={**environment, "HOME": str(tmp_path)}, check=True)
    assert not list(tmp_path.rglob("*onnxruntime*"))
