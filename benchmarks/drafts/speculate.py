"""How much faster is decoding with drafts that are right with a given probability?

    python -m benchmarks.drafts.speculate BUNDLE [--engine simd|ort] [--threads N] [--tokens N] [--quick]
    python -m benchmarks.drafts.speculate BUNDLE --acceptance 0 --lengths auto --repeats 12    # one row, less noise
    python -m benchmarks.drafts.speculate BUNDLE --siblings 0.4 --lengths 4 auto               # chains and trees

The loop, the engine and the cost of a draft are real; acceptance is simulated, by replaying the plain continuation with
errors. So the table is valid for any weights of this shape, and says nothing about a real drafter's acceptance.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, get_args

import numpy as np
from tqdm import tqdm

from benchmarks.command import add_threads, command_line, run_command, share, whole
from benchmarks.drafts.speculation import AUTO, TREES, Bench, Block, DraftStepCost, measure_draft_step
from ondevice.bundle import Bundle
from ondevice.cli.bench.tables import setup, setup_line, table, versions_line
from ondevice.cli.main import FAILED
from ondevice.engines.choice import EngineName, open_engine

ACCEPTANCES = (0.0, 0.3, 0.45, 0.6, 0.75, 0.9)
LENGTHS = (*map(str, range(1, 9)), AUTO)
QUICK_LENGTHS = ("1", "2", "4", AUTO)
PROMPT_TOKENS = 64
"""Length of the prompt of random ids; the content of the text does not affect the results."""


def main() -> int:
    arguments = _parse()
    bundle = Bundle.open(arguments.bundle)
    threads = arguments.threads
    engine = open_engine(arguments.engine, bundle, threads)
    acceptances, lengths, second = arguments.acceptance, arguments.lengths, arguments.siblings
    if second is not None:
        lengths = (*lengths, TREES)
    try:
        prompt_ids = np.random.default_rng(0).integers(engine.target.vocab_size, size=PROMPT_TOKENS).tolist()
        bench = Bench.prepare(engine, prompt_ids, arguments.tokens)
        step = measure_draft_step(engine, prompt_ids)
        runs = len(acceptances) * (len(lengths) + 1) * arguments.repeats
        with tqdm(total=runs, unit="run", leave=False, disable=None) as bar:
            blocks = list(bench.measure(acceptances, lengths, arguments.repeats, bar.update, second or 0.0))
    finally:
        engine.close()
    different = _different(blocks, bench.continuation)
    facts = {
        **setup(bundle.manifest, arguments.engine, threads),
        "acceptance": "simulated",
        "siblings": second,
        "prompt_tokens": PROMPT_TOKENS,
        "tokens": arguments.tokens,
        "different_runs": different,
    }
    print(report(blocks, step, facts))
    return FAILED if different else 0


def report(blocks: Sequence[Block], step: DraftStepCost | None, facts: dict[str, Any]) -> str:
    """Markdown: the speed-ups, what `auto` chose, the cost of a draft, and the conditions."""
    runs = sum(len(cell.runs) for block in blocks for cell in (block.plain, *block.cells))
    different = facts["different_runs"]
    equal = f"{different} of {runs} did NOT emit" if different else "every run emitted"
    speeds = [1.0 / block.plain.seconds_per_token for block in blocks]
    return "\n".join(
        [
            "Speed-up over plain decoding, **simulated acceptance**:",
            "",
            speed_up_table(blocks),
            "",
            *_auto(blocks, facts["siblings"]),
            _draft_cost(step),
            "",
            *_warning(blocks),
            f"{setup_line(facts)}; plain decoding {min(speeds):.1f} to {max(speeds):.1f} tokens/s, median "
            f"{median(speeds):.1f}",
            f"{runs} runs of {facts['tokens']} tokens after {facts['prompt_tokens']}, plain decoding in turn with the "
            f"others; {equal} the tokens of plain decoding",
            versions_line(facts),
        ]
    )


def _auto(blocks: Sequence[Block], second: float | None) -> list[str]:
    """Lines about the lengths that `auto` chose, if it was measured."""
    if not any(cell.length in (AUTO, TREES) for cell in blocks[0].cells):
        return []
    return [
        "`auto, first` is a generation in which `auto` knows nothing yet; `auto` has learnt from that one.",
        *_trees(second),
        "",
        "What `auto` did:",
        "",
        auto_table(blocks),
        "",
    ]


def speed_up_table(blocks: Sequence[Block]) -> str:
    lengths = [cell.length for cell in blocks[0].cells]
    cells = [[f"{block.acceptance:g}", *(f"{block.speed_up(cell):.2f}" for cell in block.cells)] for block in blocks]
    return table(["acceptance", *lengths], cells, left=())


def auto_table(blocks: Sequence[Block]) -> str:
    """Markdown: what `auto` did in generations after its first one, from which it had learnt."""
    titles = ["acceptance", "draft", "drafted/round", "tokens/round", "speed-up"]
    cells = [
        [
            f"{block.acceptance:g}",
            cell.length,
            f"{cell.drafted_per_round:.2f}",
            f"{cell.tokens_per_round:.2f}",
            f"{block.speed_up(cell):.2f}",
        ]
        for block in blocks
        for cell in block.cells
        if cell.length in (AUTO, TREES)
    ]
    return table(titles, cells, left={"draft"})


def _trees(second: float | None) -> list[str]:
    """A line that explains trees, if there are any."""
    if second is None:
        return []
    return [f"`{TREES}`: where a token is wrong, a second one in its place is right with probability {second:g}."]


def _draft_cost(step: DraftStepCost | None) -> str:
    if step is None:
        return "The bundle has no drafter: drafts cost nothing here."
    return (
        f"A real MTP draft step takes {1e3 * step.step_s:.2f} ms, {step.step_s / step.row_s:.3f} of a forward of one "
        f"row ({1e3 * step.row_s:.1f} ms); every drafted token above pays for one."
    )


def _warning(blocks: Sequence[Block]) -> list[str]:
    """A warning if figures cannot be right."""
    impossible = sum(len(block.impossible) for block in blocks)
    if not impossible:
        return []
    return [f"**The machine was busy**: {impossible} speed-ups exceed their tokens per round. Measure again.", ""]


def _different(blocks: Sequence[Block], continuation: tuple[int, ...]) -> int:
    """Number of runs that did not emit the tokens of plain decoding."""
    cells = [cell for block in blocks for cell in (block.plain, *block.cells)]
    return sum(run.token_ids != continuation for cell in cells for run in cell.runs)


def _parse() -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--engine", choices=get_args(EngineName), default="simd")
    add_threads(parser)
    parser.add_argument(
        "--tokens", type=whole(1), default=48, metavar="N", help="per run, after the first (default: 48)"
    )
    parser.add_argument("--repeats", type=whole(1), default=2, metavar="N", help="runs of each kind (default: 2)")
    parser.add_argument(
        "--acceptance", type=share, nargs="+", default=ACCEPTANCES, metavar="P", help="(default: 0 to 0.9)"
    )
    parser.add_argument(
        "--siblings", type=share, metavar="P", help="measure trees too, whose second children are right where the "
        "first are wrong with this probability",
    )  # fmt: skip
    lengths = parser.add_mutually_exclusive_group()
    lengths.add_argument("--lengths", nargs="+", choices=LENGTHS, default=LENGTHS, metavar="K", help="1 to 8, or auto")
    lengths.add_argument(
        "--quick", dest="lengths", action="store_const", const=QUICK_LENGTHS,
        help=f"the same as --lengths {' '.join(QUICK_LENGTHS)}",
    )  # fmt: skip
    return parser.parse_args()


if __name__ == "__main__":
    run_command(main)
