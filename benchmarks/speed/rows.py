"""How much longer does a forward take if it verifies more rows, here and on other engines?

    python -m benchmarks.speed.rows BUNDLE [--threads 2] [--rounds 7] [--json FILE] [--beside BUNDLE]
        [--llama-bench PROGRAM --gguf FILE]

Other engines are measured if they are available: OpenVINO, if it is installed, on the bundle's own ONNX file;
llama.cpp, if its llama-bench is given, on the file that `benchmarks.bundles.gguf_files` writes. All run alternately
within each round, so that other load slows all of them; llama-bench, a separate process, at the end of each round. 1 to
16 rows are a verification, which computes every row's logits. 64 and 512 rows are a prefill, which computes those of
the last row only.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.command import add_threads, command_line, run_command, whole
from benchmarks.forwards import Forwarder, forward, read
from benchmarks.peers.llama_programs import LlamaBench, add_llama_bench, llama_bench
from ondevice import machine
from ondevice.bundle import Bundle
from ondevice.cli.bench.tables import table, versions, versions_line
from ondevice.engines.ort import OrtEngine
from ondevice.engines.protocol import Session
from ondevice.engines.simd.engine import SimdEngine
from ondevice.engines.simd.kernels.contract.instruction_sets import instruction_set
from ondevice.engines.simd.model import DecoderLayer, TargetModel
from ondevice.engines.simd.program import BundleModels
from ondevice.engines.simd.roofline import Roofline, RooflineMeasurement
from ondevice.engines.simd.tensor_files import Matrix

VERIFY = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
PREFILL = (64, 512)
TIMES = 3
"""Verifications in a round: one is so short that other load may disturb all of it."""
CONTEXT = 64
"""Tokens in the cache before every forward."""
TOKENS = 256
"""Ids are drawn below this, so that the tables' rows are in memory, as those of frequent tokens are, and not on the
disk.
"""

Seconds = dict[str, dict[int, list[float]]]
"""All measurements by engine, then by number of rows."""


class _Beside(SimdEngine):
    """The engine of another bundle, by that bundle's name."""

    def __init__(self, path: Path, threads: int) -> None:
        bundle = Bundle.open(path)
        super().__init__(bundle, threads)
        self.name = bundle.manifest.name


@dataclass(frozen=True)
class Work:
    """Weights of the layers that run on all rows, and of those that run on the wanted ones."""

    all_rows: int
    wanted_rows: int
    all_bytes: float
    wanted_bytes: float

    def least_seconds(self, roofline: Roofline, rows: int, wanted: int) -> float:
        """Lower bound of a forward's time: weights are read once for all rows."""
        operations = 2.0 * (self.all_rows * rows + self.wanted_rows * wanted)
        return roofline.seconds(self.all_bytes + self.wanted_bytes, operations)


def work_of(model: TargetModel) -> Work:
    """The least bytes that kernels read, and the multiplications; a weight is a code and its share of an fp16 scale."""
    shared = model.config.first_shared_layer
    lower = [matrix for layer in model.layers[:shared] for matrix in _matrices(layer)]
    if model.per_layer is not None:
        lower.append(model.per_layer.projection)
    upper = [matrix for layer in model.layers[shared:] for matrix in _matrices(layer)] + [model.head]
    counts = [sum(matrix.rows * matrix.width for matrix in part) for part in (lower, upper)]
    sizes = [sum(each.rows * each.width * each.format.stored_bits / 8 for each in part) for part in (lower, upper)]
    return Work(*counts, *sizes)


def _matrices(layer: DecoderLayer) -> list[Matrix]:
    found = layer.by_purpose()
    if (experts := layer.experts) is not None:  # as many as one row uses: the minimum, if all rows choose the same
        found["experts"] = [*experts.gate_up[: experts.top], *experts.down[: experts.top]]
    return [matrix for purpose in found.values() for matrix in purpose]


def seconds(engine: Forwarder, session: Session, rows: int, rng: np.random.Generator) -> float:
    """Seconds of a forward of `rows` rows after the context, in as many chunks as the session needs; its rows are not
    kept.
    """
    tokens = rng.integers(0, TOKENS, rows).tolist()
    session.rewind(CONTEXT)
    forward(engine, session, tokens[:1], [0])  # the other engine's threads spin for a while
    started = time.perf_counter()
    if rows in PREFILL:
        while tokens:
            part = tokens[: session.max_rows()]
            tokens = tokens[len(part) :]
            forward(engine, session, part, [len(part) - 1])
            session.commit(range(len(part)))
    else:
        forward(engine, session, tokens, range(rows))
    return time.perf_counter() - started


def compare(
    engines: Sequence[Forwarder], llama: LlamaBench | None, rounds: int, measurement: RooflineMeasurement
) -> Seconds:
    """Measure all of them, and the roofline, in every round."""
    rng = np.random.default_rng(0)
    sessions = [engine.open_session() for engine in engines]
    for engine, session in zip(engines, sessions, strict=True):
        read(engine, session, rng.integers(0, TOKENS, CONTEXT).tolist())
        session.snapshot()  # states go back to one alone
    names = [engine.name for engine in engines] + ([] if llama is None else [llama.name])
    found: Seconds = {name: {rows: [] for rows in VERIFY + PREFILL} for name in names}
    for turn in range(rounds + 1):
        measurement.read()
        for rows in TIMES * VERIFY + PREFILL:
            for engine, session in zip(engines, sessions, strict=True):
                taken = seconds(engine, session, rows, rng)
                if turn:  # the first is a warm-up; llama-bench has its own
                    found[engine.name][rows].append(taken)
        if turn and llama is not None:
            verify = llama.seconds(VERIFY, CONTEXT, TIMES, every_logit=True)
            prefill = llama.seconds(PREFILL, CONTEXT, 1, every_logit=False)
            for rows, several in (verify | prefill).items():
                found[llama.name][rows] += several
    return found


def report(found: Seconds, work: Work, roofline: Roofline) -> str:
    """Markdown: medians, and `simd` compared with the others."""
    ours, *others = ({rows: statistics.median(taken) for rows, taken in by.items()} for by in found.values())
    titles = ["rows", *(f"{name} ms" for name in found)]
    titles += ["fastest other / simd"] * bool(others) + ["simd / its 1 row", "of roofline"]
    lines = []
    for rows, taken in ours.items():
        cells = [str(rows), *(f"{1e3 * by[rows]:.1f}" for by in (ours, *others))]
        if others:
            cells.append(f"{min(by[rows] for by in others) / taken:.2f}")
        least = work.least_seconds(roofline, rows, _wanted(rows))
        lines.append([*cells, f"{taken / ours[1]:.2f}", f"{least / taken:.2f}"])
    return table(titles, lines, left=())


def _wanted(rows: int) -> int:
    return 1 if rows in PREFILL else rows


def _open(arguments: argparse.Namespace, bundle: Bundle) -> tuple[list[Forwarder], dict[str, str]]:
    """Open all engines to measure in this process; also the versions of the other engines."""
    threads = arguments.threads
    engines: list[Forwarder] = [SimdEngine(bundle, threads)]
    peers = {}
    if arguments.beside is not None:
        engines.append(_Beside(arguments.beside, threads))
    if not arguments.no_ort:
        engines.append(OrtEngine(bundle, threads))
    if not arguments.no_openvino and importlib.util.find_spec("openvino"):
        from benchmarks.peers.openvino_engine import VERSION, OpenVinoEngine

        openvino = OpenVinoEngine(bundle, threads)
        engines.append(openvino)
        peers["openvino"] = f"{VERSION} ({openvino.precision})"
    return engines, peers


def _parser() -> argparse.ArgumentParser:
    parser = command_line(__doc__)
    parser.add_argument("bundle", type=Path)
    add_threads(parser)
    parser.add_argument("--rounds", type=whole(1), default=7)
    parser.add_argument("--beside", type=Path, metavar="BUNDLE", help="measure this one's weights too")
    parser.add_argument("--no-ort", action="store_true", help="leave ONNX Runtime out")
    parser.add_argument("--no-openvino", action="store_true", help="leave OpenVINO out though it is installed")
    add_llama_bench(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every measurement here too")
    return parser


def main() -> None:
    parser = _parser()
    arguments = parser.parse_args()
    bundle = Bundle.open(arguments.bundle)
    engines, peers = _open(arguments, bundle)
    llama = llama_bench(parser, arguments)
    if llama is not None:
        peers[llama.name] = f"{llama.version} ({llama.model})"
    with RooflineMeasurement(arguments.threads) as measurement:
        found = compare(engines, llama, arguments.rounds, measurement)
    roofline = measurement.median()
    work = work_of(BundleModels(bundle).target)
    packages = versions(("onnxruntime", "numba", "numpy")) | peers
    facts = facts_of(bundle.manifest.name, arguments, roofline, packages)
    print(report(found, work, roofline))
    print(f"\n{footer(facts)}")
    if arguments.json:
        least = {rows: work.least_seconds(roofline, rows, _wanted(rows)) for rows in VERIFY + PREFILL}
        record = {**facts, "seconds": found, "least_seconds": least}
        arguments.json.write_text(json.dumps(record, indent=2) + "\n", "utf-8")


def facts_of(
    bundle: str, arguments: argparse.Namespace, roofline: Roofline, packages: dict[str, str]
) -> dict[str, Any]:
    """The bundle's name, the machine, and the conditions of the measurement."""
    return {
        "bundle": bundle,
        "processor": machine.processor_name(),
        "threads": arguments.threads,
        "instruction_set": instruction_set().name,
        "bandwidth": roofline.bandwidth,
        "peak": roofline.peak,
        "context": CONTEXT,
        "rounds": arguments.rounds,
        "versions": packages,
    }


def footer(facts: dict[str, Any]) -> str:
    """`facts_of` as two lines."""
    return (
        f"{facts['bundle']}, {facts['processor']}, {facts['threads']} threads, {facts['instruction_set']}; "
        f"{facts['bandwidth'] / 1e9:.1f} GB/s, {facts['peak'] / 1e9:.0f} GOPS; "
        f"{facts['context']} tokens in the cache; medians of {facts['rounds']} rounds  \n{versions_line(facts)}"
    )


if __name__ == "__main__":
    run_command(main)
