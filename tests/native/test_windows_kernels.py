"""The kernels of the Windows wheel, executed under Wine: Linux's bits, for every instruction set that this CPU has.

Wine comes from the distribution (`apt-get install wine64`); without it, these tests say that they skip. The library of
a set takes a minute to build, unless `python -m ondevice.native.shipping --platform windows-x86_64` has built it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ondevice.bundle import Bundle
from ondevice.engines.simd.kernels.contract.entries import THREADS, run
from ondevice.engines.simd.kernels.contract.slots import SLOTS
from ondevice.engines.simd.kernels.contract.steps import WIDTH
from ondevice.engines.simd.kernels.isa import memory
from ondevice.native import library, shipping
from ondevice.native.features import native_features
from ondevice.native.library import CHOICE, SHIPPED
from ondevice.native.sets import PLATFORMS, SETS, native_platform
from tests.conftest import ROOT, Once
from tests.simd.outputs import digest

NAME = "windows-x86_64"
SETS_HERE = [name for name in PLATFORMS[NAME].sets if SETS[name].needed <= native_features()]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(native_platform() != "linux-x86_64", reason="Wine runs the kernels on Linux on x86-64"),
    pytest.mark.skipif(shutil.which("wine") is None, reason="there is no wine: apt-get install wine64 wine"),
]


@pytest.fixture(scope="module")
def programs(once: Once) -> Path:
    """A directory with the Windows programs that load a library: `replay.exe` and `barrier.exe`."""
    pytest.importorskip("ziglang")
    # `-s`, as the libraries are linked: zig compiles its C library for Windows, 160 s, for each set of options.
    compiler = [sys.executable, "-m", "ziglang", "cc", "-target", PLATFORMS[NAME].linked_as, "-s", "-O2"]

    def compile_all(out: Path) -> None:
        for name in ("replay", "barrier"):
            source, program = Path(__file__).with_name(f"{name}.c"), out / f"{name}.exe"
            subprocess.run([*compiler, "-o", str(program), str(source)], check=True)

    return once("windows-programs", compile_all)


@pytest.fixture(scope="module")
def library_of(once: Once) -> Callable[[str], Path]:
    """A function: name of a set -> its library, which is built if it is missing."""

    def find(name: str) -> Path:
        dll = SHIPPED / NAME / f"{name}.dll"
        if _is_current(dll):
            return dll
        return once(f"windows-{name}", lambda out: shipping.ship(name, NAME, out)) / NAME / dll.name

    return find


@pytest.fixture(scope="module")
def bits_of_linux(reference_bundle: Path) -> str:
    """The digest of this process, which all sets have on Linux: `tests/simd/machines/test_instruction_sets.py`."""
    return digest(Bundle.open(reference_bundle))


@pytest.mark.parametrize("name", SETS_HERE)
def test_a_windows_library_computes_the_bits_of_linux(
    name: str,
    programs: Path,
    library_of: Callable[[str], Path],
    reference_bundle: Path,
    bits_of_linux: str,
    tmp_path: Path,
) -> None:
    dll = library_of(name)
    environment = {**os.environ, CHOICE: name, "WINEPREFIX": str(tmp_path / "wine"), "WINEDEBUG": "-all"}
    program = programs / "replay.exe"
    command = [sys.executable, "-m", "tests.native.windows_run", str(dll), str(program), str(reference_bundle)]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    found, calls = ended.stdout.split()
    assert int(calls) > 50
    assert found == bits_of_linux


def test_threads_that_sleep_at_the_barrier_are_woken(
    programs: Path, library_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """Ten threads on fewer cores, by `WaitOnAddress`: a test of waking, which ends only if every thread is woken."""
    command = ["wine", str(programs / "barrier.exe"), str(library_of(SETS_HERE[0])), run.symbol]
    command += [str(number) for number in (10, 200, 7, WIDTH, THREADS, SLOTS, memory._FEWEST_SPINS)]
    environment = {**os.environ, "WINEPREFIX": str(tmp_path / "wine"), "WINEDEBUG": "-all"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) > 0


def _is_current(dll: Path) -> bool:
    """Whether a library was built from the sources that are here."""
    if not dll.is_file():
        return False
    about = dll.with_suffix(".json").read_text("utf-8")
    return all(f'"{stamp}"' in about for stamp in library.sources().values())
