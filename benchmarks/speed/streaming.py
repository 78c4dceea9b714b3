"""How much faster are forwards that stream their weights past the caches, on this CPU?

    python -m benchmarks.speed.streaming BUNDLE [--rows 1 2 3] [--rounds N] [--threads N]

Two engines on the same pack take turns, of which one streams the weights and the other does not, whatever the engine
would do here; with AVX-512 alone that makes a difference. Beside each pair of forwards the memory's bandwidth is
measured. Where other virtual machines share it, it may change several times within a run: then slow and fast rounds
are told apart.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import NamedTuple
from unittest import mock

from benchmarks.command import add_threads, command_line, machine_lines, run_command, whole
from benchmarks.forwards import forward, read, timed
from ondevice.bundle import Bundle
from ondevice.cli.bench.tables import table
from ondevice.engines.simd.engine import SimdEngine
from ondevice.engines.simd.plan import builder
from ondevice.engines.simd.roofline import RooflineMeasurement

CACHED = 64
REPEATS = 5
UNEVEN = 1.3
"""Fastest over slowest bandwidth from which slow and fast rounds are told apart."""


class Round(NamedTuple):
    """Seconds of a forward without and with streamed weights, and bytes per second that the memory was read with."""

    kept: float
    streamed: float
    bandwidth: float


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--rows", type=whole(1, 64), nargs="+", default=[1, 2, 3], metavar="N")
    parser.add_argument("--rounds", type=whole(1), default=40)
    add_threads(parser)
    arguments = parser.parse_args()
    rounds, threads = defaultdict[int, list[Round]](list), arguments.threads
    bundle = Bundle.open(arguments.bundle)
    engines = [opened(bundle, threads, streamed=streamed) for streamed in (False, True)]
    sessions = [engine.open_session() for engine in engines]
    for engine, session in zip(engines, sessions, strict=True):
        read(engine, session, tokens_of(CACHED))
    with RooflineMeasurement(threads) as measurement:
        for number, rows in product(range(arguments.rounds), arguments.rows):
            seconds = [0.0, 0.0]
            for place in (0, 1) if number % 2 else (1, 0):
                engine, session = engines[place], sessions[place]
                work = partial(forward, engine, session, tokens_of(rows), range(rows))
                seconds[place] = median(timed(work) for _ in range(REPEATS))
            kept, streamed = seconds
            rounds[rows].append(Round(kept, streamed, measurement.read().bandwidth))
    headings = ["rows", "memory, GB/s", "rounds", "ms", "streamed, ms", "ratio"]
    print(table(headings, [line for rows, found in rounds.items() for line in lines(rows, found)], left=set()))
    print(f"\n{machine_lines(bundle.manifest.name, threads)}")


def opened(bundle: Bundle, threads: int, *, streamed: bool) -> SimdEngine:
    """An engine that streams its weights, or does not."""
    with mock.patch.object(builder, "pays_to_stream", return_value=streamed):
        return SimdEngine(bundle, threads)


def tokens_of(count: int) -> list[int]:
    """Some tokens, different ones as far as a small vocabulary has them."""
    return [1 + 7919 * index % 4096 for index in range(count)]


def lines(rows: int, rounds: list[Round]) -> list[list[str]]:
    """A line of the table, or two if the memory was much faster in some rounds than in others."""
    speeds = [each.bandwidth for each in rounds]
    least, most = min(speeds), max(speeds)
    middle = (least + most) / 2 if most > UNEVEN * least else 0.0
    groups = ([each for each in rounds if (each.bandwidth >= middle) == fast] for fast in (False, True))
    return [line(rows, group) for group in groups if group]


def line(rows: int, rounds: list[Round]) -> list[str]:
    """A line of the table."""
    kept, streamed, bandwidth = (median(values) for values in zip(*rounds, strict=True))
    ratio = median(each.streamed / each.kept for each in rounds)
    times = (f"{1e3 * seconds:.2f}" for seconds in (kept, streamed))
    return [str(rows), f"{bandwidth / 1e9:.1f}", str(len(rounds)), *times, f"{ratio:.2f}"]


if __name__ == "__main__":
    run_command(main)
