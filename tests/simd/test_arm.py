"""Detection of ARM boards and the code compiled for them; it is cross-compiled, so no ARM machine is needed.

The tests do not force an instruction set: they replace this machine's capabilities and features by a board's.
"""

from __future__ import annotations

import inspect
import platform
import sys
from dataclasses import dataclass

import llvmlite.binding as llvm
import pytest
from llvmlite import ir
from numba.core import config

from benchmarks.arm_code import TRIPLE, tile_code
from ondevice import jit
from ondevice import machine as processor
from ondevice.engines.simd.kernels.isa.instruction_set import of_features, usable
from ondevice.engines.simd.kernels.isa.memory import ticks


@dataclass(frozen=True)
class Board:
    cpu: str
    """LLVM's name of the board's core."""
    hwcap: int
    """Linux's capability bits (hwcap); /proc/cpuinfo shows their names."""
    features: str
    """The features that LLVM reads from /proc/cpuinfo; dot products (asimddp) are not among them."""


# fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp
PI5 = Board("cortex-a76", 0x119FFF, "+aes,+crc,+fp-armv8,+fullfp16,+lse,+neon,+sha2,-sve,-rand")
# fp asimd evtstrm crc32 cpuid
PI4 = Board("cortex-a72", 0x887, "-aes,+crc,+fp-armv8,-lse,+neon,-sha2,-sve,-rand")


@pytest.fixture(params=[PI5, PI4], ids=["pi5", "pi4"])
def board(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Board:
    """A board, whose capabilities replace this machine's."""
    found: Board = request.param
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(processor, "hardware_capabilities", lambda: found.hwcap)
    monkeypatch.setattr(llvm, "get_process_triple", lambda: TRIPLE)
    monkeypatch.setattr(jit, "get_host_cpu_features", lambda: found.features)
    return found


def test_numba_is_told_of_the_dot_products_that_linux_knows_of(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "CPU_FEATURES", None)
    jit.enable_dot_products()
    told: str = config.CPU_FEATURES  # type: ignore[attr-defined]
    assert told == board.features + (",+dotprod" if board is PI5 else "")
    expected = "neon-dotprod" if board is PI5 else "neon"
    for cpu in (board.cpu, "generic"):
        assert of_features(TRIPLE, usable(TRIPLE, cpu, told)).name == expected
        assert bool(tile_code(cpu, told, 4, 1).count("sdot")) == (board is PI5)


def test_features_that_a_user_sets_stay(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "CPU_FEATURES", "+neon")
    jit.enable_dot_products()
    assert config.CPU_FEATURES == "+neon"  # type: ignore[attr-defined]


def test_a_code_generator_that_was_not_told_is_looked_at(board: Board) -> None:
    """The application used numba before ondevice; a core that LLVM knows by name still has dot products."""
    by_name = of_features(TRIPLE, usable(TRIPLE, board.cpu, board.features))
    assert by_name.name == ("neon-dotprod" if board is PI5 else "neon")
    assert of_features(TRIPLE, usable(TRIPLE, "generic", board.features)).name == "neon"


def test_the_name_of_a_core_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """A virtual machine may hide features that its core has."""
    monkeypatch.setattr(processor, "hardware_capabilities", lambda: PI4.hwcap)
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert of_features(TRIPLE, usable(TRIPLE, "cortex-a76", PI4.features)).name == "neon"


@pytest.mark.parametrize(
    ("system", "machine", "expected"),
    [("darwin", "arm64", True), ("linux", "x86_64", False), ("win32", "AMD64", False)],
)
def test_other_systems(system: str, machine: str, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(processor, "hardware_capabilities", lambda: PI5.hwcap)  # on x86, these bits mean other things
    assert processor.arm_dot_products() == expected


MOST = {
    ("cortex-a76", 4): {1: 108, 2: 172, 4: 344, 5: 407, 8: 638},
    ("cortex-a76", 8): {1: 121, 2: 185, 4: 365, 5: 428, 8: 659},
    ("cortex-a72", 4): {1: 159, 2: 292, 4: 647, 5: 785, 8: 1218},
    ("cortex-a72", 8): {1: 224, 2: 391, 4: 874, 5: 1088, 8: 1777},
}
"""Limits of instructions per block of 32 weights of 16 output rows, by CPU, bits and rows: LLVM 22's plus 5 %."""


@pytest.mark.parametrize(("cpu", "bits"), MOST)
def test_the_tile_takes_no_more_instructions(cpu: str, bits: int) -> None:
    features = "+neon,+dotprod" if cpu == "cortex-a76" else "+neon"
    products = 32 if cpu == "cortex-a76" else 64
    for rows, most in MOST[cpu, bits].items():
        code = tile_code(cpu, features, bits, rows)
        assert code.count() <= most, (rows, code.count())
        assert code.count("sdot|smull|smlal") == products * rows, "sixteen or eight products each"
        assert code.count("prfm") == bits, "one prefetch per line of 64 bytes"


@pytest.mark.parametrize("triple", [TRIPLE, "arm64-apple-darwin"])
def test_the_clock_is_read_without_an_assembler(triple: str) -> None:
    """numba's code generator cannot parse inline assembly, which would end the process on ARM."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = ir.Module("clock")
    module.triple = triple
    builder = ir.IRBuilder(ir.Function(module, ir.FunctionType(ir.IntType(64), []), "clock").append_basic_block())
    builder.ret(inspect.unwrap(ticks)(builder))
    assert " asm " not in str(module)
    machine = llvm.Target.from_triple(triple).create_target_machine(opt=3)
    assert "CNTVCT_EL0" in machine.emit_assembly(llvm.parse_assembly(str(module)))
