"""The code compiled for ARM boards; it is cross-compiled, so no ARM machine is needed."""

from __future__ import annotations

import inspect

import llvmlite.binding as llvm
import pytest
from llvmlite import ir

from benchmarks.speed.tile_code import ARM, tile_code
from ondevice.bundle_format.weight_format import INT4, INT4_AFFINE, INT4_TABLE, INT8, MXFP4, WeightFormat
from ondevice.engines.simd.kernels.isa.memory import ticks

MOST = {
    ("neon-i8mm", INT4): {1: 112, 2: 172, 4: 256, 5: 365, 8: 428},
    ("neon-i8mm", INT4_AFFINE): {1: 120, 2: 189, 4: 306, 5: 445, 8: 504},
    ("neon-i8mm", INT4_TABLE): {1: 159, 2: 207, 4: 289, 5: 420, 8: 483},
    ("neon-i8mm", MXFP4): {1: 159, 2: 207, 4: 289, 5: 420, 8: 483},
    ("neon-i8mm", INT8): {1: 127, 2: 184, 4: 294, 5: 399, 8: 466},
    ("neon-dotprod", INT4): {1: 112, 2: 172, 4: 331, 5: 390, 8: 642},
    ("neon-dotprod", INT4_AFFINE): {1: 120, 2: 189, 4: 361, 5: 424, 8: 709},
    ("neon-dotprod", INT4_TABLE): {1: 159, 2: 207, 4: 365, 5: 445, 8: 701},
    ("neon-dotprod", MXFP4): {1: 159, 2: 207, 4: 365, 5: 445, 8: 701},
    ("neon-dotprod", INT8): {1: 127, 2: 184, 4: 352, 5: 411, 8: 667},
    ("neon", INT4): {1: 174, 2: 291, 4: 655, 5: 806, 8: 1323},
    ("neon", INT4_AFFINE): {1: 183, 2: 306, 4: 684, 5: 890, 8: 1428},
    ("neon", INT4_TABLE): {1: 245, 2: 388, 4: 844, 5: 1104, 8: 1785},
    ("neon", MXFP4): {1: 245, 2: 388, 4: 844, 5: 1104, 8: 1785},
    ("neon", INT8): {1: 215, 2: 367, 4: 856, 5: 1045, 8: 1730},
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
        assert code.count("tbl") == 32 * bool(form.table), "one shuffle per vector of codes, for all rows"


@pytest.mark.parametrize("triple", [ARM, "arm64-apple-darwin"])
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
