"""How much do rows, chunks of a prompt and draft steps cost after long contexts, by cache and attention?

    python -m benchmarks.speed.long_context BUNDLE [--tokens 64 8192 32768] [--rounds 5] [--only int8 "int8 lookup"]
        [--llama-bench PROGRAM --gguf FILE]

The cache is filled without a prefill, by repeating the keys and values of 64 tokens. A bundle of random weights, as
written by `benchmarks.bundles.shape`, is enough: its lookups choose the maximum number of keys. In brackets: multiples
of one row after the fewest tokens. llama.cpp, on the file that `benchmarks.bundles.gguf_files` writes, is measured up
to 8,192 tokens, because it has to read them, which takes a minute or more each time.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import get_args
from unittest.mock import patch

import numpy as np

from benchmarks.command import add_threads, command_line, machine_lines, run_command, whole
from benchmarks.forwards import forward, read, timed
from benchmarks.peers.llama_programs import LlamaBench, add_llama_bench, llama_bench
from benchmarks.speed.busy import AllThreads
from ondevice.bundle import Bundle
from ondevice.cli.bench.tables import table
from ondevice.engines.protocol import KVCacheType
from ondevice.engines.simd.caches import LookupSettings
from ondevice.engines.simd.engine import SimdEngine, SimdSession
from ondevice.engines.simd.kernels.contract.slots import MAX_ROWS

TYPES: tuple[KVCacheType, ...] = get_args(KVCacheType)
VARIANTS: dict[str, tuple[KVCacheType, LookupSettings | None]] = {
    **{kind: (kind, None) for kind in TYPES},
    **{f"{kind} lookup": (kind, LookupSettings()) for kind in TYPES},
}
"""Caches, and whether full attention looks up."""
ROWS = (1, 5, 8)
"""A plain step, and two verifications."""
LLAMA_MAX = 8192
"""Longest context with which llama.cpp is measured."""
SEED = 64
"""Tokens whose keys and values are repeated; whole units of every cache."""


def fill(session: SimdSession, tokens: int) -> None:
    """Fill an empty session with so many tokens."""
    read(session.engine, session, range(SEED))
    if tokens <= SEED:
        return
    for cache in session._caches.values():
        seed, held = cache.held(SEED), cache.blank(cache._first(tokens), tokens)
        for layer, units in held.rows.items():
            times = -(-units.shape[1] // seed.rows[layer].shape[1])
            units[:] = np.tile(seed.rows[layer], (1, times, *[1] * (units.ndim - 2)))[:, : units.shape[1]]
        cache.adopt(held)
    session._tokens = (list(range(SEED)) * (tokens // SEED + 1))[:tokens]


def works(session: SimdSession, chunk: int) -> dict[str, Callable[[], object]]:
    """The measured functions by title."""
    hidden = np.zeros(session.engine.target.hidden_size, np.float32)
    found: dict[str, Callable[[], object]] = {}
    for rows in ROWS:
        found[f"{rows} row{'s' * (rows > 1)}"] = partial(forward, session.engine, session, range(rows), range(rows))
    found[f"chunk of {chunk}"] = partial(forward, session.engine, session, range(chunk), [chunk - 1])
    if session.engine.drafter is not None:
        found["draft step"] = partial(session.draft_step, 1, hidden)
    return found


def measure(bundle: Bundle, variant: str, threads: int, tokens: Sequence[int], rounds: int) -> list[dict[str, float]]:
    """Median seconds by title after so many tokens. Sessions run alternately, because a machine's speed drifts."""
    kind, lookup = VARIANTS[variant]
    engine = SimdEngine(bundle, threads, max(tokens) + MAX_ROWS, kv_cache=kind, lookup=lookup)
    sessions = [engine.open_session() for _ in tokens]
    for session, count in zip(sessions, tokens, strict=True):
        fill(session, count)
    every = [works(session, min(MAX_ROWS, session.max_rows())) for session in sessions]
    taken: list[dict[str, float]] = [{} for _ in tokens]
    for title in every[0]:
        times = np.zeros((1 if "chunk" in title else rounds, len(tokens)))
        for row in times:
            for place, work in enumerate(every):
                work[title]()  # wakes the threads, allocates memory
                row[place] = timed(work[title])
        for found, seconds in zip(taken, np.median(times, axis=0), strict=True):
            found[title] = float(seconds)
    engine.close()
    return taken


def measure_llama(llama: LlamaBench, tokens: Sequence[int], chunk: int) -> list[dict[str, float]]:
    """The same for llama.cpp: a step, and a chunk."""
    titles, taken = {1: "1 row", chunk: f"chunk of {chunk}"}, []
    for count in tokens:
        found = llama.seconds(titles, count, 1, every_logit=False)
        taken.append({title: statistics.median(found[rows]) for rows, title in titles.items()})
    return taken


def report(
    bundle: Bundle,
    threads: int,
    tokens: Sequence[int],
    rounds: int,
    variants: Sequence[str] = tuple(VARIANTS),
    *,
    llama: LlamaBench | None = None,
) -> str:
    """Markdown: milliseconds, and multiples of one row after the fewest tokens."""
    lines, titles, ordered = list[list[str]](), list[str](), sorted(tokens)

    def add(name: str, taken: list[dict[str, float]]) -> None:
        unit = taken[0]["1 row"]
        for count, found in zip(ordered, taken, strict=False):
            cells = (
                f"{1e3 * found[title]:.1f} ({found[title] / unit:.2f})" if title in found else "" for title in titles
            )
            lines.append([name, f"{count:,}", *cells])

    for variant in variants:
        with patch("ondevice.engines.simd.threads.ThreadChoice", AllThreads):  # it learns by rows, not by tokens
            taken = measure(bundle, variant, threads, ordered, rounds)
        titles = list(taken[0])
        add(variant, taken)
    if llama is not None:
        add(llama.name, measure_llama(llama, [count for count in ordered if count <= LLAMA_MAX], MAX_ROWS))
    return table(["cache", "tokens in it", *titles], lines, left={"cache"})


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--tokens", type=whole(1), nargs="+", default=[64, 8192, 32768])
    parser.add_argument("--rounds", type=whole(1), default=5)
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="caches and attention")
    add_threads(parser)
    add_llama_bench(parser)
    arguments = parser.parse_args()
    llama = llama_bench(parser, arguments)
    bundle = Bundle.open(arguments.bundle)
    print(report(bundle, arguments.threads, arguments.tokens, arguments.rounds, arguments.only, llama=llama))
    print(f"\n{machine_lines(bundle.manifest.name, arguments.threads)}")


if __name__ == "__main__":
    run_command(main)
