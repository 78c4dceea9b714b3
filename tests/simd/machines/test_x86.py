"""The order in which x86 code of a tile's product loads, multiplies and prefetches, on any machine."""

import inspect
import re
from unittest import mock

import pytest
from llvmlite import ir

from benchmarks.speed.tile_code import tile_code
from ondevice.bundle_format.weight_format import INT4, INT4_AFFINE, INT4_TABLE, INT8, MXFP4, WeightFormat
from ondevice.engines.simd.kernels.contract.matrices import GROUPS, PRODUCTS
from ondevice.engines.simd.kernels.tiles import STREAM_ROWS, tile_product
from ondevice.native import library


def events_of(name: str, form: WeightFormat, rows: int) -> str:
    """A letter for each load of weights (l), dot product (d) and prefetch (p) of the code for an instruction set."""
    function = ir.Function(ir.Module("tile"), ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * 7), "tile")
    builder = ir.IRBuilder(function.append_basic_block())
    with mock.patch.object(library, "choice", return_value=library.LibraryChoice(name, None)):
        inspect.unwrap(tile_product)(builder, PRODUCTS[GROUPS, form], rows, *function.args)
    found = re.findall(r"= load <\d+ x i8>|vpdpbusd|llvm\.prefetch", str(function))
    return "".join({"=": "l", "v": "d", "l": "p"}[each[0]] for each in found)


@pytest.mark.parametrize("form", [INT4, INT4_AFFINE, INT4_TABLE, MXFP4, INT8], ids=lambda form: form.name)
@pytest.mark.parametrize(("name", "rows", "loads"), [("avx512vnni", 1, 1), ("avx512vnni", 12, 1), ("avxvnni", 4, 2)])
def test_a_cache_line_of_weights_is_multiplied_before_the_next_is_loaded(
    name: str, rows: int, loads: int, form: WeightFormat
) -> None:
    """Without AVX-512 a line is two loads, whose products with a row follow each other, low codes before high ones."""
    codes = 8 // form.bits
    each, steps = (codes, 1) if loads == 1 else (loads, codes)
    scales, prefetches = ("p", "pp") if name == "avx512vnni" else ("", "p")
    first = "d" * each * (rows // 2 + 1) + prefetches + "d" * each * (rows - rows // 2 - 1)
    assert events_of(name, form, rows) == scales + ("l" * loads + first + "d" * each * rows * (steps - 1)) * form.bits


def test_more_rows_than_sums_in_registers_read_a_block_twice() -> None:
    turns = ["ll" + "dd" * 3 + prefetch + "dd" * 5 for prefetch in ("p", "")]
    assert events_of("avxvnni", INT4, 8) == turns[0] * 4 + turns[1] * 4


MOST = {
    ("avx2", INT4): {1: 97, 4: 270, 8: 530},
    ("avx2", INT8): {1: 132, 4: 411, 8: 803},
    ("avxvnni", INT4): {1: 79, 4: 188, 8: 366},
    ("avxvnni", INT8): {1: 66, 4: 175, 8: 337},
    ("avx512vnni", INT4): {1: 44, 4: 82, 8: 132, 12: 183},
    ("avx512vnni", INT8): {1: 44, 4: 82, 8: 132, 12: 183},
}
"""Limits of instructions per block of 32 weights of 16 output rows, by set, format and rows: LLVM 22's plus 5 %."""


@pytest.mark.parametrize(("name", "form"), MOST, ids=lambda value: getattr(value, "name", value))
def test_the_tile_takes_no_more_instructions(name: str, form: WeightFormat) -> None:
    products, pattern = {
        "avx2": (16, "vpmaddubsw"),
        "avxvnni": (16, r"{vex}\tvpdpbusd"),
        "avx512vnni": (8, "vpdpbusd"),
    }[name]
    for rows, most in MOST[name, form].items():
        code = tile_code(name, form, rows)
        assert code.count() <= most, (rows, code.count())
        assert code.count(pattern) == products * rows
        assert code.count("prefetcht1") == form.bits, "one prefetch per line of 64 bytes"
        second = {"prefetchnta": 0, "prefetcht0": 0}
        if name == "avx512vnni":
            second["prefetcht0"] = 1  # of scales
            second["prefetchnta" if rows <= STREAM_ROWS[form.bits] else "prefetcht0"] += form.bits
        assert {kind: code.count(kind) for kind in second} == second


@pytest.mark.parametrize("rows", [1, 4, 8])
def test_avx2_widens_the_sums_of_a_block_of_4_bits_once(rows: int) -> None:
    assert tile_code("avx2", INT4, rows).count("vpmaddwd") == 2 * rows
