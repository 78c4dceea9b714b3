"""The code compiled for ARM boards; it is cross-compiled, so no ARM machine is needed."""

from __future__ import annotations

import inspect

import llvmlite.binding as llvm
import pytest
from llvmlite import ir

from benchmarks.arm_code import TRIPLE, tile_code
from ondevice.bundle_format.weight_format import INT4, INT4_AFFINE, INT8, WeightFormat
from ondevice.engines.simd.kernels.isa.memory import ticks

MOST = {
    ("neon-i8mm", INT4): {1: 108, 2: 170, 4: 244, 5: 340, 8: 378},
    ("neon-i8mm", INT4_AFFINE): {1: 118, 2: 186, 4: 289, 5: 399, 8: 449},
    ("neon-i8mm", INT8): {1: 121, 2: 185, 4: 282, 5: 378, 8: 416},
    ("neon-dotprod", INT4): {1: 108, 2: 172, 4: 344, 5: 407, 8: 638},
    ("neon-dotprod", INT4_AFFINE): {1: 119, 2: 189, 4: 373, 5: 441, 8: 684},
    ("neon-dotprod", INT8): {1: 121, 2: 185, 4: 365, 5: 428, 8: 659},
    ("neon", INT4): {1: 159, 2: 292, 4: 647, 5: 785, 8: 1218},
    ("neon", INT4_AFFINE): {1: 179, 2: 323, 4: 676, 5: 819, 8: 1264},
    ("neon", INT8): {1: 224, 2: 391, 4: 874, 5: 1088, 8: 1777},
}
"""Limits of instructions per block of 32 weights of 16 output rows, by set, format and rows: LLVM 22's plus 5 %."""


@pytest.mark.parametrize(("name", "form"), MOST, ids=lambda value: getattr(value, "name", value))
def test_the_tile_takes_no_more_instructions(name: str, form: WeightFormat) -> None:
    products = 64 if name == "neon" else 32
    for rows, most in MOST[name, form].items():
        code = tile_code(name, form, rows)
        assert code.count() <= most, (rows, code.count())
        if name == "neon-i8mm" and rows >= 4:
            assert code.count("smmla") == 32 * (-(-rows // 2)), "two rows each"
            assert not code.count("sdot")
        else:
            assert code.count("sdot|smull|smlal") == products * rows, "sixteen or eight products each"
        assert code.count("prfm") == form.bits, "one prefetch per line of 64 bytes"


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
