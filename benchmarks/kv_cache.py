"""An int8 KV cache compared with fp16: memory, milliseconds, and the likelihood of a text.

    python -m benchmarks.kv_cache BUNDLE [--context 8192] [--rounds 7] [--text FILE ...]

Both engines are loaded at once and run alternately. A bundle of random weights shows the speed only.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import numpy as np

from ondevice import machine
from ondevice.bundle import TOKENIZER, Bundle
from ondevice.bundle_format.model_config import Target
from ondevice.cli.bench.tables import PACKAGES, table, versions, versions_line
from ondevice.engines.protocol import KVCacheType, Outputs, Rows, TokenTree
from ondevice.engines.simd.caches import UNITS, unit_type
from ondevice.engines.simd.engine import SimdEngine, SimdSession
from ondevice.engines.simd.kernels.contract import MAX_ROWS
from ondevice.text.tokenizer import Tokenizer

TYPES: tuple[KVCacheType, ...] = get_args(KVCacheType)
ROWS = (1, 5)
"""A plain step, and the verification of a draft of four."""
TOKENS = 256
"""Random ids are drawn below this: see `benchmarks.rows`."""


def bytes_per_token(target: Target, kind: KVCacheType) -> tuple[int, int]:
    """Bytes of the layers that keep every token, and of those that keep a window."""
    sizes = {"full": 0, "sliding": 0}
    for index in target.kv_layers():
        own = target.layers[index].attention
        sizes[own.kind] += 2 * unit_type(kind, own.kv_heads, own.head_dim).itemsize // UNITS.positions
    return sizes["full"], sizes["sliding"]


def forward(session: SimdSession, tokens: Sequence[int], wanted: Sequence[int]) -> Outputs:
    return session.engine.forward([Rows(session, TokenTree.chain(tokens), wanted)])[0]


def read(session: SimdSession, tokens: Sequence[int]) -> float:
    """Seconds to prefill an empty cache."""
    session.rewind(0)
    started = time.perf_counter()
    while tokens:
        part = tokens[: session.max_rows()]
        forward(session, part, [len(part) - 1])
        session.commit(range(len(part)))
        tokens = tokens[len(part) :]
    return time.perf_counter() - started


def step(session: SimdSession, rows: int) -> float:
    """Seconds of a forward after the cached tokens; its rows are not kept."""
    forward(session, range(rows), range(rows))  # wakes the threads: the other engine had the cores
    started = time.perf_counter()
    forward(session, range(rows), range(rows))
    return time.perf_counter() - started


def speed(bundle: Bundle, threads: int, context: int, rounds: int) -> str:
    """Markdown: memory and milliseconds by the cache's type."""
    sessions = {kind: SimdEngine(bundle, threads, kv_cache=kind).open_session() for kind in TYPES}
    tokens = np.random.default_rng(0).integers(0, TOKENS, context).tolist()
    for session in sessions.values():
        read(session, tokens[:MAX_ROWS])  # reads weights and kernels into memory
    prefill = {kind: read(session, tokens) for kind, session in sessions.items()}
    taken: dict[tuple[KVCacheType, int], list[float]] = {(kind, rows): [] for kind in TYPES for rows in ROWS}
    for _ in range(rounds):
        for (kind, rows), seconds in taken.items():
            seconds.append(step(sessions[kind], rows))
    titles = ["cache", "bytes per token, full layers", "sliding layers", "prefill tok/s"]
    titles += [f"{rows} row{'s' * (rows > 1)} ms" for rows in ROWS]
    lines = []
    for kind, session in sessions.items():
        sizes = map(str, bytes_per_token(bundle.manifest.target, kind))
        steps = (f"{1e3 * statistics.median(taken[kind, rows]):.1f}" for rows in ROWS)
        lines.append([kind, *sizes, f"{context / prefill[kind]:.0f}", *steps])
        session.engine.close()
    return table(titles, lines, left={"cache"})


def predictions(session: SimdSession, tokens: Sequence[int]) -> tuple[float, list[int]]:
    """Summed loss in nats over all tokens but the first, and the likeliest token at each place."""
    session.rewind(0)
    loss, best, start = 0.0, list[int](), 0
    while start < len(tokens) - 1:
        count = min(session.max_rows(), len(tokens) - 1 - start)
        logits = forward(session, tokens[start : start + count], range(count)).logits.astype(np.float64)
        session.commit(range(count))
        following = tokens[start + 1 : start + count + 1]
        highest = logits.max(axis=1)
        totals = highest + np.log(np.exp(logits - highest[:, None]).sum(axis=1))
        loss += float((totals - logits[np.arange(count), following]).sum())
        best += logits.argmax(axis=1).tolist()
        start += count
    return loss, best


def quality(bundle: Bundle, threads: int, texts: Sequence[str]) -> str:
    """Markdown: loss of the texts by the cache's type, and how often both predict the same token."""
    path = bundle.file(TOKENIZER)
    if path is None:
        raise SystemExit("this bundle has no tokenizer: leave --text out")
    tokenizer = Tokenizer.from_file(path, bundle.manifest.first_token_id)
    sessions = {kind: SimdEngine(bundle, threads, kv_cache=kind).open_session() for kind in TYPES}
    most = sessions["fp16"].engine.context_length
    parts = [ids[i : i + most] for ids in map(tokenizer.encode, texts) for i in range(0, len(ids), most)]
    losses, best = dict.fromkeys(TYPES, 0.0), {kind: list[int]() for kind in TYPES}
    for part in parts:
        for kind, session in sessions.items():
            loss, likeliest = predictions(session, part)
            losses[kind] += loss
            best[kind] += likeliest
    count = len(best["fp16"])
    same = np.mean(np.equal(best["fp16"], best["int8"]))
    lines = [[kind, f"{losses[kind] / count:.4f}"] for kind in TYPES]
    return (
        table(["cache", "nats per token"], lines, left={"cache"})
        + f"\n\n{count} tokens in {len(parts)} sequences; the likeliest token is the same at {same:.2%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--context", type=int, default=8192, help="tokens in the cache (default: 8192)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=machine.default_threads())
    parser.add_argument("--text", type=Path, nargs="+", help="predict these files, instead of measuring speed")
    arguments = parser.parse_args()
    bundle = Bundle.open(arguments.bundle)
    if arguments.text:
        texts = [path.read_text("utf-8") for path in arguments.text]
        print(quality(bundle, arguments.threads, texts))
    else:
        print(speed(bundle, arguments.threads, arguments.context, arguments.rounds))
    print(f"\n{bundle.manifest.name}, {machine.processor_name()}, {arguments.threads} threads")
    print(versions_line({"versions": versions(PACKAGES)}))


if __name__ == "__main__":
    main()
