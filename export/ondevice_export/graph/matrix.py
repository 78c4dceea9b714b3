"""A stored matrix in a graph: as a linear layer, and as a table of rows."""

from __future__ import annotations

import onnx_ir as ir

from ondevice_export.graph.graph_builder import CONTRIB, GraphBuilder
from ondevice_export.graph.trained import trained_linear, trained_rows
from ondevice_export.matrices import StoredMatrix
from ondevice_export.quantize import BLOCK


def linear(builder: GraphBuilder, x: ir.Value, matrix: StoredMatrix) -> ir.Value:
    """`x @ matrix.T`: [T, width] -> [T, rows] (torch.nn.Linear without bias)."""
    if matrix.as_trained:
        return trained_linear(builder, x, matrix)
    if matrix.scales is None:
        weight = builder.external(matrix.name, matrix.data, ir.DataType.FLOAT, (matrix.rows, matrix.width))
        return builder.op("Gemm", x, weight, transB=1)
    blocks = matrix.width // BLOCK
    shape = (matrix.rows, blocks, matrix.format.bytes(BLOCK))
    data = builder.external(f"{matrix.name}.q{matrix.format.bits}", matrix.data, ir.DataType.UINT8, shape)
    return builder.op(
        "MatMulNBits",
        x,
        data,
        _scales(builder, matrix, matrix.rows, blocks),
        domain=CONTRIB,
        K=matrix.width,
        N=matrix.rows,
        bits=matrix.format.bits,
        block_size=BLOCK,
        accuracy_level=4,  # int8 activations: a row's result then does not depend on the rows beside it
    )


def gather(builder: GraphBuilder, matrix: StoredMatrix, ids: ir.Value, *, group: int = 1) -> ir.Value:
    """TokenRows of a table: ids [T] -> [T, group * width]; `group` consecutive rows make one entry of the table."""
    if matrix.as_trained:
        return trained_rows(builder, matrix, ids)
    entries, width = matrix.rows // group, matrix.width * group
    if matrix.scales is None:
        suffix = "" if group == 1 else f".by{group}"
        table = builder.external(matrix.name + suffix, matrix.data, ir.DataType.FLOAT, (entries, width))
        return builder.op("Gather", table, ids, axis=0)
    # The head and the embedding are one table: a second initialiser of another shape over the same bytes.
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
    return builder.op("Cast", rows, to=ir.DataType.FLOAT) if matrix.half_scales else rows


def _scales(builder: GraphBuilder, matrix: StoredMatrix, rows: int, blocks: int) -> ir.Value:
    assert matrix.scales is not None
    dtype = ir.DataType.FLOAT16 if matrix.half_scales else ir.DataType.FLOAT
    return builder.external(f"{matrix.name}.scales", matrix.scales, dtype, (rows, blocks))
