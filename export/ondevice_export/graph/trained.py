"""Matrices of a checkpoint that was trained quantised, in standard operators and MatMulNBits.

A linear layer is clamp(round(x / s), -128, 127), an integer product, one factor for each output, and the same rounding
of the output. The product is one of float32 numbers that are whole, of less than 2**24: exact, in whatever order a
runtime adds up, so that a row's result does not depend on the rows beside it. MatMulNBits would quantise `x` once more
at `accuracy_level` 4.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ondevice.weight_format import BFLOAT16
from ondevice_export.graph.graph_builder import CONTRIB, GraphBuilder
from ondevice_export.matrices import StoredMatrix

BLOCKS = (256, 128, 64, 32)
"""Sizes that MatMulNBits takes; large ones have few scales, which are ones here."""


def trained_linear(builder: GraphBuilder, x: ir.Value, matrix: StoredMatrix) -> ir.Value:
    """`x @ matrix.T`: [T, width] -> [T, rows]."""
    if matrix.scales is None:
        weight = builder.external(matrix.name, matrix.data, _plain_type(matrix), (matrix.rows, matrix.width))
        return _product(builder, x, builder.op("Cast", weight, to=ir.DataType.FLOAT))
    if matrix.input_step:
        x = _codes(builder, x, matrix.input_step)
    total = {2: _two_bits, 4: _four_bits, 8: _eight_bits}[matrix.format.bits](builder, x, matrix)
    factor = builder.external(f"{matrix.name}.scales", matrix.scales, ir.DataType.FLOAT, (matrix.rows,))
    if matrix.input_step:
        factor = builder.op("Mul", factor, builder.scalar(matrix.input_step))
    out = builder.op("Mul", total, factor)
    if not matrix.output_step:
        return out
    return builder.op("Mul", _codes(builder, out, matrix.output_step), builder.scalar(matrix.output_step))


def trained_rows(builder: GraphBuilder, matrix: StoredMatrix, ids: ir.Value) -> ir.Value:
    """Rows of a table: ids [T] -> [T, width]."""
    if matrix.scales is None:
        table = builder.external(matrix.name, matrix.data, _plain_type(matrix), (matrix.rows, matrix.width))
        return builder.op("Cast", builder.op("Gather", table, ids, axis=0), to=ir.DataType.FLOAT)
    bits, count = matrix.format.bits, matrix.format.scales(matrix.width)
    codes = builder.op("Gather", _data(builder, matrix, matrix.format.bytes(matrix.width)), ids, axis=0)
    if bits < 8:
        places = [_shifted(builder, codes, place) for place in range(0, 8, bits)]
        masked = [builder.op("BitwiseAnd", place, _byte(builder, (1 << bits) - 1)) for place in places]
        split = [builder.op("Unsqueeze", place, builder.integers(-1)) for place in masked]
        codes = builder.op("Concat", *split, axis=-1)
    weights = _less_zero(builder, builder.reshape(codes, -1, count, matrix.width // count), matrix)
    scales = builder.external(f"{matrix.name}.scales", matrix.scales, ir.DataType.FLOAT, (matrix.rows, count))
    own = builder.op("Unsqueeze", builder.op("Gather", scales, ids, axis=0), builder.integers(-1))
    return builder.reshape(builder.op("Mul", weights, own), -1, matrix.width)


def _codes(builder: GraphBuilder, x: ir.Value, step: float) -> ir.Value:
    """clamp(round(x / step), -128, 127), ties to even."""
    rounded = builder.op("Round", builder.op("Div", x, builder.scalar(step)))
    return builder.op("Clip", rounded, builder.scalar(-128.0), builder.scalar(127.0))


def _two_bits(builder: GraphBuilder, x: ir.Value, matrix: StoredMatrix) -> ir.Value:
    """ONNX Runtime computes folded constants once: it multiplies codes of 4 bits, those of 2 bits 20 times slower."""
    codes = _data(builder, matrix, matrix.format.bytes(matrix.width))
    pairs = [_spread(builder, _shifted(builder, codes, place)) for place in (0, 4)]
    joined = builder.op("Concat", *(builder.op("Unsqueeze", pair, builder.integers(-1)) for pair in pairs), axis=-1)
    return _in_blocks(builder, x, joined, matrix, zero=2)


def _four_bits(builder: GraphBuilder, x: ir.Value, matrix: StoredMatrix) -> ir.Value:
    return _in_blocks(builder, x, _data(builder, matrix, matrix.format.bytes(matrix.width)), matrix, zero=8)


def _eight_bits(builder: GraphBuilder, x: ir.Value, matrix: StoredMatrix) -> ir.Value:
    """ONNX Runtime would unpack MatMulNBits' codes of 8 bits at every call."""
    return _product(builder, x, _less_zero(builder, _data(builder, matrix, matrix.width), matrix))


def _product(builder: GraphBuilder, x: ir.Value, weight: ir.Value) -> ir.Value:
    """x @ weight.T with all rows twice: ONNX Runtime rounds a lone row otherwise than the same row among others."""
    twice = builder.op("Gemm", builder.op("Concat", x, x, axis=0), weight, transB=1)
    return builder.ops("Split", twice, outputs=2, axis=0, num_outputs=2)[0]


def _in_blocks(builder: GraphBuilder, x: ir.Value, codes: ir.Value, matrix: StoredMatrix, zero: int) -> ir.Value:
    """MatMulNBits of codes of 4 bits whose scales are ones."""
    block = next(size for size in BLOCKS if matrix.width % size == 0)
    blocks = matrix.width // block
    shaped = builder.reshape(codes, matrix.rows, blocks, block // 2)
    ones = builder.op("Expand", builder.constant(np.ones(1, np.float32)), builder.integers(matrix.rows, blocks))
    zeros = builder.op("Expand", _byte(builder, zero * 17), builder.integers(matrix.rows * -(-blocks // 2)))
    return builder.op(
        "MatMulNBits", x, shaped, ones, zeros, domain=CONTRIB,
        K=matrix.width, N=matrix.rows, bits=4, block_size=block, accuracy_level=1,
    )  # fmt: skip


def _spread(builder: GraphBuilder, codes: ir.Value) -> ir.Value:
    """The lower two codes of 2 bits in each byte, as codes of 4 bits."""
    low = builder.op("BitwiseAnd", codes, _byte(builder, 3))
    high = builder.op("BitwiseAnd", codes, _byte(builder, 12))
    return builder.op("BitwiseOr", low, builder.op("BitShift", high, _byte(builder, 2), direction="LEFT"))


def _shifted(builder: GraphBuilder, codes: ir.Value, bits: int) -> ir.Value:
    return builder.op("BitShift", codes, _byte(builder, bits), direction="RIGHT") if bits else codes


def _less_zero(builder: GraphBuilder, codes: ir.Value, matrix: StoredMatrix) -> ir.Value:
    """Codes as float32, less that of zero."""
    return builder.op("Sub", builder.op("Cast", codes, to=ir.DataType.FLOAT), builder.scalar(float(matrix.format.zero)))


def _data(builder: GraphBuilder, matrix: StoredMatrix, width: int) -> ir.Value:
    """The codes as they lie in the data file, uint8[rows, width]."""
    return builder.external(
        f"{matrix.name}.q{matrix.format.bits}", matrix.data, ir.DataType.UINT8, (matrix.rows, width)
    )


def _plain_type(matrix: StoredMatrix) -> ir.DataType:
    return ir.DataType.BFLOAT16 if matrix.format == BFLOAT16 else ir.DataType.FLOAT


def _byte(builder: GraphBuilder, value: int) -> ir.Value:
    return builder.constant(np.array([value], np.uint8))
