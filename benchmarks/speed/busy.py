"""How fast is decoding while other processes use the cores?

    python -m benchmarks.speed.busy BUNDLE [--engines simd ort] [--loads 0 1 2 "1 nice"] [--seconds N] [--repeats N]
    python -m benchmarks.speed.busy BUNDLE --batched-bench PROGRAM --gguf FILE    # with llama.cpp's figures

Plain decoding of random ids, with one thread and with all. `simd` chooses the number of threads by its speed; "always"
is the same engine on all threads always. The busy processes are started by this script and end with it; a line that
follows another one shows too how soon the engine notices that the load has changed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
from tqdm import tqdm

from benchmarks.command import command_line, run_command, seconds, whole
from benchmarks.peers.llama_programs import BatchedBench, add_batched_bench, batched_benches
from ondevice import machine
from ondevice.cli.bench.tables import setup, setup_line, table, versions_line
from ondevice.engines.choice import EngineName
from ondevice.model import Model, load

PROMPT_TOKENS = 64
WARM_UP_S = 1.0
LLAMA_TOKENS = 24

BUSY = "import time\nend = time.monotonic() + {seconds}\nwhile time.monotonic() < end: sum(range(10_000))"
"""A busy process, which ends by itself in case this one is killed."""


class AllThreads:
    """Replaces `ThreadChoice`: always all threads."""

    tried = trying = False

    def __init__(self, most: int, *_: object) -> None:
        self.threads = most

    def observe(self, *_: float) -> None: ...


@dataclass(frozen=True)
class Contender:
    """`always` : runs on all its threads even if fewer are faster"""

    engine: EngineName
    threads: int
    always: bool = False

    @property
    def name(self) -> str:
        return f"{self.engine}, {self.threads}{' always' if self.always else ''}"

    def load(self, bundle: Path) -> Model:
        model = load(bundle, engine=self.engine, threads=self.threads)
        if self.always:
            with patch("ondevice.engines.simd.threads.ThreadChoice", AllThreads):
                decode(model, WARM_UP_S)
        return model


class Load(NamedTuple):
    """Busy processes, and whether they have the lowest priority."""

    processes: int
    nice: bool = False

    def __str__(self) -> str:
        return f"{self.processes} nice" if self.nice else str(self.processes)

    @classmethod
    def parse(cls, text: str) -> Load:
        """The load of an argument."""
        match = re.fullmatch(r"(\d{1,3})( nice)?", text)
        if match is None:
            raise argparse.ArgumentTypeError(f'a load is a number such as 2, or "2 nice", not {text!r}')
        return cls(int(match[1]), match[2] is not None)


@dataclass(frozen=True)
class Speed:
    """Medians of one contender beside busy processes."""

    contender: str
    load: Load
    tokens_per_s: float
    threads: float
    """Mean number of threads that a round ran on."""


@contextlib.contextmanager
def busy_processes(count: int, seconds: float, *, nice: bool = False) -> Iterator[None]:
    """Processes that compute on one core each, until the block ends or their time is over; with `nice`, at the lowest
    priority.
    """
    code = ("import os\nos.nice(19)\n" if nice else "") + BUSY.format(seconds=seconds)
    processes = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def decode(model: Model, seconds: float) -> tuple[float, float]:
    """Tokens per second after the first, measured for at least so many seconds, and the mean number of threads of a
    round.
    """
    prompt = np.random.default_rng(0).integers(0, model.manifest.target.vocab_size, PROMPT_TOKENS).tolist()
    tokens, spent, threads = 0, 0.0, 0
    while spent < seconds:
        with model.stream(prompt, max_new_tokens=1 << 20, temperature=0.0, drafter="none") as generation:
            next(generation)
            started = perf_counter()
            for step in generation:
                tokens += len(step.token_ids)
                if spent + perf_counter() - started > seconds:
                    break
            spent += perf_counter() - started
            ran = generation.stats.threads_ran
            threads += sum(count * rounds for count, rounds in enumerate(ran, 1))
    return tokens / spent, threads / tokens


def contenders(engines: Sequence[EngineName], threads: int) -> list[Contender]:
    found: list[Contender] = []
    for engine in engines:
        found += [Contender(engine, count) for count in sorted({1, threads})]
        if engine == "simd" and threads > 1:
            found.append(Contender(engine, threads, always=True))
    return found


def measure(
    models: Mapping[Contender, Model],
    peers: Sequence[BatchedBench],
    loads: Sequence[Load],
    seconds: float,
    repeats: int,
) -> list[Speed]:
    """Measure all contenders alternately under each load of `busy_processes`, several times."""
    for model in models.values():
        decode(model, WARM_UP_S)
    runs: dict[tuple[str, Load], list[tuple[float, float]]] = {}
    with tqdm(total=repeats * len(loads) * (len(models) + len(peers)), disable=None) as bar:
        for _ in range(repeats):
            for load in loads:
                for entrant, model in models.items():
                    with busy_processes(load.processes, 10 * seconds + 60, nice=load.nice):
                        runs.setdefault((entrant.name, load), []).append(decode(model, seconds))
                    bar.update()
                for peer in peers:
                    with busy_processes(load.processes, 600, nice=load.nice):
                        speed = peer.tokens_per_s([1], PROMPT_TOKENS, LLAMA_TOKENS)[1]
                    runs.setdefault((f"llama.cpp, {peer.threads}", load), []).append((speed, peer.threads))
                    bar.update()
    return [
        Speed(name, load, median(speed for speed, _ in found), median(threads for _, threads in found))
        for (name, load), found in runs.items()
    ]


def report(speeds: Sequence[Speed], threads: int, facts: dict[str, Any]) -> str:
    """Markdown: a line for each load."""
    names = list(dict.fromkeys(speed.contender for speed in speeds))
    by_place = {(speed.contender, speed.load): speed for speed in speeds}
    ours = f"simd, {threads}"
    titles = ["busy", *names, "threads that ran", "of the better of its two", "of the best other"]
    rows = []
    for busy in dict.fromkeys(speed.load for speed in speeds):
        own = by_place[ours, busy]
        fixed = [
            by_place[name, busy].tokens_per_s for name in (f"{ours} always", "simd, 1") if (name, busy) in by_place
        ]
        others = [by_place[name, busy].tokens_per_s for name in names if not name.startswith("simd")]
        row = [str(busy), *(f"{by_place[name, busy].tokens_per_s:.1f}" for name in names), f"{own.threads:.2f}"]
        rows.append([*row, *(f"{own.tokens_per_s / max(those):.2f}" if those else "" for those in (fixed, others))])
    return "\n".join(
        [
            table(titles, rows, left=()),
            "",
            f'tokens/s; "{ours}" chooses its number of threads; its two alternatives are one thread and always all',
            f"{setup_line(facts)}; plain decoding, medians of {facts['repeats']} runs of {facts['seconds']:g} s, "
            "all alternately, each with new busy processes",
            versions_line(facts),
        ]
    )


def default_loads() -> list[Load]:
    """None, one core, all cores, and one core at the lowest priority where a process can choose that."""
    counts = dict.fromkeys([0, 1, machine.processors()])
    return [*map(Load, counts), *([Load(1, nice=True)] if hasattr(os, "nice") else [])]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--engines", nargs="+", choices=("simd", "ort"), default=["simd", "ort"])
    parser.add_argument(
        "--loads",
        nargs="+",
        type=Load.parse,
        default=default_loads(),
        metavar="N",
        help='busy processes, such as 2, or "2 nice" for those of the lowest priority',
    )
    parser.add_argument("--seconds", type=seconds, default=4.0, metavar="N", help="of each run (default: 4)")
    parser.add_argument("--repeats", type=whole(1), default=3, metavar="N", help="runs of each kind (default: 3)")
    add_batched_bench(parser)
    arguments = parser.parse_args()
    if "simd" not in arguments.engines:
        parser.error("--engines must have simd among them")
    threads = machine.default_threads()
    peers = batched_benches(parser, arguments, sorted({1, threads}))
    models = {entrant: entrant.load(arguments.bundle) for entrant in contenders(arguments.engines, threads)}
    speeds = measure(models, peers, arguments.loads, arguments.seconds, arguments.repeats)
    facts = setup(next(iter(models.values())).manifest, "simd", threads)
    facts |= {"seconds": arguments.seconds, "repeats": arguments.repeats}
    print(report(speeds, threads, facts))


if __name__ == "__main__":
    run_command(main)
