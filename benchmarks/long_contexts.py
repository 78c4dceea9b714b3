"""What a long context costs: rows, a prefill chunk and a draft step behind many tokens, by attention and cache.

    python -m benchmarks.long_contexts BUNDLE [--contexts 8192 32768 130000] [--attention exact lookup] [--keys 2048]
        [--kv-cache int8] [--rows 1 5 512] [--rounds 7] [--threads 2]

The cache is filled with random numbers, which takes a second where computing them would take minutes. Random keys are
spread so widely that lookups choose as many as they may. Ratios are to one row behind 64 tokens in the same run.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ondevice import machine
from ondevice.bundle import Bundle
from ondevice.engines.attention import AttentionType
from ondevice.engines.kv_cache import KVCache
from ondevice.engines.protocol import KVCacheType, Rows, TokenTree
from ondevice.engines.simd.engine import SimdEngine
from ondevice.engines.simd.kernels.integer_tile import UNIT
from ondevice.engines.simd.lookup_settings import LookupSettings
from ondevice.engines.simd.session import SimdSession
from ondevice.terminal.bench.footer import PACKAGES, versions, versions_line
from ondevice.terminal.bench.table import table

SHORT = 64
"""Tokens behind which ratios are taken."""
DRAFTS = 12
PATTERN = 64
"""Units of random numbers, which are repeated."""
_KEY, _VALUE = 0.001, 0.01
"""Scales of int8 codes: scores of a few nats, and values near one."""


def fill(session: SimdSession, length: int, rng: np.random.Generator) -> None:
    """Let a new session hold `length` tokens, with random keys and values."""
    for cache in session._caches.values():
        if cache.slides:
            cache.base = max(0, length - session.engine.target.sliding_window - UNIT) // UNIT * UNIT
        cache.reserve(length, session.engine.most_rows)
        for layer in cache.layers:
            _fill(cache, layer, rng)
    session._tokens = [5] * length


def _fill(cache: KVCache, layer: int, rng: np.random.Generator) -> None:
    for number, part in enumerate(cache.parts(layer)):
        shape = (PATTERN, *part.shape[1:])
        if part.dtype == np.float16:
            units = (rng.standard_normal(shape) * (1.0 if number else 0.05)).astype(np.float16)
        else:
            units = rng.integers(0, 256, shape, np.uint8)
            size = shape[2] // UNIT - 4
            scales = units[..., UNIT * size :] if number else units.reshape(*shape[:2], 2, -1)[..., UNIT // 2 * size :]
            scales.view(np.float32)[...] = _VALUE if number else _KEY
        for start in range(0, len(part), PATTERN):
            part[start : start + PATTERN] = units[: len(part) - start]


def seconds(session: SimdSession, rows: int, rounds: int) -> float:
    """Of a forward: all rows wanted, as to verify, or of more than 64 the last one, as to prefill."""
    taken, tree = [], TokenTree.chain([7] * rows)
    wanted = range(rows) if rows <= SHORT else [rows - 1]
    for _ in range(rounds + 1 if rows <= SHORT else 2):
        started = time.perf_counter()
        session.engine.forward([Rows(session, tree, wanted)])
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[1:])


def draft_seconds(session: SimdSession) -> float:
    """Of a draft step, the first of a round left out."""
    hidden, taken = np.zeros(session.engine.target.hidden_size, np.float32), []
    for _ in range(DRAFTS):
        started = time.perf_counter()
        session.draft_step(7, hidden)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[1:])


def measure(engine: SimdEngine, contexts: Sequence[int], rows: Sequence[int], rounds: int) -> list[list[str]]:
    """A line for each context."""
    rng, lines, base = np.random.default_rng(0), [], 0.0
    for length in (SHORT, *contexts):
        session = engine.open_session()
        fill(session, length, rng)
        base = base or seconds(session, 1, rounds)
        found = [seconds(session, count, rounds) for count in rows]
        cells = [f"{1e3 * each:.1f} ({each / base:.2f})" for each in found]
        if engine.has_drafter:
            step = draft_seconds(session)
            cells.append(f"{1e3 * step:.2f} ({step / base:.3f})")
        lines.append([str(length), *cells, f"{session.nbytes / 1e6:.0f}"])
        session.close()
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--contexts", type=int, nargs="+", default=[8192, 32768, 130_000])
    parser.add_argument("--attention", nargs="+", default=["exact", "lookup"])
    parser.add_argument("--keys", type=int, help="that lookups choose (default: auto)")
    parser.add_argument("--kv-cache", choices=["fp16", "int8"], default="int8")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 5, 512])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=machine.default_threads())
    arguments = parser.parse_args()
    bundle, lines = Bundle.open(arguments.bundle), []
    kind: KVCacheType = arguments.kv_cache
    longest = max(arguments.contexts) + max(arguments.rows)
    attentions: list[AttentionType] = arguments.attention
    for attention in attentions:
        lookup = None if attention == "exact" else LookupSettings(attention, arguments.keys)
        engine = SimdEngine(bundle, arguments.threads, longest, kv_cache=kind, lookup=lookup)
        measured = measure(engine, arguments.contexts, arguments.rows, arguments.rounds)
        lines += [[attention, *line] for line in measured]
        engine.close()
    titles = ["attention", "tokens", *(f"{count} row{'s' * (count > 1)} ms" for count in arguments.rows)]
    titles += ["draft step ms"] * (bundle.manifest.drafter is not None) + ["cache MB"]
    print(table(titles, lines, left={"attention"}))
    print(f"\n{bundle.manifest.name}, {machine.processor_name()}, {arguments.threads} threads; {kind} cache;")
    print(f"in brackets: of one row behind {SHORT} tokens  \n{versions_line({'versions': versions(PACKAGES)})}")


if __name__ == "__main__":
    main()
