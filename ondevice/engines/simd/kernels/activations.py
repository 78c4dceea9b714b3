"""The layout of activations, rows that a matrix reads; how they are quantised, and the norms that come before.

Rows lie in groups of up to MAX_GROUP_ROWS, the rows of one tile product. A form is an integer: the layout in its upper
bits (`form >> FORM_SHIFT`), a parameter in the lower ones. It says how a matrix reads its rows, in blocks of 32:

- GROUPS, with the code of a zero weight: [block][row] of ROW_BYTES, of which 44 are used: 32 int8 q, int32 start,
  float32 scale and shift. `tiles` explains start and shift. With SUMS in place of the code, for weights with minimums,
  float32 sum = scale * sum(q) takes the place of start, which would be ORIGIN_BITS because the zero code is 0. On
  instruction sets that multiply pairs of rows, groups of PAIRED_ROWS or more are [block][pair]: int8 q[4][2][8], int32
  start[2][2], float32 scale[2][2] and shift[2][2], the last dimension but for q being the row, and q in the order of
  `formats.paired_codes`. A last single row has that order too, q[4][8].
- STEPS, with the bits of a float32 step s, the same for all rows: int8 codes clamp(round(x / s), -128, 127) as
  [block][row][32], then int32 sums of the codes [row][block], then the sums of whole rows [row], which `sum_codes`
  writes.
- FLOATS: float32 [row][number].
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ondevice.engines.simd.kernels.contract.instruction_sets import instruction_set
from ondevice.engines.simd.kernels.contract.matrices import (
    FORM_SHIFT,
    GROUPS,
    PAIRED_BYTES,
    STEPS,
    SUMS,
)
from ondevice.engines.simd.kernels.isa.memory import bits_float, float_bits, read_f32, read_i8, read_i32, write_i32
from ondevice.engines.simd.kernels.isa.vector import (
    fma,
    full,
    largest_bits,
    load,
    maximum,
    minimum,
    round_even,
    store,
    store_paired_int8,
    store_rounded_int8,
    sum_lanes,
)
from ondevice.native.functions import kernel

ACTIVATION_BYTES = 44
"""Bytes of a quantised block of activations: 32 int8 `q`, int32 `start` or float32 `sum`, float32 `scale`, `shift`."""
START, SCALE, SHIFT = 32, 36, 40
"""Offsets of `start`, or `sum`, and of `scale` and `shift` in such a block."""
PAIRED_ROWS = 4
"""Fewest rows of a group that lie in pairs, on instruction sets that multiply pairs of rows. Three rows would take 1.07
times as many instructions in pairs."""
PAIR_START, PAIR_SCALE, PAIR_SHIFT = 64, 80, 96
"""Offsets of `start`, `scale` and `shift` of a pair of rows."""
PAIRS = instruction_set().pairs
MAX_GROUP_ROWS = instruction_set().group_rows
"""Most rows of a group on this instruction set."""
ROW_BYTES = PAIRED_BYTES if PAIRS else ACTIVATION_BYTES
"""Bytes of a row's block of GROUPS on this instruction set, whether it lies in a pair or not."""

ORIGIN, ORIGIN_BITS = np.float32(1.5 * 2**23), 0x4B400000
"""The float32 at which integer dot products are summed in the bits of floats: see `tiles`."""

_MIN_SCALE, _MAX_SCALE = np.float32(2.0**-100), np.float32(2.0**104)
"""Bounds of the scale of a block. Beyond 2**104 the product of scale and ORIGIN would be infinite."""
_ONE, _PART = np.float32(1.0), np.float32(1 / 127)


@kernel
def quantize_block(low: Any, high: Any, zero: int, out: int, row: int, rows: int) -> None:
    """Write a block of GROUPS: q = round(x / scale) of 32 numbers, the scale being a 127th of the largest |x|.

    The scale has two bits of precision less than a float32, so that its product with ORIGIN is exact. Where it is over
    2**104, or a number is NaN, scale and shift are NaN and so are all products of the block: an int8 code has no NaN,
    and products of other codes would be numbers without meaning.

    Args:
        low, high: the numbers, 16 lanes each.
        zero: the code of a zero weight in the matrix that reads the block, or SUMS.
        out: address of the block of all rows of the group.
        row, rows: number of the row in the group, and their number.
    """
    largest = bits_float(np.int32(largest_bits(low, high)))  # NaN if a number is
    scale = bits_float(np.int32(float_bits(largest * _PART) & ~3))
    if scale < _MIN_SCALE:
        scale = _MIN_SCALE
    elif not scale <= _MAX_SCALE:
        scale = np.float32(np.nan)
    inverse = full(_ONE / scale)
    low = round_even(low * inverse)
    high = round_even(high * inverse)
    total = sum_lanes(low + high)
    start = np.int32(float_bits(scale * total)) if zero == SUMS else np.int32(ORIGIN_BITS - zero * np.int64(total))
    scale_bits, shift_bits = np.int32(float_bits(scale)), np.int32(float_bits(-ORIGIN * scale))
    if PAIRS and rows >= PAIRED_ROWS:
        place, count = row % 2, min(2, rows - row // 2 * 2)
        out += ROW_BYTES * (row - place)
        store_paired_int8(out + 8 * place, 8 * count, low)
        store_paired_int8(out + 8 * place + 16 * count, 8 * count, high)
        write_factors(out, place, count, start, scale_bits, shift_bits)
    else:
        out += ROW_BYTES * row
        store_rounded_int8(out, low)
        store_rounded_int8(out + 16, high)
        write_factors(out, np.int64(0), np.int64(1), start, scale_bits, shift_bits)


@kernel
def write_factors(out: int, place: int, count: int, start: int, scale: int, shift: int) -> None:
    """Write `start`, and the bits of `scale` and `shift`, of row `place` of the `count` rows that lie together."""
    if count == 1:
        write_i32(out + START, start)
        write_i32(out + SCALE, scale)
        write_i32(out + SHIFT, shift)
    else:
        for at in (4 * place, 4 * place + 8):
            write_i32(out + PAIR_START + at, start)
            write_i32(out + PAIR_SCALE + at, scale)
            write_i32(out + PAIR_SHIFT + at, shift)


@kernel
def copy_block(source: int, out: int, row: int, rows: int) -> None:
    """Copy a block of GROUPS of a row that is a group of its own. Other arguments as in `quantize_block`."""
    if PAIRS and rows >= PAIRED_ROWS:
        place, count = row % 2, min(2, rows - row // 2 * 2)
        out += ROW_BYTES * (row - place)
        for word in range(8):
            at = 8 * count * (word // 4 * 2 + word % 2) + 8 * place + word // 2 % 2 * 4
            write_i32(out + at, read_i32(source + 4 * word))
        start, scale, shift = read_i32(source + START), read_i32(source + SCALE), read_i32(source + SHIFT)
        write_factors(out, place, count, start, scale, shift)
    else:
        for at in range(0, ACTIVATION_BYTES, 4):
            write_i32(out + ROW_BYTES * row + at, read_i32(source + at))


_LEAST, _MOST = np.float32(-128.0), np.float32(127.0)


@kernel
def group_address(form: int, activations: int, first: int, blocks: int) -> Any:
    """The address of the group of rows that begins with row `first`, a multiple of MAX_GROUP_ROWS."""
    kind = form >> FORM_SHIFT
    if kind == GROUPS:
        return activations + first * ROW_BYTES * blocks
    return activations + first * (36 * blocks + 4 if kind == STEPS else 128 * blocks)


@kernel
def write_input(low: Any, high: Any, form: int, activations: int, row: int, rows: int, block: int, blocks: int) -> None:
    """Write a block of a row of activations.

    Args:
        low, high: 32 numbers, 16 lanes each.
        form: form of the activations.
        activations: address of `rows` rows of `blocks` blocks.
        row, block: the row and the block to write.
    """
    kind, place = form >> FORM_SHIFT, row % MAX_GROUP_ROWS
    first = row - place
    members = min(MAX_GROUP_ROWS, rows - first)
    at = group_address(form, activations, first, blocks)
    if kind == GROUPS:
        quantize_block(low, high, form & (SUMS | 0xFF), at + ROW_BYTES * block * members, place, members)
    elif kind == STEPS:
        step = full(bits_float(np.int32(form & 0xFFFFFFFF)))
        low, high = to_codes(low, step), to_codes(high, step)
        to = at + 32 * (block * members + place)
        store_rounded_int8(to, low)
        store_rounded_int8(to + 16, high)
        write_i32(at + 32 * blocks * members + 4 * (place * blocks + block), np.int32(sum_lanes(low + high)))
    else:
        to = at + 128 * (place * blocks + block)
        store(to, low)
        store(to + 64, high)


@kernel
def read_groups(activations: int, blocks: int, out: np.ndarray) -> None:
    """See `contract.entries.read_groups`."""
    for first in range(0, len(out), MAX_GROUP_ROWS):
        rows = min(MAX_GROUP_ROWS, len(out) - first)
        for block in range(blocks):
            group = activations + ROW_BYTES * (blocks * first + block * rows)
            for row in range(rows):
                paired = PAIRS and rows >= PAIRED_ROWS
                place = row % 2 if paired else 0
                together = min(2, rows - row + place) if paired else 1
                at = group + ROW_BYTES * (row - place)
                scale = read_f32(at + (SCALE if together == 1 else PAIR_SCALE + 4 * place))
                for i in range(32):
                    word = i // 4
                    part = 8 * together * (word // 4 * 2 + word % 2) + 8 * place + word // 2 % 2 * 4 + i % 4
                    out[first + row, 32 * block + i] = scale * np.float32(read_i8(at + (part if paired else i)))


@kernel
def to_codes(x: Any, step: Any) -> Any:
    """clamp(round(x / step), -128, 127), ties to even, as whole floats; -128 for NaN."""
    return round_even(minimum(maximum(full(_LEAST), x / step), full(_MOST)))


@kernel
def sum_codes(form: int, activations: int, rows: int, blocks: int) -> None:
    """Write the sums of whole rows in the form STEPS, once all blocks are written.

    Every thread that reads the rows calls it; all write the same numbers. Other forms have no sums.
    """
    if form >> FORM_SHIFT != STEPS:
        return
    for first in range(0, rows, MAX_GROUP_ROWS):
        members = min(MAX_GROUP_ROWS, rows - first)
        sums = group_address(form, activations, first, blocks) + 32 * blocks * members
        for row in range(members):
            total = np.int32(0)
            for block in range(blocks):
                total = np.int32(total + read_i32(sums + 4 * (row * blocks + block)))
            write_i32(sums + 4 * (members * blocks + row), total)


# Norms of single rows: addresses of float32[width], width a multiple of 32.


@kernel
def inverse_rms(x: int, width: int, eps: float) -> Any:
    """(mean(x**2) + eps)**-0.5 of x float32[width], in four sums that are added pairwise."""
    a = full(np.float32(0.0))
    b, c, d = a, a, a
    i = 0
    while i + 64 <= width:
        p, q, r, s = load(x + 4 * i), load(x + 4 * i + 64), load(x + 4 * i + 128), load(x + 4 * i + 192)
        a, b, c, d = fma(p, p, a), fma(q, q, b), fma(r, r, c), fma(s, s, d)
        i += 64
    while i < width:
        p = load(x + 4 * i)
        a = fma(p, p, a)
        i += 16
    total = sum_lanes((a + b) + (c + d))
    return _ONE / np.sqrt(total / np.float32(width) + eps)


@kernel
def add_normed(h: int, x: int, weight: int, scalar: int, width: int, eps: float) -> None:
    """h = (h + x * inverse_rms(x) * weight) * scalar, all float32[width].

    scalar : address of one float32; 0 for the factor 1
    """
    scale = full(inverse_rms(x, width, eps))
    factor = full(read_f32(scalar) if scalar else _ONE)
    for i in range(0, 4 * width, 64):
        store(h + i, (load(h + i) + (load(x + i) * scale) * load(weight + i)) * factor)


@kernel
def norm(x: int, weight: int, out: int, width: int, eps: float) -> None:
    """out = x * inverse_rms(x) * weight, all float32[width]; `out` may be `x`."""
    scale = full(inverse_rms(x, width, eps))
    for i in range(0, 4 * width, 64):
        store(out + i, (load(x + i) * scale) * load(weight + i))


@kernel
def quantize_row(x: int, activations: int, row: int, rows: int, width: int, form: int) -> None:
    """Quantise x float32[width] to row `row` of activations of `rows` rows, in a form."""
    blocks = width // 32
    for block in range(blocks):
        at = x + 128 * block
        write_input(load(at), load(at + 64), form, activations, row, rows, block, blocks)


@kernel
def norm_quantize_row(
    x: int, weight: int, activations: int, row: int, rows: int, width: int, form: int, eps: float
) -> None:
    """`quantize_row` of x * inverse_rms(x) * weight."""
    scale = full(inverse_rms(x, width, eps))
    blocks = width // 32
    for block in range(blocks):
        i = 128 * block
        low = (load(x + i) * scale) * load(weight + i)
        high = (load(x + i + 64) * scale) * load(weight + i + 64)
        write_input(low, high, form, activations, row, rows, block, blocks)
