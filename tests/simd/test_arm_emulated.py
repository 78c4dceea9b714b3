"""ARM under qemu: the same bits, and the same token ids with every drafter, as on this machine.

The tests run if `tests/simd/arm64.sh` has set up an environment and $ONDEVICE_ARM64 names its directory. They take ten
minutes, mostly to compile kernels. The instruction set is not forced: qemu reports the capabilities of the CPU that it
emulates, and LLVM treats the CPU as `generic`.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ondevice.bundle import Bundle
from tests.simd.generations import replies
from tests.simd.outputs import digest

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.skipif(not os.environ.get("ONDEVICE_ARM64"), reason="tests/simd/arm64.sh has not been run"),
    pytest.mark.parametrize(("cpu", "name"), [("cortex-a76", "neon-dotprod"), ("cortex-a72", "neon")]),
]


def emulated(cpu: str, module: str, *bundles: Path) -> Any:
    """The parsed output of a test module on an emulated ARM CPU: Cortex-A76 (Raspberry Pi 5) or Cortex-A72 (Pi 4)."""
    system = Path(os.environ["ONDEVICE_ARM64"])
    environment = {
        "NUMBA_CACHE_DIR": str(system / "cache"),
        "ONDEVICE_CACHE": str(system / "cache"),
        "PYTHONPATH": os.pathsep.join([str(system / "site"), str(ROOT)]),
    }
    emulator = [str(system / "qemu/usr/bin/qemu-aarch64-static"), "-cpu", cpu, "-L", str(system / "root")]
    command = [*emulator, str(system / "root/usr/bin/python3.11"), "-m", module, *map(str, bundles)]
    return json.loads(subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, check=True).stdout)


def test_a_forward_has_the_same_bits(tiny: Path, trained: Path, cpu: str, name: str) -> None:
    digests = [digest(Bundle.open(path)) for path in (tiny, trained)]
    assert emulated(cpu, "tests.simd.outputs", tiny, trained) == {"name": name, "digests": digests}


def test_every_drafter_generates_the_same_token_ids(tiny: Path, cpu: str, name: str) -> None:
    assert emulated(cpu, "tests.simd.generations", tiny) == replies(tiny)
