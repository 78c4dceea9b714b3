"""Look-ups of bytes in tables of 16 bytes, for codes of weights and of keys: each instruction set's byte shuffle."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from ondevice.bundle_format.weight_format import TABLES
from ondevice.engines.simd.kernels.contract.instruction_sets import LANES, InstructionSet, instruction_set
from ondevice.engines.simd.kernels.isa.jit import LITERAL, emits
from ondevice.engines.simd.kernels.isa.vector import I8, I32, VF32, call, floats16, read_int4
from ondevice.native import library


def byte_shuffle() -> str:
    """The widest instruction that looks up bytes in tables of 16 bytes; "" if there is none.

    `vpermb` looks up in 4 tables in one vector, `pshufb-512` and `pshufb-256` in one table for each 128 bits.
    """
    if instruction_set().by_lane:
        return "tbl"
    shuffles = {"avx512vbmi": "vpermb", "avx512vnni": "pshufb-512", "avxvnni": "pshufb-256", "avx2": "pshufb-256"}
    return shuffles.get(library.choice().set, "")


def look_up(builder: Any, table: Any, places: Any) -> Any:
    """table[places] within each 16 bytes.

    Args:
        table: <n x i8>, a table of 16 bytes for each 16 of the places. n is 16, on x86 also 32 or 64.
        places: <n x i8>, 0..15.
    """
    shuffle = byte_shuffle()
    if shuffle == "tbl":
        return call(builder, "llvm.aarch64.neon.tbl1.v16i8", table.type, table, places)
    if shuffle:
        names = {16: "ssse3.pshuf.b.128", 32: "avx2.pshuf.b", 64: "avx512.pshuf.b.512"}
        return call(builder, f"llvm.x86.{names[table.type.count]}", table.type, table, places)
    found = ir.Constant(table.type, ir.Undefined)
    for lane in range(table.type.count):  # byte after byte, for any CPU
        place = builder.extract_element(places, I32(lane))
        found = builder.insert_element(found, builder.extract_element(table, place), I32(lane))
    return found


def look_up_wide(builder: Any, table: Any, places: Any) -> Any:
    """table[places] with `vpermb`, for a table <64 x i8>: it reads the lowest six bits of a place."""
    return call(builder, "llvm.x86.avx512.permvar.qi.512", table.type, table, places)


def level_table(isa: InstructionSet, number: int, count: int) -> Any:
    """A table of `weight_format.TABLES` as <count x i8>, repeated: signed bytes, or plus 128 if `isa` multiplies
    unsigned ones.
    """
    levels = [level + isa.int8_zero for level in TABLES[number]]
    return ir.Constant(ir.VectorType(I8, count), levels * (count // len(levels)))


@emits(floats16, LITERAL, types.int64)
def load_levels(builder: Any, number: int, address: Any) -> Any:
    """Load 16 codes of 4 bits, the low nibble of a byte first, and look them up in a table of `weight_format.TABLES`,
    as float32.
    """
    table = ir.Constant(ir.VectorType(I8, LANES), list(TABLES[number]))
    return builder.sitofp(look_up(builder, table, read_int4(builder, address)), VF32)
