"""How much do further rows cost if they choose other experts, at the shape of a mixture of experts?

    python -m benchmarks.speed.experts DIRECTORY [--size gpt-oss-20b] [--threads 2] [--rounds 3]
        [--llama-bench PROGRAM --gguf FILE]

If there is no bundle in the directory, one is written first: 16 GB of Gemma 4 26B-A4B, the default, 19 of Qwen3
30B-A3B, 22 of Qwen3.5-35B-A3B, 13 of gpt-oss-20b or 5 of LFM2-8B-A1B, through the exporter, matrix by matrix. Its
pack, nearly as large, is written to the cache directory. Both may be deleted afterwards. llama.cpp, if its llama-bench
is given, runs after `simd`, because two such models seldom fit in memory. 1 to 8 rows are a verification, which
computes every row's logits; 512 are a prefill.

Random weights route at random: tokens share experts only by chance, which is the most expensive case.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.bundles import other_families
from benchmarks.bundles.shape import write_bundle
from benchmarks.command import add_threads, command_line, run_command, whole
from benchmarks.forwards import forward, read
from benchmarks.memory.footprint import footprint, packed_bytes
from benchmarks.peers.llama_programs import add_llama_bench, llama_bench
from benchmarks.speed.rows import CONTEXT, facts_of, footer
from ondevice import machine
from ondevice.bundle import Bundle
from ondevice.cli.bench.tables import table, versions
from ondevice.engines.protocol import Engine
from ondevice.engines.simd.engine import SimdEngine
from ondevice.engines.simd.roofline import RooflineMeasurement
from ondevice_export.export_options import ExportOptions

GEMMA = "26B-A4B"
VERIFY = (1, 2, 3, 4, 5, 6, 7, 8)
PREFILL = 512
TIMES = 5
"""Verifications of the same tokens."""
ROOM = 1 << 30
"""Bytes needed in addition to the weights: caches, buffers, Python, and the rest of the system."""


@dataclass
class RowTimes:
    """Forwards of one number of rows."""

    seconds: list[float] = field(default_factory=list)
    experts: list[float] = field(default_factory=list)
    """Number of experts that a layer read."""


def check_memory(size: str, needed: int, available: int) -> None:
    """Raise SystemExit if the weights do not stay in memory: forwards would be as slow as the disk."""
    if available < needed:
        raise SystemExit(
            f"{size} needs {needed / 1e9:.1f} GB of memory: {(needed - ROOM) / 1e9:.1f} GB of weights, of which random "
            f"tokens touch all, and {ROOM / 1e9:.1f} GB in addition; {available / 1e9:.1f} GB are available here. "
            "Close other programs, or measure on a larger machine"
        )


def measure(engine: Engine, rounds: int, rows_of: tuple[int, ...] = (*VERIFY, PREFILL)) -> dict[int, RowTimes]:
    """Measure every number of rows alternately, in so many rounds, each with other tokens.

    Tokens run once before they are timed: experts that were not used recently are read from the disk, which is not what
    is measured here.
    """
    rng = np.random.default_rng(0)
    session = engine.open_session()
    read(engine, session, rng.integers(0, engine.target.vocab_size, CONTEXT).tolist())
    found = {rows: RowTimes() for rows in rows_of}
    for rows in rows_of * rounds:
        tokens = rng.integers(0, engine.target.vocab_size, rows).tolist()
        wanted = [rows - 1] if rows == PREFILL else range(rows)
        for timed in range(1 + (1 if rows == PREFILL else TIMES)):
            started = time.perf_counter()
            outputs = forward(engine, session, tokens, wanted)
            if timed:
                found[rows].seconds.append(time.perf_counter() - started)
                found[rows].experts.append(outputs.experts)
    return found


def report(found: dict[int, RowTimes], llama: dict[int, list[float]] | None) -> str:
    """Markdown: medians."""
    titles = ["rows", "simd ms", "its 1 row", "experts per layer"]
    titles += [] if llama is None else ["llama.cpp ms", "its 1 row", "llama.cpp / simd"]
    one, lines = statistics.median(found[1].seconds), []
    for rows, measured in found.items():
        taken = statistics.median(measured.seconds)
        cells = [f"{rows}", f"{1e3 * taken:.1f}", f"{taken / one:.2f}", f"{statistics.mean(measured.experts):.1f}"]
        if llama is not None:
            other, others_one = statistics.median(llama[rows]), statistics.median(llama[1])
            cells += [f"{1e3 * other:.1f}", f"{other / others_one:.2f}", f"{other / taken:.2f}"]
        lines.append(cells)
    return table(titles, lines, left=())


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--size", choices=[GEMMA, *other_families.MIXTURES], default=GEMMA)
    add_threads(parser)
    parser.add_argument("--rounds", type=whole(1), default=3)
    add_llama_bench(parser)
    arguments = parser.parse_args()
    size, options = arguments.size, ExportOptions()
    pack = (
        footprint(size).pack_bytes
        if size == GEMMA
        else packed_bytes(other_families.shapes(size), options.target_formats)
    )
    check_memory(size, pack + ROOM, machine.available_bytes())
    if not arguments.directory.exists():
        write_bundle(size, arguments.directory, with_drafter=False)
    engine = SimdEngine(Bundle.open(arguments.directory), arguments.threads)
    found = measure(engine, arguments.rounds)
    engine.close()
    with RooflineMeasurement(arguments.threads) as measurement:
        measurement.read()
        roofline = measurement.median()
    peers, llama = {}, None
    if (bench := llama_bench(parser, arguments)) is not None:
        peers[bench.name] = f"{bench.version} ({bench.model})"
        llama = bench.seconds(VERIFY, CONTEXT, TIMES, every_logit=True)
        llama |= bench.seconds([PREFILL], CONTEXT, 1, every_logit=False)
    print(report(found, llama))
    packages = versions(("numba", "numpy")) | peers
    print(f"\n{footer(facts_of(size, arguments, roofline, packages))}")


if __name__ == "__main__":
    run_command(main)
