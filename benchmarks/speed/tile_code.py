"""How many instructions and cycles does a block of weights take on x86-64? Counted and simulated, not measured.

    python -m benchmarks.speed.tile_code [--llvm-mca PATH] [--rows 1 2 4 5 8]

The tile product is cross-compiled for each instruction set, and llvm-mca estimates the cycles of its innermost loop,
with weights and activations in the first level of cache. A block is 32 weights of 16 output rows. `arm_model` and the
tests read the code for ARM and x86-64 with `tile_code`.
"""

from __future__ import annotations

import inspect
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from unittest import mock

import llvmlite.binding as llvm
from llvmlite import ir

from benchmarks.command import command_line, run_command, whole
from ondevice.bundle_format.weight_format import IN_GROUPS, WeightFormat
from ondevice.cli.bench.tables import table
from ondevice.engines.simd.kernels.contract.instruction_sets import INSTRUCTION_SETS
from ondevice.engines.simd.kernels.contract.matrices import GROUPS, PRODUCTS, TILE
from ondevice.engines.simd.kernels.tiles import tile_product, tile_vectors
from ondevice.native import library
from ondevice.native.sets import SETS

ARM, X86 = "aarch64-unknown-linux-gnu", "x86_64-unknown-linux-gnu"
PRODUCT = re.compile(r"[su]dot|smmla|smull|smlal|mla|mul|({vex}\t)?vpdpbusd|vpmaddubsw")
JUMP = re.compile(r"(?:b\.|j)\w+\s+(\S+)$")

SIMULATED = {"avx2": "znver3", "avxvnni": "alderlake", "avx512vnni": "icelake-server"}
"""Instruction sets and the CPUs, by llvm-mca's names, that their code is simulated on."""
ROWS = (1, 2, 4, 5, 8)


@dataclass(frozen=True)
class TileCode:
    """The innermost loops of a tile's product: one for each pass, or one for all.

    set : the instruction set for which it was compiled
    """

    set: str
    loops: list[list[str]]
    """Instructions of each loop, without the jump back to its beginning."""
    repeats: int
    """Number of times that all loops run for a block of 32 weights of 16 output rows."""

    def count(self, pattern: str = "") -> int:
        """Number of instructions that a regular expression matches at their beginning, for a block of 32 weights of 16
        output rows.
        """
        return self.repeats * sum(bool(re.match(pattern, line)) for loop in self.loops for line in loop)

    def cycles(self, mca: str, cpu: str) -> float:
        """Cycles of one core for such a block, as llvm-mca simulates them; `cpu` is its name of the CPU."""
        command = [mca, f"-mtriple={_triple(self.set)}", f"-mcpu={cpu}", f"-mattr={SETS[self.set].features}"]
        total = 0.0
        for loop in self.loops:
            answer = subprocess.run(
                [*command, "-iterations=100"], input="\n".join(loop), capture_output=True, text=True, check=True
            ).stdout
            found = re.search(r"Total Cycles:\s+(\d+)", answer)
            assert found, answer
            total += int(found[1]) / 100
        return self.repeats * total


def tile_code(name: str, form: WeightFormat, rows: int) -> TileCode:
    """Compile for an instruction set and a format in groups of 32 weights."""
    isa = INSTRUCTION_SETS[name]
    loops = [body for body in _loops(_assembly(name, form, rows)) if any(map(PRODUCT.match, body))]
    passes = TILE // isa.lanes // tile_vectors(isa, rows)
    if not loops or passes % len(loops):
        raise AssertionError(f"{passes} passes in {len(loops)} loops")
    return TileCode(name, loops, passes // len(loops))


def _triple(name: str) -> str:
    return ARM if INSTRUCTION_SETS[name].by_lane else X86


def _assembly(name: str, form: WeightFormat, rows: int) -> str:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = ir.Module("tile")
    module.triple = _triple(name)
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * 7), "tile")
    builder = ir.IRBuilder(function.append_basic_block())
    with mock.patch.object(library, "choice", return_value=library.LibraryChoice(name, None)):
        inspect.unwrap(tile_product)(builder, PRODUCTS[GROUPS, form], rows, *function.args)
    builder.ret_void()
    machine = llvm.Target.from_triple(module.triple).create_target_machine(
        cpu=SETS[name].cpu, features=SETS[name].features, opt=3
    )
    parsed = llvm.parse_assembly(str(module))
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    passes.getModulePassManager().run(parsed, passes)
    return str(machine.emit_assembly(parsed))


def _loops(assembly: str) -> Iterator[list[str]]:
    """The instructions between a label and the jump back to it, for all loops that contain no other label."""
    label, body = "", list[str]()
    for line in (re.split(r"//|\s# ?|\t#", text)[0].strip() for text in assembly.splitlines()):
        jump = JUMP.match(line)
        if line.endswith(":"):
            label, body = line[:-1], []
        elif jump and jump[1] == label:
            yield body
            body = []
        elif line and not line.startswith("."):
            body.append(line)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--llvm-mca", default="llvm-mca", metavar="PATH")
    parser.add_argument("--rows", type=whole(1, 8), nargs="+", default=list(ROWS), metavar="N", help="1 to 8")
    arguments = parser.parse_args()
    lines = []
    for (name, cpu), form in product(SIMULATED.items(), IN_GROUPS):
        codes = [tile_code(name, form, rows) for rows in arguments.rows]
        cells = [f"{code.count()} / {code.cycles(arguments.llvm_mca, cpu):.0f}" for code in codes]
        lines.append([name, cpu, form.name, *cells])
    print("Instructions and cycles of a block, by rows:\n")
    print(table(["set", "CPU", "format", *map(str, arguments.rows)], lines, left={"set", "CPU", "format"}))


if __name__ == "__main__":
    run_command(main)
