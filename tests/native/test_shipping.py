"""Shared libraries as wheels bring them: reproducible, of few needs, and enough for a reply."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ondevice.bundle import Bundle
from ondevice.native import shipping
from ondevice.native.library import CHOICE
from ondevice.native.sets import PLATFORMS, best_set, native_platform
from tests.project.release import library_faults
from tests.simd.outputs import digest

ROOT = Path(__file__).parents[2]

REPLY = """
import sys
import ondevice
from ondevice.bundle import Bundle
from tests.simd.outputs import digest
with ondevice.load(sys.argv[1], threads=1) as model:
    model.generate("def is_prime(n):", max_new_tokens=20, top_k=20, top_p=0.9, seed=1)
print(digest(Bundle.open(sys.argv[1])), *(name for name in ("numba", "llvmlite") if name in sys.modules))
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(native_platform() not in PLATFORMS, reason="no libraries are shipped for this platform"),
]


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("ziglang")
    return shipping.ship(best_set(), native_platform(), tmp_path_factory.mktemp("shipped"))


def test_the_same_sources_give_the_same_bytes(shipped: Path, tmp_path: Path) -> None:
    again = shipping.ship(best_set(), native_platform(), tmp_path)
    assert again.read_bytes() == shipped.read_bytes()
    assert again.with_suffix(".json").read_text("utf-8") == shipped.with_suffix(".json").read_text("utf-8")


def test_a_reply_needs_no_compiler(shipped: Path, reference_bundle: Path) -> None:
    """numba cannot be imported there, and the outputs have the bits of kernels that are built on this machine."""
    expected = digest(Bundle.open(reference_bundle))
    code = f"import sys; sys.modules['numba'] = sys.modules['llvmlite'] = None\n{REPLY}"
    code = code.replace("if name in sys.modules)", "if sys.modules[name])")
    environment = {**os.environ, CHOICE: str(shipped)}
    command = [sys.executable, "-c", code, str(reference_bundle)]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert (ended.stdout.split(), ended.stderr) == ([expected], "")


def test_it_passes_the_checks_of_a_release(shipped: Path) -> None:
    """Such as the functions of the C library that it needs."""
    for package in ("elftools", "pefile", "macholib"):
        pytest.importorskip(package)
    assert [*library_faults(shipped.read_bytes(), native_platform(), PLATFORMS[native_platform()])] == []
