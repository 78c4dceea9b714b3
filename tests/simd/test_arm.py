"""The code compiled for ARM boards; it is cross-compiled, so no ARM machine is needed."""

from __future__ import annotations

import inspect

import llvmlite.binding as llvm
import pytest
from llvmlite import ir

from benchmarks.arm_code import TRIPLE, tile_code
from ondevice.engines.simd.kernels.isa.memory import ticks

MOST = {
    ("neon-i8mm", 4): {1: 108, 2: 170, 4: 244, 5: 340, 8: 378},
    ("neon-i8mm", 8): {1: 121, 2: 185, 4: 282, 5: 378, 8: 416},
    ("neon-dotprod", 4): {1: 108, 2: 172, 4: 344, 5: 407, 8: 638},
    ("neon-dotprod", 8): {1: 121, 2: 185, 4: 365, 5: 428, 8: 659},
    ("neon", 4): {1: 159, 2: 292, 4: 647, 5: 785, 8: 1218},
    ("neon", 8): {1: 224, 2: 391, 4: 874, 5: 1088, 8: 1777},
}
"""Limits of instructions per block of 32 weights of 16 output rows, by set, bits and rows: LLVM 22's plus 5 %."""


@pytest.mark.parametrize(("name", "bits"), MOST)
def test_the_tile_takes_no_more_instructions(name: str, bits: int) -> None:
    products = 64 if name == "neon" else 32
    for rows, most in MOST[name, bits].items():
        code = tile_code(name, bits, rows)
        assert code.count() <= most, (rows, code.count())
        if name == "neon-i8mm" and rows >= 4:
            assert code.count("smmla") == 32 * (-(-rows // 2)), "two rows each"
            assert not code.count("sdot")
        else:
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
