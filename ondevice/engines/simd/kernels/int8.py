"""Weights of 8 bits: in a tile, in a row of a table, and from one to the other.

A block of a tile is 8 vectors of 64 bytes, vector j with k = 4j .. 4j + 3 of the 16 rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir

from ondevice.engines.simd.kernels.instruction_set import InstructionSet
from ondevice.engines.simd.kernels.jit import kernel
from ondevice.engines.simd.kernels.memory import read_i64, write_i32
from ondevice.engines.simd.kernels.sizes import TILE
from ondevice.engines.simd.kernels.vector import I8, constant, full, load_int8, read

_ZERO = np.float32(128.0)
_ZEROS = -0x7F7F7F7F7F7F7F80
"""Eight bytes of zero weights: 0x80 each."""


def codes(builder: Any, isa: InstructionSet, pointer: Any, offset: int) -> list[Any]:
    """Weights of a block as `int4.codes` gives them, signed where the instruction set takes signed ones."""
    kind = ir.VectorType(I8, 4 * isa.lanes)
    packed = [read(builder, pointer, kind, offset + 4 * TILE * j) for j in range(8)]
    return [builder.xor(code, constant(128, kind)) for code in packed] if isa.signed else packed


def split_codes(builder: Any, isa: InstructionSet, pointer: Any, offset: int, ways: int) -> list[tuple[Any, int]]:
    """As `int2.split_codes`: there is one way."""
    return [(code, 0) for code in codes(builder, isa, pointer, offset)]


@kernel
def weights8(row: int, index: int) -> Any:
    """Sixteen weights from `index` on of a row at an address, without their scale: float32[16]."""
    return load_int8(row + index) - full(_ZERO)


@kernel
def pack_tile8(codes: int, rows: int, blocks: int, out: int) -> None:
    """Pack codes uint8[rows, blocks, 32] into uint8[blocks, 8, 64]; the arguments are those of `int4.pack_tile4`."""
    stride = 32 * blocks
    for at in range(0, stride, 8):
        to = out + 16 * at
        for row in range(TILE):
            eight = read_i64(codes + row * stride + at) if row < rows else _ZEROS
            write_i32(to + 4 * row, np.int32(eight))
            write_i32(to + 64 + 4 * row, np.int32(eight >> 32))
