"""Are drafts accepted more often if they are drawn with the target's own noise?

    python -m benchmarks.drafts.coupling bundles/reference [--temperature 1.0 0.7 0.0] [--tokens 300] [--nodes 4]
    python -m benchmarks.drafts.coupling bundles/reference --schedule auto     # tokens per second, on a quiet machine

The MTP drafter on the same prompts and seeds, and so on the same texts: only rounds and forwards differ. Prompts are
from Python's standard library. The number of drafted tokens is constant, so only the speed depends on the machine.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.command import command_line, run_command, whole
from ondevice import Model, Stats, load
from ondevice.arrays import Float32Array
from ondevice.cli.bench.tables import table
from ondevice.generate.drafters.mtp import MtpDrafter
from ondevice.generate.drafters.protocol import Draft, Drafter, DraftRequest

SOURCES = ("argparse", "bisect", "csv", "queue", "shlex", "string", "tempfile", "textwrap")
SKIP, LENGTH = 600, 900
"""Characters skipped at the beginning of a source file (such as its licence), and characters of a prompt."""


class Greedy(MtpDrafter):
    """Always proposes the likeliest tokens, whatever the target's temperature."""

    def widths(self, request: DraftRequest) -> tuple[Sequence[int], Float32Array]:
        """No guesses by the engine, which draws with the target's noise."""
        return (), super().widths(request)[1]

    def draft(self, request: DraftRequest) -> Draft:
        return super().draft(DraftRequest(request.nodes, request.row_floors, request.step_floors, trees=request.trees))


def prompts() -> Iterator[str]:
    for name in SOURCES:
        yield inspect.getsource(__import__(name))[SKIP:][:LENGTH]


def measure(model: Model, drafter: Drafter, temperature: float, tokens: int, chosen: dict[str, Any]) -> Stats:
    """Sums over all prompts, with Gemma's default sampling filters."""
    total = Stats()
    for seed, prompt in enumerate(prompts()):
        stats = model.generate(
            prompt, max_new_tokens=tokens, temperature=temperature, top_k=64, top_p=0.95, seed=seed, drafter=drafter,
            **chosen,
        ).stats  # fmt: skip
        total.new_tokens += stats.new_tokens - 1
        total.target_forwards += stats.target_forwards
        total.decode_s += stats.decode_s
        total.num_drafts_per_pos = _added(total.num_drafts_per_pos, stats.num_drafts_per_pos)
        total.num_accepted_tokens_per_pos = _added(total.num_accepted_tokens_per_pos, stats.num_accepted_tokens_per_pos)
    return total


def _added(one: Sequence[int], other: Sequence[int]) -> list[int]:
    length = max(len(one), len(other))
    return [sum(each[at] for each in (one, other) if at < len(each)) for at in range(length)]


ACCEPTANCE = ("1 taken", "2", "3", "4", "tokens per round")
"""Titles of the columns of `acceptance_cells`."""


def acceptance_cells(stats: Stats) -> list[str]:
    """Shares of rounds in which a token at depth 1 to 4 of the draft was accepted, and tokens per round."""
    rounds = next(iter(stats.num_drafts_per_pos), 1)  # none where the schedule never drafted
    taken = [*stats.num_accepted_tokens_per_pos, 0, 0, 0, 0][:4]
    return [*(f"{each / rounds:.3f}" for each in taken), f"{stats.new_tokens / stats.target_forwards:.2f}"]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--temperature", type=float, nargs="+", default=(1.0, 0.7, 0.0), metavar="T")
    parser.add_argument("--tokens", type=whole(1), default=300, metavar="N", help="per prompt (default: 300)")
    parser.add_argument("--nodes", type=whole(1), default=4, metavar="N", help="drafted tokens per round (default: 4)")
    parser.add_argument("--schedule", choices=("constant", "auto"), default="constant")
    arguments = parser.parse_args()
    chosen: dict[str, Any] = {"num_assistant_tokens_schedule": arguments.schedule}
    if arguments.schedule == "constant":
        chosen["num_assistant_tokens"] = arguments.nodes
    lines = []
    with load(arguments.bundle, threads=1) as model:
        size = model.manifest.target.vocab_size
        for temperature in arguments.temperature:
            ways = {
                "greedy chain": Greedy(size, branches=1),
                "greedy tree": Greedy(size),
                "coupled chain": MtpDrafter(size, branches=1),
                "coupled tree": MtpDrafter(size),
            }
            for name, drafter in ways.items():
                stats = measure(model, drafter, temperature, arguments.tokens, chosen)
                speed = [f"{stats.new_tokens / stats.decode_s:.0f}"] if arguments.schedule == "auto" else []
                lines.append([f"{temperature:g}", name, *acceptance_cells(stats), *speed])
    speed = ["tokens/s"] if arguments.schedule == "auto" else []
    print(table(["temperature", "drafts", *ACCEPTANCE, *speed], lines, left={"drafts"}))


if __name__ == "__main__":
    run_command(main)
