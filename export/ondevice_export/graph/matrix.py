"""A stored matrix in a graph: as a linear layer, and as a table of rows."""

from __future__ import annotations

import onnx_ir as ir

from ondevice_export.graph.tape import CONTRIB, Tape
from ondevice_export.matrices import StoredMatrix
from ondevice_export.quantize import BLOCK


def linear(tape: Tape, x: ir.Value, matrix: StoredMatrix) -> ir.Value:
    """`x @ matrix.T`: [T, width] -> [T, rows] (torch.nn.Linear without bias)."""
    if matrix.scales is None:
        weight = tape.external(matrix.name, matrix.data, ir.DataType.FLOAT, (matrix.rows, matrix.width))
        return tape.op("Gemm", x, weight, transB=1)
    blocks = matrix.width // BLOCK
    data = tape.external(
        f"{matrix.name}.q{matrix.bits}", matrix.data, ir.DataType.UINT8, (matrix.rows, blocks, 4 * matrix.bits)
    )
    return tape.op(
        "MatMulNBits",
        x,
        data,
        _scales(tape, matrix, matrix.rows, blocks),
        domain=CONTRIB,
        K=matrix.width,
        N=matrix.rows,
        bits=matrix.bits,
        block_size=BLOCK,
        accuracy_level=4,  # int8 activations: a row's result then does not depend on the rows beside it
    )


def gather(tape: Tape, matrix: StoredMatrix, ids: ir.Value, *, group: int = 1) -> ir.Value:
    """Rows of a table: ids [T] -> [T, group * width]; `group` consecutive rows make one entry of the table."""
    entries, width = matrix.rows // group, matrix.width * group
    if matrix.scales is None:
        suffix = "" if group == 1 else f".by{group}"
        table = tape.external(matrix.name + suffix, matrix.data, ir.DataType.FLOAT, (entries, width))
        return tape.op("Gather", table, ids, axis=0)
    # The head and the embedding are one table: a second initialiser of another shape over the same bytes.
    data = tape.external(
        f"{matrix.name}.q{matrix.bits}.rows", matrix.data, ir.DataType.UINT8, (entries, width * matrix.bits // 8)
    )
    rows = tape.op(
        "GatherBlockQuantized",
        data,
        ids,
        _scales(tape, matrix, entries, width // BLOCK),
        domain=CONTRIB,
        bits=matrix.bits,
        block_size=BLOCK,
        gather_axis=0,
        quantize_axis=1,
    )
    return tape.op("Cast", rows, to=ir.DataType.FLOAT) if matrix.half_scales else rows


def _scales(tape: Tape, matrix: StoredMatrix, rows: int, blocks: int) -> ir.Value:
    assert matrix.scales is not None
    dtype = ir.DataType.FLOAT16 if matrix.half_scales else ir.DataType.FLOAT
    return tape.external(f"{matrix.name}.scales", matrix.scales, dtype, (rows, blocks))
