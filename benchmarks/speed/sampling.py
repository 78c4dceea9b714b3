"""How long does it take to choose a token from its logits?

    python -m benchmarks.speed.sampling [--vocab-size N]

Rows are random: `normal` logits with a standard deviation of 3, whose top-p sets are large, and `peaked` ones, as of a
confident model. Before each choice, memory larger than the caches is read, as a forward reads its weights, so that
neither row nor code is in a cache.
"""

from __future__ import annotations

from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.command import command_line, run_command, whole
from ondevice import machine
from ondevice.cli.bench.tables import PACKAGES, table, versions, versions_line
from ondevice.generate.request import SamplingOptions
from ondevice.generate.sampling.sampler import Sampler

OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "top_k 64, top_p 0.95 (Gemma's default)": {"top_k": 64, "top_p": 0.95},
    "top_k 64": {"top_k": 64},
    "nothing": {},
    "temperature 0.8": {"temperature": 0.8},
    "top_p 0.95": {"top_p": 0.95},
    "min_p 0.05": {"min_p": 0.05},
}
CHOICES = 31
FORWARD_BYTES = 1 << 28


def shapes(vocab_size: int) -> dict[str, NDArray[np.float32]]:
    random = np.random.default_rng(0)
    normal = (3 * random.standard_normal((CHOICES, vocab_size))).astype(np.float32)
    peaked = normal - 9
    peaked[:, random.permutation(vocab_size)[:8]] = np.arange(15, 7, -1)
    return {"normal": normal, "peaked": peaked}


def milliseconds(sampler: Sampler, rows: NDArray[np.float32], weights: NDArray[np.uint8]) -> float:
    """Median of one choice from each row."""
    times = []
    for logits in rows:
        weights.max()
        row = logits.copy()  # the engine has just written it
        started = perf_counter()
        sampler.choose(row, [])
        times.append(perf_counter() - started)
    return 1e3 * median(times)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--vocab-size", type=whole(1), default=262_144, metavar="N")
    vocab_size = parser.parse_args().vocab_size
    rows_of = shapes(vocab_size)
    weights = np.ones(FORWARD_BYTES, np.uint8)
    lines = []
    for name, chosen in OPTIONS.items():
        sampler = Sampler(SamplingOptions(**chosen, seed=0))
        lines.append([name, *(f"{milliseconds(sampler, rows, weights):.3f}" for rows in rows_of.values())])
    print(table(["options", *(f"{shape} ms" for shape in rows_of)], lines, left={"options"}), end="\n\n")
    print(f"{vocab_size} logits, median of {CHOICES}; {machine.processor_name()}, {machine.os_name()}")
    print(versions_line({"versions": versions(PACKAGES)}))


if __name__ == "__main__":
    run_command(main)
