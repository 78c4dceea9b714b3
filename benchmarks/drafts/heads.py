"""How many tokens per round do heads bring, as trees and as chains, and what do their proposals cost?

    python -m benchmarks.drafts.heads bundles/reference [--temperature 0.0 1.0] [--nodes 4 8 16] [--tokens 300]
    python -m benchmarks.drafts.heads BUNDLE --cost       # proposals in shares of a row, on a quiet machine

The prompts and texts are those of `benchmarks.drafts.coupling`, with seeds, so all drafters of a temperature write the
same text. The number of drafted tokens is constant, so only the cost depends on the machine.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.command import command_line, run_command, whole
from benchmarks.drafts.coupling import ACCEPTANCE, acceptance_cells, measure
from benchmarks.forwards import forward, read, timed
from ondevice import load
from ondevice.bundle import Bundle
from ondevice.bundle_format.manifest import Manifest
from ondevice.cli.bench.tables import table
from ondevice.engines.choice import open_engine
from ondevice.generate.drafters.heads import HeadsDrafter
from ondevice.generate.drafters.mtp import MtpDrafter
from ondevice.generate.drafters.protocol import Drafter

RUNS = 40
CONTEXT = 128
"""Tokens before a measured row."""


def ways(manifest: Manifest) -> dict[str, Drafter]:
    """The drafters that a bundle can be measured with, by name."""
    heads, target = {each.kind: each for each in manifest.heads}, manifest.target
    found: dict[str, Drafter] = {}
    if "medusa" in heads:
        found["medusa chain"] = HeadsDrafter(heads["medusa"], target, branches=1)
        found["medusa tree"] = HeadsDrafter(heads["medusa"], target)
    if "blockwise" in heads:
        found["blockwise"] = HeadsDrafter(heads["blockwise"], target)
    if manifest.drafter is not None:
        found["mtp chain"] = MtpDrafter(target.vocab_size, branches=1)
    return found


def acceptance(bundle: Path, temperatures: list[float], nodes: list[int], tokens: int) -> list[list[str]]:
    lines = []
    with load(bundle, threads=1) as model:
        for temperature in temperatures:
            for count in nodes:
                for name, drafter in ways(model.manifest).items():
                    chosen: dict[str, Any] = {
                        "num_assistant_tokens_schedule": "constant", "num_assistant_tokens": count,
                    }  # fmt: skip
                    stats = measure(model, drafter, temperature, tokens, chosen)
                    lines.append([f"{temperature:g}", str(count), name, *acceptance_cells(stats)])
    return lines


def cost(bundle: Path, threads: int) -> list[list[str]]:
    """Milliseconds of a row, and of each kind's proposals; medians, taken in turns."""
    engine = open_engine("simd", Bundle.open(bundle), threads)
    session = engine.open_session()
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, engine.target.vocab_size, CONTEXT).tolist()
    hidden = read(engine, session, prompt).hidden[0].copy()
    times: dict[str, list[float]] = {"a row": [], **{kind: [] for kind in engine.heads}}
    for _ in range(RUNS):
        for name, taken in times.items():
            # other states choose other clusters, whose rows are not in the caches
            state = (hidden + rng.normal(0, 0.3, len(hidden))).astype(np.float32)
            if name == "a row":
                taken.append(timed(partial(forward, engine, session, [7], [0])))
            else:
                taken.append(timed(partial(session.propose, name, state)))
    row = median(times["a row"])
    return [[name, f"{1e3 * median(taken):.3f}", f"{median(taken) / row:.3f}"] for name, taken in times.items()]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0], metavar="T")
    parser.add_argument("--nodes", type=whole(1), nargs="+", default=[4, 8, 16], metavar="N", help="drafted per round")
    parser.add_argument("--tokens", type=whole(1), default=300, metavar="N", help="per prompt (default: 300)")
    parser.add_argument("--cost", action="store_true", help="time proposals instead")
    parser.add_argument("--threads", type=whole(1), default=2)
    arguments = parser.parse_args()
    if arguments.cost:
        print(table(["", "ms", "of a row"], cost(arguments.bundle, arguments.threads), left={""}))
        return
    lines = acceptance(arguments.bundle, arguments.temperature, arguments.nodes, arguments.tokens)
    print(table(["temperature", "drafted", "drafts", *ACCEPTANCE], lines, left={"drafts"}))


if __name__ == "__main__":
    run_command(main)
