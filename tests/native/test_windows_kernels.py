"""The kernels of the Windows wheel, executed under Wine: Linux's bits, for every instruction set that this CPU has.

Wine comes from the distribution (`apt-get install wine64`); without it, these tests say that they skip. The library of
a set takes a minute to build, unless `python -m ondevice.native.shipping --platform windows-x86_64` has built it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ondevice.bundle import Bundle
from ondevice.native import library, shipping
from ondevice.native.features import native_features
from ondevice.native.library import CHOICE, SHIPPED
from ondevice.native.sets import PLATFORMS, SETS, native_platform
from tests.conftest import ROOT
from tests.simd.outputs import digest

NAME = "windows-x86_64"
SETS_HERE = [name for name in PLATFORMS[NAME].sets if SETS[name].needed <= native_features()]

ATTEMPTS = 3
"""Wine may have used an address that a call needs; another process has other addresses."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(native_platform() != "linux-x86_64", reason="Wine runs the kernels on Linux on x86-64"),
    pytest.mark.skipif(shutil.which("wine") is None, reason="there is no wine: apt-get install wine64 wine"),
]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Windows program that loads a library and runs a recorded call."""
    pytest.importorskip("ziglang")
    out = tmp_path_factory.mktemp("replay") / "replay.exe"
    command = [sys.executable, "-m", "ziglang", "cc", "-target", "x86_64-windows-gnu", "-O2", "-o", str(out)]
    subprocess.run([*command, str(Path(__file__).with_name("replay.c"))], check=True)
    return out


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for libraries that have to be built."""
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(scope="module")
def bits_of_linux(reference_bundle: Path) -> str:
    """The digest of this process, which all sets have on Linux: `tests/simd/machines/test_instruction_sets.py`."""
    return digest(Bundle.open(reference_bundle))


@pytest.mark.parametrize("name", SETS_HERE)
def test_a_windows_library_computes_the_bits_of_linux(
    name: str, program: Path, libraries: Path, reference_bundle: Path, bits_of_linux: str, tmp_path: Path
) -> None:
    dll = SHIPPED / NAME / f"{name}.dll"
    if not _is_current(dll):
        dll = shipping.ship(name, NAME, libraries)
    environment = {**os.environ, CHOICE: name, "WINEPREFIX": str(tmp_path / "wine"), "WINEDEBUG": "-all"}
    command = [sys.executable, "-m", "tests.native.windows_run", str(dll), str(program), str(reference_bundle)]
    for _ in range(ATTEMPTS):
        ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if "is taken" not in ended.stderr:
            break
    assert ended.returncode == 0, ended.stderr
    found, calls = ended.stdout.split()
    assert int(calls) > 50
    assert found == bits_of_linux


def _is_current(dll: Path) -> bool:
    """Whether a library was built from the sources that are here."""
    if not dll.is_file():
        return False
    about = dll.with_suffix(".json").read_text("utf-8")
    return all(f'"{stamp}"' in about for stamp in library.sources().values())
