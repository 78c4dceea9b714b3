"""The order in which x86 code of a tile's product loads, multiplies and prefetches, on any machine."""

import inspect
import re
from unittest import mock

import pytest
from llvmlite import ir

from ondevice.bundle_format.weight_format import INT4, INT4_AFFINE, INT4_TABLE, INT8, WeightFormat
from ondevice.engines.simd.kernels.contract import GROUPS, PRODUCTS
from ondevice.engines.simd.kernels.tiles import tile_product
from ondevice.native import library


def events_of(name: str, form: WeightFormat, rows: int) -> str:
    """A letter for each load of weights (l), dot product (d) and prefetch (p) of the code for an instruction set."""
    function = ir.Function(ir.Module("tile"), ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * 6), "tile")
    builder = ir.IRBuilder(function.append_basic_block())
    with mock.patch.object(library, "choice", return_value=library.LibraryChoice(name, None)):
        inspect.unwrap(tile_product)(builder, PRODUCTS[GROUPS, form], rows, *function.args)
    found = re.findall(r"= load <\d+ x i8>|vpdpbusd|llvm\.prefetch", str(function))
    return "".join({"=": "l", "v": "d", "l": "p"}[each[0]] for each in found)


@pytest.mark.parametrize("form", [INT4, INT4_AFFINE, INT4_TABLE, INT8], ids=lambda form: form.name)
@pytest.mark.parametrize(("name", "rows", "loads"), [("avx512vnni", 1, 1), ("avx512vnni", 8, 1), ("avxvnni", 4, 2)])
def test_a_cache_line_of_weights_is_multiplied_before_the_next_is_loaded(
    name: str, rows: int, loads: int, form: WeightFormat
) -> None:
    """Without AVX-512 a line is two loads, whose products with a row follow each other."""
    each = loads * 8 // form.bits
    before, after = "d" * each * (rows // 2 + 1), "d" * each * (rows - rows // 2 - 1)
    assert events_of(name, form, rows) == ("l" * loads + before + "p" + after) * form.bits


def test_more_rows_than_sums_in_registers_read_a_block_twice() -> None:
    groups = ["ll" + "dddd" * 3 + prefetch + "dddd" * after for prefetch, after in (("p", 1), ("", 1))]
    assert events_of("avxvnni", INT4, 8) == groups[0] * 4 + groups[1] * 4
