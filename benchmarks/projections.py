"""The matrices of a forward alone: how near each shape comes to the machine's limits.

    python -m benchmarks.projections BUNDLE [--rows 1 8 512] [--threads N] [--rounds 5]

All steps of one shape run together, without the steps between them in a forward. So matrices that fit into a cache are
not read from memory, and for one row only the large ones are meaningful.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import NDArray

from ondevice import machine
from ondevice.bundle import Bundle
from ondevice.cli.bench.tables import table
from ondevice.engines.protocol import Rows, TokenTree
from ondevice.engines.simd.engine import SimdEngine
from ondevice.engines.simd.kernels.matmul.sizes import BLOCK, GROUPS4, GROUPS8, TILE
from ondevice.engines.simd.kernels.steps import slots
from ondevice.engines.simd.kernels.steps.layouts import Gated, Project, from_row
from ondevice.engines.simd.roofline import RooflineMeasurement

Shape = tuple[int, int, int, bool]
"""Inputs, outputs and bits of a matrix, and whether its weights have scales in groups."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 512], metavar="N")
    parser.add_argument("--threads", type=int, default=machine.default_threads())
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    engine = SimdEngine(Bundle.open(arguments.bundle), arguments.threads)
    session = engine.open_session()
    steps = by_shape(engine._program.plan().steps)
    taken = defaultdict(list)
    with RooflineMeasurement(arguments.threads) as measurement:
        for _ in range(arguments.rounds):
            measurement.read()
            for rows in arguments.rows:
                engine.forward([Rows(session, TokenTree.chain([1] * rows), [rows - 1])])  # numbers to work on
                for shape, plan in steps.items():
                    started = time.perf_counter()
                    engine._program.pool._run(plan, engine._state.slots, arguments.threads)
                    taken[rows, shape].append(time.perf_counter() - started)
    limits = measurement.median()
    lines = []
    for (rows, (inputs, outputs, bits, grouped)), seconds in taken.items():
        plan, ms = steps[inputs, outputs, bits, grouped], 1e3 * median(seconds)
        weights = inputs * outputs * len(plan)
        peak = 2 * weights * rows / limits.peak * 1e3 / ms
        bandwidth = weights * (bits + grouped / 2) / 8 / limits.bandwidth * 1e3 / ms
        size = f"{len(plan)} x {outputs} x {inputs}, int{bits}"
        lines.append([str(rows), size, f"{ms:.2f}", f"{peak:.2f}", f"{bandwidth:.2f}"])
    print(table(["rows", "matrices", "ms", "of dot-product peak", "of bandwidth"], lines, left={"matrices"}))
    print(f"\n{limits.bandwidth / 1e9:.1f} GB/s, {limits.peak / 1e9:.0f} GOPS, {arguments.threads} threads")


def by_shape(plan: NDArray[np.int64]) -> dict[Shape, NDArray[np.int64]]:
    """The projections of the layers that run on all rows, by the shape of their matrices."""
    found = defaultdict(list)
    for row in plan:
        step = from_row(row)
        if isinstance(step, Project | Gated) and step.row_set == slots.ALL:
            tiles = step.tiles() if isinstance(step, Gated) else step.tiles
            bits = step.tile_bytes // (4 * TILE * step.blocks)
            found[step.blocks * BLOCK, tiles * TILE, bits, step.product in (GROUPS4, GROUPS8)].append(row)
    return {shape: np.array(steps) for shape, steps in found.items()}


if __name__ == "__main__":
    main()
