"""How near do the matrix products of a forward come to the machine's limits, shape by shape?

    python -m benchmarks.speed.projections BUNDLE [OTHER ...] [--rows 1 8 512] [--threads N] [--rounds 5]

All steps of one shape run together, without the steps between them in a forward. So matrices that fit into a cache are
not read from memory, and for one row only the large ones are meaningful. Bundles of one model in several formats are
measured in turns; the last column is the time relative to that of the first one's matrices of the shape.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.command import add_threads, command_line, run_command, whole
from benchmarks.forwards import forward, timed
from ondevice.bundle import Bundle
from ondevice.bundle_format.weight_format import WeightFormat
from ondevice.cli.bench.tables import table
from ondevice.engines.simd.engine import SimdEngine
from ondevice.engines.simd.kernels.contract import slots
from ondevice.engines.simd.kernels.contract.matrices import BLOCK, PRODUCTS, TILE
from ondevice.engines.simd.kernels.contract.steps import Gated, Project, from_row
from ondevice.engines.simd.roofline import RooflineMeasurement


class Shape(NamedTuple):
    """Inputs and outputs of a matrix, and what the kind of product and the bits of its weights are."""

    inputs: int
    outputs: int
    bits: int
    product: int

    @property
    def format(self) -> WeightFormat:
        known = (form for (_, form), product in PRODUCTS.items() if product == self.product)
        return next(known, WeightFormat(self.bits))


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("bundles", type=Path, nargs="+", metavar="BUNDLE")
    parser.add_argument("--rows", type=whole(1, 512), nargs="+", default=[1, 8, 512], metavar="N")
    add_threads(parser)
    parser.add_argument("--rounds", type=whole(1), default=5)
    arguments = parser.parse_args()
    engines = [SimdEngine(Bundle.open(path), arguments.threads) for path in arguments.bundles]
    sessions = [engine.open_session() for engine in engines]
    plans = [by_shape(engine._program.plan().steps) for engine in engines]
    taken = defaultdict[tuple[int, int, Shape], list[float]](list)
    with RooflineMeasurement(arguments.threads) as measurement:
        for _ in range(arguments.rounds):
            measurement.read()
            for rows, (place, engine) in product(arguments.rows, enumerate(engines)):
                forward(engine, sessions[place], [1] * rows, [rows - 1])  # numbers to work on
                run, slots = engine._program.pool._run, engine._state.slots
                for shape, plan in plans[place].items():
                    taken[rows, place, shape].append(timed(partial(run, plan, slots, arguments.threads)))
    limits = measurement.median()
    first = {(rows, *shape[:2]): median(seconds) for (rows, place, shape), seconds in taken.items() if not place}
    lines = []
    for (rows, place, shape), seconds in sorted(taken.items(), key=lambda each: (each[0][0], *each[0][2][:2])):
        count, ms = len(plans[place][shape]), 1e3 * median(seconds)
        weights = shape.inputs * shape.outputs * count
        peak = 2 * weights * rows / limits.peak * 1e3 / ms
        bandwidth = weights * shape.format.stored_bits / 8 / limits.bandwidth * 1e3 / ms
        size = f"{count} x {shape.outputs} x {shape.inputs}, {shape.format.name}"
        relative = f"{ms / 1e3 / first[rows, *shape[:2]]:.2f}" if (rows, *shape[:2]) in first else ""
        lines.append([str(rows), size, f"{ms:.2f}", f"{peak:.2f}", f"{bandwidth:.2f}", relative])
    headings = ["rows", "matrices", "ms", "of dot-product peak", "of bandwidth", "of the first"]
    print(table(headings, lines, left={"matrices"}))
    print(f"\n{limits.bandwidth / 1e9:.1f} GB/s, {limits.peak / 1e9:.0f} GOPS, {arguments.threads} threads")


def by_shape(plan: NDArray[np.int64]) -> dict[Shape, NDArray[np.int64]]:
    """The projections of the layers that run on all rows, by the shape of their matrices."""
    found = defaultdict(list)
    for row in plan:
        step = from_row(row)
        if isinstance(step, Project | Gated) and step.row_set == slots.ALL:
            tiles = step.tiles() if isinstance(step, Gated) else step.tiles
            bits = step.matrix.tile_bytes // (4 * TILE * step.matrix.blocks)
            found[Shape(step.matrix.blocks * BLOCK, tiles * TILE, bits, step.matrix.product)].append(row)
    return {shape: np.array(steps) for shape, steps in found.items()}


if __name__ == "__main__":
    run_command(main)
