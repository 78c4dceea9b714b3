"""Graph nodes for a stored matrix, used as a linear layer or as a table of rows.

In a checkpoint that was trained quantised, a linear layer rounds its input to codes clamp(round(x / s), -128, 127),
multiplies integers, scales each output by one factor, and rounds the output like the input. The graph uses standard
operators and MatMulNBits for it. The product is computed in float32 on whole numbers below 2**24, so it is exact in any
order of summation, and a row's result does not depend on the other rows of a forward. `accuracy_level` is 1 for it: at
4, MatMulNBits would quantise `x` a second time.

A weight of an affine format is scale * code + minimum. As scale * (code - 8) + offset, with offset = minimum + 8 *
scale, a linear layer is MatMulNBits without zero points, plus a product of the offsets with the sums of the input's
blocks, which has a 32nd of the multiplications. MatMulNBits accepts float zero points, -minimum / scale, but then it
multiplies floats, and a single row has other bits than the same row among four (ONNX Runtime 1.32).
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ondevice.bundle_format.weight_format import BFLOAT16
from ondevice_export.graph.graph_builder import CONTRIB, GraphBuilder
from ondevice_export.matrices import MAX_ACTIVATION, StoredMatrix
from ondevice_export.quantize import BLOCK

BLOCKS = (256, 128, 64, 32)
"""Block sizes that MatMulNBits accepts, largest first: larger blocks need fewer scales, which are all 1 here."""


def linear(builder: GraphBuilder, x: ir.Value, matrix: StoredMatrix) -> ir.Value:
    """`x @ matrix.T`: [T, width] -> [T, rows] (torch.nn.Linear without bias)."""
    if matrix.as_trained:
        return _trained_linear(builder, x, matrix)
    if matrix.scales is None:
        weight = builder.external(matrix.name, matrix.data, ir.DataType.FLOAT, (matrix.rows, matrix.width))
        return builder.op("Gemm", x, weight, transB=1)
    blocks = matrix.width // BLOCK
    shape = (matrix.rows, blocks, matrix.format.bytes(BLOCK))
    data = builder.external(f"{matrix.name}.q{matrix.format.bits}", matrix.data, ir.DataType.UINT8, shape)
    symmetric = builder.op(
        "MatMulNBits",
        x,
        data,
        _scales(builder, matrix, matrix.rows, blocks),
        domain=CONTRIB,
        K=matrix.width,
        N=matrix.rows,
        bits=matrix.format.bits,
        block_size=BLOCK,
        accuracy_level=4,  # int8 activations: a row's result then does not depend on the other rows
    )
    if matrix.minimums is None:
        return symmetric
    sums = builder.op("ReduceSum", builder.reshape(x, -1, blocks, BLOCK), builder.integers(-1), keepdims=0)
    # ONNX Runtime 1.25 keeps the reduced dimension where there is no row, as for an expert that no token chose.
    sums = builder.reshape(sums, -1, blocks)
    offsets = product(builder, sums, _offsets(builder, matrix, matrix.rows, blocks), (matrix.rows, blocks))
    return builder.op("Add", symmetric, offsets)


def product(builder: GraphBuilder, x: ir.Value, weight: ir.Value, shape: tuple[int, int]) -> ir.Value:
    """`x @ weight.T`: [T, width] -> [T, rows], `shape` being the weight's (rows, width); T may be 0.

    Every row is multiplied twice, side by side, because ONNX Runtime rounds a single row (GEMV) differently from the
    same row among others (GEMM). The copies are not stacked and split: ONNX Runtime 1.25 cannot split zero rows.
    """
    rows, width = shape
    twice = builder.op("Gemm", builder.reshape(builder.op("Concat", x, x, axis=-1), -1, width), weight, transB=1)
    pairs = builder.reshape(twice, -1, 2 * rows)
    return builder.op("Slice", pairs, builder.integers(0), builder.integers(rows), builder.integers(1))


def row_codes(builder: GraphBuilder, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Quantise rows of activations: [N, K] -> uint8[N, K], a code being round(x / step) + 90, and steps [N, 1].

    A row's step is 1/90 of its largest magnitude, so a row is alike whatever the other rows are; see MAX_ACTIVATION.
    """
    largest = builder.op("ReduceMax", builder.op("Abs", x), builder.integers(-1), keepdims=1)
    steps = builder.op("Mul", builder.op("Clip", largest, builder.scalar(1e-30)), builder.scalar(1 / MAX_ACTIVATION))
    scaled = builder.op("Div", x, steps)
    return builder.op("QuantizeLinear", scaled, builder.scalar(1.0), _byte(builder, MAX_ACTIVATION, ())), steps


def linear_of_codes(builder: GraphBuilder, codes: ir.Value, steps: ir.Value, matrix: StoredMatrix) -> ir.Value:
    """`(codes - 90) * steps @ matrix.T` for a matrix that is stored transposed: [N, width] -> [N, rows].

    The product of unsigned with signed bytes is the fast one of x86 CPUs.
    """
    weight = builder.external(matrix.name, matrix.data, ir.DataType.INT8, (matrix.width, matrix.rows))
    assert matrix.scales is not None
    scales = builder.external(f"{matrix.name}.scales", matrix.scales, ir.DataType.FLOAT, (matrix.rows,))
    one, zero = builder.scalar(1.0), _byte(builder, MAX_ACTIVATION, ())
    return builder.op(
        "Mul", builder.op("MatMulIntegerToFloat", codes, weight, one, scales, zero, domain=CONTRIB), steps
    )


def gather(builder: GraphBuilder, matrix: StoredMatrix, ids: ir.Value, *, group: int = 1) -> ir.Value:
    """Gather entries of a table: ids [T] -> [T, group * width]; an entry is `group` consecutive rows."""
    if matrix.as_trained:
        return _trained_rows(builder, matrix, ids)
    entries, width = matrix.rows // group, matrix.width * group
    if matrix.scales is None:
        suffix = "" if group == 1 else f".by{group}"
        table = builder.external(matrix.name + suffix, matrix.data, ir.DataType.FLOAT, (entries, width))
        return builder.op("Gather", table, ids, axis=0)
    # Head and embedding share one stored table: this is a second initialiser, of another shape, over the same bytes.
    shape = (entries, matrix.format.bytes(width))
    data = builder.external(f"{matrix.name}.q{matrix.format.bits}.rows", matrix.data, ir.DataType.UINT8, shape)
    rows = builder.op(
        "GatherBlockQuantized",
        data,
        ids,
        _scales(builder, matrix, entries, width // BLOCK),
        domain=CONTRIB,
        bits=matrix.format.bits,
        block_size=BLOCK,
        gather_axis=0,
        quantize_axis=1,
    )
    rows = builder.op("Cast", rows, to=ir.DataType.FLOAT) if matrix.half_scales else rows
    if matrix.minimums is None:
        return rows
    offsets = builder.op("Gather", _offsets(builder, matrix, entries, width // BLOCK), ids, axis=0)
    blocks = builder.reshape(rows, -1, BLOCK)
    shifted = builder.op("Add", blocks, builder.reshape(offsets, -1, 1))
    return builder.op("Reshape", shifted, builder.op("Shape", rows))


def _scales(builder: GraphBuilder, matrix: StoredMatrix, rows: int, blocks: int) -> ir.Value:
    assert matrix.scales is not None
    dtype = ir.DataType.FLOAT16 if matrix.half_scales else ir.DataType.FLOAT
    return builder.external(f"{matrix.name}.scales", matrix.scales, dtype, (rows, blocks))


def _offsets(builder: GraphBuilder, matrix: StoredMatrix, rows: int, blocks: int) -> ir.Value:
    """The weights of code 8, minimum + 8 * scale, float32[rows, blocks]; ONNX Runtime computes them once, at load."""
    assert matrix.minimums is not None
    dtype = ir.DataType.FLOAT16 if matrix.half_scales else ir.DataType.FLOAT
    minimums = builder.external(f"{matrix.name}.minimums", matrix.minimums, dtype, (rows, blocks))
    values = [minimums, _scales(builder, matrix, rows, blocks)]
    if matrix.half_scales:
        values = [builder.op("Cast", each, to=ir.DataType.FLOAT) for each in values]
    return builder.op("Add", values[0], builder.op("Mul", values[1], builder.scalar(8.0)))


def _trained_linear(builder: GraphBuilder, x: ir.Value, matrix: StoredMatrix) -> ir.Value:
    """`x @ matrix.T` for a matrix that was trained quantised: [T, width] -> [T, rows]."""
    if matrix.scales is None:
        weight = builder.external(matrix.name, matrix.data, _plain_type(matrix), (matrix.rows, matrix.width))
        return product(builder, x, builder.op("Cast", weight, to=ir.DataType.FLOAT), (matrix.rows, matrix.width))
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


def _trained_rows(builder: GraphBuilder, matrix: StoredMatrix, ids: ir.Value) -> ir.Value:
    """Gather rows of a table that was trained quantised: ids [T] -> [T, width]."""
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
    """Activation codes clamp(round(x / step), -128, 127) as float32, ties to even."""
    rounded = builder.op("Round", builder.op("Div", x, builder.scalar(step)))
    return builder.op("Clip", rounded, builder.scalar(-128.0), builder.scalar(127.0))


def _two_bits(builder: GraphBuilder, x: ir.Value, matrix: StoredMatrix) -> ir.Value:
    """`x @ codes.T` for int2 codes, widened to int4 by nodes that ONNX Runtime folds into a constant at load.

    Its product of 2-bit codes is 20 times slower than that of 4-bit codes.
    """
    codes = _data(builder, matrix, matrix.format.bytes(matrix.width))
    pairs = [_spread(builder, _shifted(builder, codes, place)) for place in (0, 4)]
    joined = builder.op("Concat", *(builder.op("Unsqueeze", pair, builder.integers(-1)) for pair in pairs), axis=-1)
    return _in_blocks(builder, x, joined, matrix, zero=2)


def _four_bits(builder: GraphBuilder, x: ir.Value, matrix: StoredMatrix) -> ir.Value:
    return _in_blocks(builder, x, _data(builder, matrix, matrix.format.bytes(matrix.width)), matrix, zero=8)


def _eight_bits(builder: GraphBuilder, x: ir.Value, matrix: StoredMatrix) -> ir.Value:
    """`x @ codes.T` for int8 codes by Gemm: ONNX Runtime's MatMulNBits would unpack 8-bit codes at every call."""
    weight = _less_zero(builder, _data(builder, matrix, matrix.width), matrix)
    return product(builder, x, weight, (matrix.rows, matrix.width))


def _in_blocks(builder: GraphBuilder, x: ir.Value, codes: ir.Value, matrix: StoredMatrix, zero: int) -> ir.Value:
    """`x @ (codes - zero).T` by MatMulNBits with 4-bit codes and all scales 1."""
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
    """Widen the lower two 2-bit codes of each byte to two 4-bit codes."""
    low = builder.op("BitwiseAnd", codes, _byte(builder, 3))
    high = builder.op("BitwiseAnd", codes, _byte(builder, 12))
    return builder.op("BitwiseOr", low, builder.op("BitShift", high, _byte(builder, 2), direction="LEFT"))


def _shifted(builder: GraphBuilder, codes: ir.Value, bits: int) -> ir.Value:
    return builder.op("BitShift", codes, _byte(builder, bits), direction="RIGHT") if bits else codes


def _less_zero(builder: GraphBuilder, codes: ir.Value, matrix: StoredMatrix) -> ir.Value:
    """Codes minus the format's zero point, as float32."""
    return builder.op("Sub", builder.op("Cast", codes, to=ir.DataType.FLOAT), builder.scalar(float(matrix.format.zero)))


def _data(builder: GraphBuilder, matrix: StoredMatrix, width: int) -> ir.Value:
    """The packed codes of the data file as an initialiser uint8[rows, width], `width` in bytes."""
    return builder.external(
        f"{matrix.name}.q{matrix.format.bits}", matrix.data, ir.DataType.UINT8, (matrix.rows, width)
    )


def _plain_type(matrix: StoredMatrix) -> ir.DataType:
    return ir.DataType.BFLOAT16 if matrix.format == BFLOAT16 else ir.DataType.FLOAT


def _byte(builder: GraphBuilder, value: int, shape: tuple[int, ...] = (1,)) -> ir.Value:
    return builder.constant(np.full(shape, value, np.uint8))
