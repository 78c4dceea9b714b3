"""How many tokens per second do several sequences make together, and how long does a new request wait for its first?

    python -m benchmarks.speed.batch BUNDLE [--engine simd|ort] [--threads N] [--tokens N] [--repeats N]
    python -m benchmarks.speed.batch BUNDLE --batched-bench PROGRAM --gguf FILE    # with llama.cpp's figures

Every sequence is read by its own thread, as in a server or an application. Plain decoding of random ids, because the
content of the text does not affect the results.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, get_args

import numpy as np

from benchmarks.command import add_threads, command_line, run_command, whole
from benchmarks.peers.llama_programs import add_batched_bench, batched_benches
from ondevice.cli.bench.tables import setup, setup_line, table, versions_line
from ondevice.engines.choice import EngineName
from ondevice.model import Model, load
from ondevice.options import GenerationKeywords

COUNTS = (1, 2, 4, 8)
PROMPT_TOKENS = 64
NEW_PROMPT_TOKENS = 512
"""Prompt length of the request that arrives while others decode."""
OTHERS = 3
WARM_UP_TOKENS = 8


def plain(max_new_tokens: int) -> GenerationKeywords:
    return {"max_new_tokens": max_new_tokens, "temperature": 0.0, "drafter": "none"}


@dataclass(frozen=True)
class Batch:
    """Sequences that ran at the same time.

    tokens_per_s : total of all sequences, after their first tokens
    fairness : speed of the slowest over the mean of all
    """

    sequences: int
    tokens_per_s: float
    fairness: float


@dataclass(frozen=True)
class FirstToken:
    """A request of NEW_PROMPT_TOKENS.

    alone_s, beside_s : seconds to its first token, alone and while OTHERS decode
    usual_s, longest_s : seconds between tokens of the others, before it arrives, and at worst until its first token
    """

    alone_s: float
    beside_s: float
    usual_s: float
    longest_s: float


def prompt(seed: int, vocab_size: int, count: int = PROMPT_TOKENS) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(0, vocab_size, count).tolist()
    return ids


def run_together(model: Model, sequences: int, tokens: int) -> Batch:
    """Decode some sequences; the time starts when all have their first token."""
    vocab_size = model.manifest.target.vocab_size
    started = threading.Barrier(sequences)
    spans: list[tuple[float, float, int]] = []

    def work(seed: int) -> None:
        with model.stream(prompt(seed, vocab_size), **plain(tokens + 1)) as generation:
            next(generation)
            started.wait()
            begin = perf_counter()
            count = sum(len(step.token_ids) for step in generation)
            spans.append((begin, perf_counter(), count))

    _in_threads([partial(work, seed) for seed in range(sequences)])
    wall = max(end for _, end, _ in spans) - min(begin for begin, _, _ in spans)
    speeds = [count / (end - begin) for begin, end, count in spans]
    return Batch(sequences, sum(count for _, _, count in spans) / wall, min(speeds) * len(speeds) / sum(speeds))


def first_token(model: Model, tokens: int) -> FirstToken:
    """Measure the wait of a new request for its first token, and the delay of the others."""
    vocab_size = model.manifest.target.vocab_size
    request = prompt(99, vocab_size, NEW_PROMPT_TOKENS)

    def ask() -> tuple[float, float]:
        model_started = perf_counter()
        model.generate(request, **plain(1))
        return model_started, perf_counter()

    begin, end = ask()
    alone = end - begin
    model.forget()
    arrivals: list[list[float]] = [[] for _ in range(OTHERS)]
    running = threading.Barrier(OTHERS + 1)
    answered = threading.Event()

    def decode(number: int) -> None:
        times = arrivals[number]
        with model.stream(prompt(number, vocab_size), **plain(100 * tokens)) as generation:
            for _ in generation:
                times.append(perf_counter())
                if len(times) == tokens:
                    running.wait()
                if answered.is_set():
                    return

    threads = [threading.Thread(target=decode, args=(number,)) for number in range(OTHERS)]
    for thread in threads:
        thread.start()
    running.wait()
    begin, end = ask()
    answered.set()
    for thread in threads:
        thread.join()
    before = [gap for times in arrivals for gap in _gaps(times, 0.0, begin)]
    during = [gap for times in arrivals for gap in _gaps(times, begin, end)]
    return FirstToken(alone, end - begin, median(before), max(during))


def _gaps(times: Sequence[float], begin: float, end: float) -> list[float]:
    """Seconds between consecutive times, for those whose later time is within begin..end."""
    return [b - a for a, b in pairwise(times) if begin <= b <= end]


def _in_threads(jobs: Sequence[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def measure(model: Model, tokens: int, repeats: int) -> list[Batch]:
    """Measure every number of sequences alternately, several times: medians, and the worst fairness."""
    for count in COUNTS:
        run_together(model, count, WARM_UP_TOKENS)
    runs: dict[int, list[Batch]] = {count: [] for count in COUNTS}
    for _ in range(repeats):
        for count, found in runs.items():
            model.forget()
            found.append(run_together(model, count, tokens))
    return [
        Batch(count, median(run.tokens_per_s for run in found), min(run.fairness for run in found))
        for count, found in runs.items()
    ]


def report(batches: Sequence[Batch], request: FirstToken, peer: dict[int, float], facts: dict[str, Any]) -> str:
    """Markdown."""
    titles = ["sequences", "tokens/s", "of one", "slowest / mean"]
    titles += ["llama.cpp tokens/s", "of its one", "ours / llama.cpp"] if peer else []
    rows = []
    for batch in batches:
        row = [str(batch.sequences), f"{batch.tokens_per_s:.1f}"]
        row += [f"{batch.tokens_per_s / batches[0].tokens_per_s:.2f}x", f"{batch.fairness:.2f}"]
        if peer:
            theirs = peer[batch.sequences]
            row += [f"{theirs:.1f}", f"{theirs / peer[1]:.2f}x", f"{batch.tokens_per_s / theirs:.2f}"]
        rows.append(row)
    return "\n".join(
        [
            table(titles, rows, left=()),
            "",
            f"A new request of {NEW_PROMPT_TOKENS} tokens has its first token after {request.alone_s:.2f} s alone and "
            f"{request.beside_s:.2f} s while {OTHERS} others decode. Those wait {1e3 * request.usual_s:.0f} ms between "
            f"tokens, and {1e3 * request.longest_s:.0f} ms at worst while it is read.",
            "",
            f"{setup_line(facts)}; plain decoding, {facts['tokens']} tokens each, medians of {facts['repeats']} runs",
            versions_line(facts),
        ]
    )


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--engine", choices=get_args(EngineName), default="auto")
    add_threads(parser)
    parser.add_argument("--tokens", type=whole(1), default=40, metavar="N", help="of each sequence (default: 40)")
    parser.add_argument("--repeats", type=whole(1), default=3, metavar="N", help="runs of each kind (default: 3)")
    add_batched_bench(parser)
    arguments = parser.parse_args()
    threads = arguments.threads
    peer: dict[int, float] = {}
    for bench in batched_benches(parser, arguments, [threads]):  # first, so that a wrong path fails at once
        peer = bench.tokens_per_s(COUNTS, PROMPT_TOKENS, arguments.tokens)
    with load(
        arguments.bundle, engine=arguments.engine, threads=threads, max_sequences=max(COUNTS), cache_bytes=0
    ) as model:
        batches = measure(model, arguments.tokens, arguments.repeats)
        request = first_token(model, arguments.tokens // 2)
        facts = {
            **setup(model.manifest, model.engine.name, model.threads),
            "tokens": arguments.tokens,
            "repeats": arguments.repeats,
        }
    print(report(batches, request, peer, facts))


if __name__ == "__main__":
    run_command(main)
