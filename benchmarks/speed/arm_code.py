"""Cross-compile the tile product for ARM, to read its code and count its instructions on any machine."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock

import llvmlite.binding as llvm
from llvmlite import ir

from ondevice.bundle_format.weight_format import WeightFormat
from ondevice.engines.simd.kernels.contract import GROUPS, INSTRUCTION_SETS, PRODUCTS, TILE
from ondevice.engines.simd.kernels.isa.dot import vectors_of_a_pass
from ondevice.engines.simd.kernels.tiles import tile_product
from ondevice.native import library
from ondevice.native.sets import SETS

TRIPLE = "aarch64-unknown-linux-gnu"
PRODUCT = re.compile("[su]dot|smmla|smull|smlal|mla|mul")


@dataclass(frozen=True)
class TileCode:
    """The innermost loops of a tile's product: one for each pass, or one for all."""

    loops: list[list[str]]
    """Instructions of each loop, without the jump back to its beginning."""
    repeats: int
    """Number of times that all loops run for a block of 32 weights of 16 output rows."""

    def count(self, pattern: str = "") -> int:
        """Number of instructions that match a regular expression, for a block of 32 weights of 16 output rows."""
        return self.repeats * sum(bool(re.match(pattern, line)) for loop in self.loops for line in loop)


def tile_code(name: str, form: WeightFormat, rows: int) -> TileCode:
    """Compile for an instruction set of ARM and a format in groups of 32 weights."""
    assembly = _assembly(name, form, rows)
    loops = [body for body in _loops(assembly) if any(PRODUCT.match(line) for line in body)]
    isa = INSTRUCTION_SETS[name]
    passes = TILE // isa.lanes // vectors_of_a_pass(isa, rows)
    if not loops or passes % len(loops):
        raise AssertionError(f"{passes} passes in {len(loops)} loops")
    return TileCode(loops, passes // len(loops))


def _assembly(name: str, form: WeightFormat, rows: int) -> str:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = ir.Module("tile")
    module.triple = TRIPLE
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * 6), "tile")
    builder = ir.IRBuilder(function.append_basic_block())
    with mock.patch.object(library, "choice", return_value=library.LibraryChoice(name, None)):
        inspect.unwrap(tile_product)(builder, PRODUCTS[GROUPS, form], rows, *function.args)
    builder.ret_void()
    machine = llvm.Target.from_triple(TRIPLE).create_target_machine(
        cpu=SETS[name].cpu, features=SETS[name].features, opt=3
    )
    parsed = llvm.parse_assembly(str(module))
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    passes.getModulePassManager().run(parsed, passes)
    return str(machine.emit_assembly(parsed))


def _loops(assembly: str) -> Iterator[list[str]]:
    """The instructions between a label and the jump back to it, for all loops that contain no other label."""
    label, body = "", list[str]()
    for line in (text.split("//")[0].strip() for text in assembly.splitlines()):
        if line.endswith(":"):
            label, body = line[:-1], []
        elif line.startswith("b.") and line.split()[-1] == label:
            yield body
            body = []
        elif line and not line.startswith("."):
            body.append(line)
