"""Milliseconds of a forward by its number of rows: how nearly free verification rows are.

    python -m benchmarks.rows BUNDLE [--threads 2] [--rounds 7] [--json FILE]

Engines take turns within each round, so that a noisy neighbour slows all of them. 1 to 16 rows are a verification:
every row's logits are wanted. 64 and 512 rows are a prefill, which wants the last row's alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ondevice import machine
from ondevice.bundle import Bundle
from ondevice.engines.ort import OrtEngine
from ondevice.engines.protocol import Engine, TokenTree
from ondevice.engines.simd.engine import SimdEngine
from ondevice.engines.simd.gauge import Gauge, Roofline
from ondevice.engines.simd.kernels import instruction_set
from ondevice.engines.simd.model import Layer, Matrix, TargetModel
from ondevice.engines.simd.program import read_models

VERIFY = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
PREFILL = (64, 512)
CONTEXT = 64
"""Tokens in the cache before every forward."""
TOKENS = 256
"""Ids are drawn below this: the tables' rows then come from memory, as frequent tokens' do, and not from the disk."""


@dataclass(frozen=True)
class Work:
    """Weights of the layers that run on all rows, and of those that run on the wanted ones."""

    all_rows: int
    wanted_rows: int
    all_bytes: float
    wanted_bytes: float

    def least_seconds(self, roofline: Roofline, rows: int, wanted: int) -> float:
        """The least that one forward can take: weights are read once, whatever the rows."""
        operations = 2.0 * (self.all_rows * rows + self.wanted_rows * wanted)
        return roofline.seconds(self.all_bytes + self.wanted_bytes, operations)


def work_of(model: TargetModel) -> Work:
    """What the kernels must at least read and multiply; a weight is its code and a share of an fp16 scale."""
    lower = [matrix for layer in model.layers[: model.seam] for matrix in _matrices(layer)]
    if model.per_layer is not None:
        lower.append(model.per_layer.projection)
    upper = [matrix for layer in model.layers[model.seam :] for matrix in _matrices(layer)] + [model.head]
    counts = [sum(matrix.rows * matrix.width for matrix in part) for part in (lower, upper)]
    sizes = [sum(matrix.rows * matrix.width * (matrix.bits + 0.5) / 8 for matrix in part) for part in (lower, upper)]
    return Work(*counts, *sizes)


def _matrices(layer: Layer) -> list[Matrix]:
    attention, new, own = layer.attention, layer.attention.new, layer.per_layer
    found = [attention.query, attention.output, layer.gate, layer.up, layer.down]
    if new is not None:
        found += [new.key] if new.value is None else [new.key, new.value]
    return found if own is None else [*found, own.gate, own.projection]


def seconds(engine: Engine, rows: int, rng: np.random.Generator) -> float:
    """One forward of `rows` rows after the context, in as many chunks as the engine takes; nothing is kept."""
    tokens = rng.integers(0, TOKENS, rows).tolist()
    engine.rewind(CONTEXT)
    engine.forward(TokenTree.chain(tokens[:1]), [0])  # the other engine's threads go on spinning for a while
    started = time.perf_counter()
    if rows in PREFILL:
        while tokens:
            part = tokens[: engine.max_rows()]
            tokens = tokens[len(part) :]
            engine.forward(TokenTree.chain(part), [len(part) - 1])
            engine.commit(range(len(part)))
    else:
        engine.forward(TokenTree.chain(tokens), range(rows))
    return time.perf_counter() - started


def compare(engines: Sequence[Engine], counts: Sequence[int], rounds: int, gauge: Gauge) -> dict[str, dict[int, float]]:
    """Median seconds by engine and number of rows; the gauge is read in every round."""
    rng = np.random.default_rng(0)
    for engine in engines:
        engine.forward(TokenTree.chain(rng.integers(0, TOKENS, CONTEXT).tolist()), [0])
        engine.commit(range(CONTEXT))
    found: dict[str, dict[int, list[float]]] = {engine.name: {rows: [] for rows in counts} for engine in engines}
    for turn in range(rounds + 1):
        gauge.read()
        for rows in counts:
            for engine in engines:
                taken = seconds(engine, rows, rng)
                if turn:  # the first is a warm-up
                    found[engine.name][rows].append(taken)
    return {name: {rows: statistics.median(taken) for rows, taken in by.items()} for name, by in found.items()}


def table(found: dict[str, dict[int, float]], work: Work, roofline: Roofline) -> str:
    """Markdown."""
    names = list(found)
    lines = [
        "| rows | " + " | ".join(f"{name} ms" for name in names) + " | ort / simd | simd / its 1 row | of roofline |",
        "|" + "---:|" * (len(names) + 4),
    ]
    ours = found["simd"]
    for rows, taken in ours.items():
        wanted = 1 if rows in PREFILL else rows
        least = work.least_seconds(roofline, rows, wanted)
        ratio = f"{found['ort'][rows] / taken:.2f}" if "ort" in found else ""
        cells = [f"{1e3 * found[name][rows]:.1f}" for name in names]
        lines.append(f"| {rows} | {' | '.join(cells)} | {ratio} | {taken / ours[1]:.2f} | {least / taken:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--threads", type=int, default=machine.default_threads())
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--no-ort", action="store_true", help="measure the simd engine alone")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    arguments = parser.parse_args()
    bundle = Bundle.open(arguments.bundle)
    engines: list[Engine] = [SimdEngine(bundle, arguments.threads)]
    if not arguments.no_ort:
        engines.append(OrtEngine(bundle, arguments.threads))
    with Gauge(arguments.threads) as gauge:
        found = compare(engines, VERIFY + PREFILL, arguments.rounds, gauge)
    roofline = gauge.median()
    work = work_of(read_models(bundle)[0])
    isa = instruction_set.current().name
    print(table(found, work, roofline))
    print(
        f"\n{bundle.manifest.name}, {machine.processor_name()}, {arguments.threads} threads, {isa}; "
        f"{roofline.bandwidth / 1e9:.1f} GB/s, {roofline.peak / 1e9:.0f} GOPS; "
        f"{CONTEXT} tokens in the cache; median of {arguments.rounds} rounds"
    )
    if arguments.json:
        record = {"bandwidth": roofline.bandwidth, "peak": roofline.peak, "seconds": found, "instruction_set": isa}
        arguments.json.write_text(json.dumps(record, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
