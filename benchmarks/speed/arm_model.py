"""How fast would Gemma 4 E2B be on a Raspberry Pi? Computed from instructions and memory, not measured.

    python -m benchmarks.speed.arm_model [--llvm-mca PATH]

The tile product is cross-compiled for both boards, and llvm-mca estimates the cycles of its loops. Versions up to 16
treat a Neoverse N1 as a Cortex-A57, and are refused; the published table is LLVM 19's. No version has the Cortex-A76;
the N1 is the same core for servers. A matrix product takes the longer of the time for its cycles and the time for its
bytes. Attention, norms, sampling and barriers are left out, and memory is as fast as for a program that does nothing
but read it.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass

from benchmarks.command import command_line, run_command
from benchmarks.speed.tile_code import ROWS, tile_code
from ondevice.bundle_format.weight_format import IN_GROUPS, INT4
from ondevice.cli.bench.tables import table
from ondevice.errors import UsageError

WEIGHTS = 1_876_000_000 + 403_000_000
"""Weights of E2B's matrices, the head included, that a token reads."""
PREFILL_WEIGHTS = 578_000_000
"""Weights of layers 0 to 14, which a prefill computes for every row; the others share keys and values and run for the
last row only.
"""
BLOCK_WEIGHTS, BLOCK_BYTES = 32 * 16, 288
"""Weights and bytes, with scales, of a block of 16 output rows."""


@dataclass(frozen=True)
class Board:
    """A Raspberry Pi."""

    name: str
    set: str
    """Its instruction set, for which the product is compiled."""
    simulated: str
    """Name of a CPU for llvm-mca."""
    hertz: float
    bandwidth: float
    """Memory bandwidth of four cores together, bytes per second."""


BOARDS = (
    Board("Pi 5", "neon-dotprod", "neoverse-n1", 2.4e9, 12e9),
    Board("Pi 4", "neon", "cortex-a72", 1.8e9, 4.5e9),
)
CORES = 4
OLDEST_LLVM = 17
"""The first version that simulates a Neoverse N1."""


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--llvm-mca", default="llvm-mca", metavar="PATH")
    mca = parser.parse_args().llvm_mca
    check_version(mca)
    counts, model = [], []
    for board in BOARDS:
        taken = {}
        for form in IN_GROUPS:
            for rows in ROWS:
                code = tile_code(board.set, form, rows)
                taken[form, rows] = code.cycles(mca, board.simulated)
                numbers = [rows, code.count(), code.count("sdot|smull|smlal"), round(taken[form, rows])]
                counts.append([board.name, form.name, *map(str, numbers)])
        step, five, eight = (1e3 * seconds(board, WEIGHTS, taken[INT4, rows]) for rows in (1, 5, 8))
        prefill = 8 / seconds(board, PREFILL_WEIGHTS, taken[INT4, 8])
        figures = [f"{1e3 / step:.1f}", f"{step:.0f}", f"{five:.0f}", f"{eight:.0f}", f"{prefill:.0f}"]
        model.append([board.name, *figures])
    print("Per block of 32 weights of 16 output rows:\n")
    print(table(["board", "weights", "rows", "instructions", "of them products", "cycles"], counts, left={"board"}))
    print("\nThe model, for int4 weights and an int4 head; nothing of it was measured on a Pi:\n")
    print(
        table(["board", "decode tok/s", "1 row ms", "5 rows ms", "8 rows ms", "prefill tok/s"], model, left={"board"})
    )


def check_version(mca: str) -> None:
    """
    Raises:
        UsageError: this llvm-mca is older than OLDEST_LLVM.
    """
    answer = subprocess.run([mca, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"LLVM version (\d+)", answer)
    if found and int(found[1]) < OLDEST_LLVM:
        raise UsageError(f"{mca} is of LLVM {found[1]}, which does not know the Neoverse N1: name one of 17 or later")


def seconds(board: Board, weights: int, block_cycles: float) -> float:
    """Seconds of a forward's matrix products on all cores."""
    blocks = weights / BLOCK_WEIGHTS
    return max(blocks * block_cycles / (CORES * board.hertz), blocks * BLOCK_BYTES / board.bandwidth)


if __name__ == "__main__":
    run_command(main)
