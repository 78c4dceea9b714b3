"""Reads matrices of checkpoints that were trained quantised, as `ondevice_export.graph.trained` writes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ondevice.engines.simd.graph.model import Matrix, Table
from ondevice.engines.simd.unsupported import UnsupportedGraphError
from ondevice.weight_format import BFLOAT16, BY_ROW, FLOAT32, WeightFormat

if TYPE_CHECKING:
    from ondevice.engines.simd.graph.matching import Matcher

_FLOAT = 1
"""onnx.TensorProto.DataType"""
_BLOCKS = (32, 64, 128, 256)


def read_linear(match: Matcher, value: str) -> tuple[str, Matrix]:
    """x and the matrix of x @ matrix.T, both rounded to static steps where they have them."""
    if match.op(value) == "Split":
        source, weight = _product(match, value)
        numbers, form = _plain(match, match.node(weight, "Cast", 1, to=_FLOAT).inputs[0])
        return source, Matrix(_bytes(numbers), np.zeros((len(numbers), 0), np.float32), form)
    output_step = 0.0
    node = match.node(value, "Mul", 2)
    if match.op(node.inputs[0]) == "Clip":
        output_step = match.scalar(node.inputs[1])
        value = _unrounded(match, node.inputs[0], output_step)
        node = match.node(value, "Mul", 2)
    total, factor = node.inputs
    step = 0.0
    if match.op(factor) == "Mul":
        factor, step = match.times(factor)
    source, codes, bits = _integers(match, total)
    if step:
        source = _unrounded(match, source, step)
    scales = match.floats(factor, 1)
    _require(len(scales) == len(codes), value, "scales that do not fit")
    _require(bool(np.isfinite([step, output_step]).all()) and min(step, output_step) >= 0, value, "steps below zero")
    return source, Matrix(codes, scales[:, None], BY_ROW[bits], step, output_step)


def read_rows(match: Matcher, value: str) -> tuple[str, Table]:
    """The ids and the table of table[ids]."""
    if match.op(value) == "Cast":
        node = match.node(match.node(value, "Cast", 1, to=_FLOAT).inputs[0], "Gather", 2, axis=0)
        numbers, form = _plain(match, node.inputs[0])
        return node.inputs[1], Table(_bytes(numbers), np.zeros((len(numbers), 0), np.float32), form)
    scaled, shape = match.reshaped(value)
    weights, own = match.node(scaled, "Mul", 2).inputs
    column = match.node(own, "Unsqueeze", 2)
    picked = match.node(column.inputs[0], "Gather", 2, axis=0)
    scales = match.floats(picked.inputs[0], 2)
    shaped, zero = _less_zero(match, weights)
    codes_of, blocks = match.reshaped(shaped)
    source, bits = _unpacked(match, codes_of)
    node = match.node(source, "Gather", 2, axis=0)
    codes: NDArray[np.uint8] = match.tensor(node.inputs[0], np.uint8, 2)
    width = codes.shape[1] * 8 // bits
    count = scales.shape[1]
    fits = bool(count) and blocks == (-1, count, width // count) and shape == (-1, width) and zero == 1 << (bits - 1)
    fits = fits and width % (32 * count) == 0 and len(scales) == len(codes) and node.inputs[1] == picked.inputs[1]
    _require(fits and match.integers(column.inputs[1]) == (-1,), value, "a table in an unknown form")
    form = BY_ROW[bits] if count == 1 else WeightFormat(bits, width // count)
    return node.inputs[1], Table(codes, scales, form)


def _integers(match: Matcher, value: str) -> tuple[str, NDArray[np.uint8], int]:
    """x, the codes uint8[rows, bytes of a row] and their bits of an exact product."""
    if match.op(value) == "Split":
        source, weight = _product(match, value)
        cast, zero = _less_zero(match, weight)
        _require(zero == 128, value, f"weights with zero at {zero}")
        return source, _codes(match, cast, 8), 8
    node = match.node(value, "com.microsoft.MatMulNBits", 4, bits=4, accuracy_level=1, block_size=_block(match, value))
    width, rows, block = (match.integer(node, name) for name in ("K", "N", "block_size"))
    source, shaped, ones, zeros = node.inputs
    joined, shape = match.reshaped(shaped)
    two = match.op(joined) == "Concat"
    blocks = width // block
    fits = width % block == 0 and shape == (rows, blocks, block // 2)
    _require(fits and _filled(match, ones, (rows, blocks)) == 1.0, value, "scales that are not ones")
    zero = 0x22 if two else 0x88
    _require(_filled(match, zeros, (rows * -(-blocks // 2),)) == zero, value, "other codes of zero")
    codes = _codes(match, _two_bits(match, joined) if two else joined, 2 if two else 4)
    _require(codes.shape == (rows, width // (4 if two else 2)), value, f"codes of shape {codes.shape}")
    return source, codes, 2 if two else 4


def _block(match: Matcher, value: str) -> int:
    block = match.producer(value).attributes.get("block_size")
    if not isinstance(block, int) or block not in _BLOCKS:
        raise UnsupportedGraphError(f"{value}: blocks of {block!r}")
    return block


def _two_bits(match: Matcher, joined: str) -> str:
    """The codes of 2 bits that are spread to 4: two in the lower half of each byte, then two in the upper one."""
    low, high = (match.node(one, "Unsqueeze", 2) for one in match.node(joined, "Concat", 2, axis=-1).inputs)
    codes = _spread(match, low.inputs[0])
    moved = match.node(_spread(match, high.inputs[0]), "BitShift", 2, direction="RIGHT")
    _require(moved.inputs[0] == codes and _byte(match, moved.inputs[1]) == 4, joined, "codes in an unknown order")
    _require(match.integers(low.inputs[1]) == match.integers(high.inputs[1]) == (-1,), joined, "another axis")
    return codes


def _spread(match: Matcher, value: str) -> str:
    """x of (x & 3) | ((x & 12) << 2)."""
    low, moved = match.node(value, "BitwiseOr", 2).inputs
    shift = match.node(moved, "BitShift", 2, direction="LEFT")
    first, second = (match.node(one, "BitwiseAnd", 2).inputs for one in (low, shift.inputs[0]))
    numbers = _byte(match, first[1]), _byte(match, second[1]), _byte(match, shift.inputs[1])
    _require(numbers == (3, 12, 2) and first[0] == second[0], value, "codes in an unknown form")
    return first[0]


def _unpacked(match: Matcher, value: str) -> tuple[str, int]:
    """The bytes whose codes `value` has one by one, and the bits of a code."""
    if match.op(value) != "Concat":
        return value, 8
    parts = match.producer(value)
    count = len(parts.inputs)
    bits = 8 // max(count, 1)
    match.node(value, "Concat", count, axis=-1)
    _require(bits in BY_ROW, value, f"{count} codes in a byte")
    sources = set()
    for index, part in enumerate(parts.inputs):
        column = match.node(part, "Unsqueeze", 2)
        place, mask = match.node(column.inputs[0], "BitwiseAnd", 2).inputs
        shift = 0
        if match.op(place) == "BitShift":
            moved = match.node(place, "BitShift", 2, direction="RIGHT")
            place, shift = moved.inputs[0], _byte(match, moved.inputs[1])
        fits = shift == bits * index and _byte(match, mask) == (1 << bits) - 1
        _require(fits and match.integers(column.inputs[1]) == (-1,), value, "codes in an unknown order")
        sources.add(place)
    _require(len(sources) == 1, value, "codes of several bytes")
    return sources.pop(), bits


def _unrounded(match: Matcher, value: str, step: float) -> str:
    """x of clamp(round(x / step), -128, 127)."""
    rounded, least, most = match.node(value, "Clip", 3).inputs
    source, divisor = match.node(match.node(rounded, "Round", 1).inputs[0], "Div", 2).inputs
    numbers = match.scalar(least), match.scalar(most), match.scalar(divisor)
    _require(numbers == (-128.0, 127.0, step) and step > 0, value, f"is rounded to {numbers}")
    return source


def _product(match: Matcher, value: str) -> tuple[str, str]:
    """x and the weights of x @ weights.T, computed with all rows twice."""
    split = match.node(value, "Split", 1, axis=0, num_outputs=2)
    both, weight = match.node(split.inputs[0], "Gemm", 2, transB=1).inputs
    one, other = match.node(both, "Concat", 2, axis=0).inputs
    _require(one == other, value, "two inputs of a matrix")
    return one, weight


def _less_zero(match: Matcher, value: str) -> tuple[str, float]:
    """The codes, and that of zero, of a difference in float32."""
    cast, zero = match.node(value, "Sub", 2).inputs
    return match.node(cast, "Cast", 1, to=_FLOAT).inputs[0], match.scalar(zero)


def _codes(match: Matcher, value: str, bits: int) -> NDArray[np.uint8]:
    codes: NDArray[np.uint8] = match.tensor(value, np.uint8, 2)
    _require(codes.shape[1] * 8 // bits % 32 == 0 and codes.size > 0, value, f"codes of shape {codes.shape}")
    return codes


def _plain(match: Matcher, value: str) -> tuple[NDArray[Any], WeightFormat]:
    """A matrix of plain numbers: bfloat16, whose bits are uint16, or float32."""
    numbers = match.found(value)
    form = {np.dtype(np.uint16): BFLOAT16, np.dtype(np.float32): FLOAT32}.get(numbers.dtype)
    if form is None or numbers.ndim != 2 or not numbers.size or numbers.shape[1] % 32:
        raise UnsupportedGraphError(f"{value} is no matrix of numbers")
    return numbers, form


def _bytes(numbers: NDArray[Any]) -> NDArray[np.uint8]:
    return numbers.view(np.uint8).reshape(len(numbers), -1)


def _filled(match: Matcher, value: str, shape: tuple[int, ...]) -> float:
    """The number that a tensor of that shape is full of."""
    number, size = match.node(value, "Expand", 2).inputs
    tensor = match.found(number)
    _require(match.integers(size) == shape and tensor.size == 1, value, "a tensor of another size")
    return float(tensor.reshape(-1)[0])


def _byte(match: Matcher, value: str) -> int:
    tensor = match.tensor(value, np.uint8, 1)
    _require(tensor.size == 1, value, "no single byte")
    return int(tensor[0])


def _require(condition: bool, value: str, reason: str) -> None:
    if not condition:
        raise UnsupportedGraphError(f"{value}: {reason}")
