"""`ondevice bench`: parse, measure, show."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ondevice.bundle import CHAT_TEMPLATE
from ondevice.drafters import registry
from ondevice.errors import ContextOverflowError, PromptError, UsageError
from ondevice.terminal.bench import plot
from ondevice.terminal.bench.configuration import Configuration, combine, parse_drafters, parse_lengths
from ondevice.terminal.bench.footer import conditions, footer
from ondevice.terminal.bench.row import rows_of
from ondevice.terminal.bench.runner import Run, measure
from ondevice.terminal.bench.table import markdown
from ondevice.terminal.exit_codes import DIFFERENT, INTERRUPTED
from ondevice.terminal.loading import load_model
from ondevice.terminal.options import add_model_arguments
from ondevice.text.prompt_file import load_prompts

if TYPE_CHECKING:
    from ondevice.model import Model
    from ondevice.options import GenerationKeywords
    from ondevice.text.prompt import Prompt


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    group = parser.add_argument_group("prompts")
    group.add_argument("--prompts", type=Path, metavar="FILE", help="HumanEval or Spec-Bench JSON lines, or text lines")
    group.add_argument("--limit", type=int, metavar="N", help="only the first N prompts")
    group.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="per prompt (default: 128)")
    group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="default: 0, the likeliest token")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="default: 0")
    group = parser.add_argument_group("configurations")
    group.add_argument(
        "--drafters", type=parse_drafters, metavar="LIST", help=f"of {','.join(registry.REGISTRY)} (default: all there)"
    )
    group.add_argument(
        "--lengths",
        type=parse_lengths,
        default=["1", "2", "4", "6", "auto"],
        metavar="LIST",
        help="numbers, heuristic and auto (default: 1,2,4,6,auto)",
    )
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    group.add_argument("--plot", type=Path, metavar="FILE", help="draw the decoding speeds (needs matplotlib)")


def run(args: argparse.Namespace) -> int:
    if args.limit is not None and args.limit < 1:
        raise UsageError(f"--limit must be a whole number from 1 on, not {args.limit}")
    if args.plot is not None:
        plot.check(args.plot)
    with load_model(args) as model:
        prompts, prompt_tokens = _fitting(model, args)
        options: GenerationKeywords = {
            "max_new_tokens": args.max_new_tokens,
            "temperature": args.temperature,
            "seed": args.seed,
        }
        drafters = args.drafters or registry.offered(model.engine)
        results, interrupted = _measure(model, prompts, combine(drafters, args.lengths), options)
        if not results:
            return INTERRUPTED
        rows = rows_of(results)
        facts = conditions(model, rows[0], sum(prompt_tokens[: len(results)]), options)
    if args.json:
        print(json.dumps({**facts, "rows": [dataclasses.asdict(row) for row in rows]}))
    else:
        print(f"{markdown(rows)}\n\n{footer(facts)}")
    if args.plot is not None:
        plot.draw(rows, f"{facts['bundle']}, {facts['threads']} threads, {facts['processor']}", args.plot)
    if interrupted:
        return INTERRUPTED
    return DIFFERENT if any(row.equal < row.prompts for row in rows) else 0


def _fitting(model: Model, args: argparse.Namespace) -> tuple[list[Prompt], list[int]]:
    """The prompts that leave room for a reply, and their lengths in tokens; the others are counted on stderr."""
    prompts, lengths = [], []
    wanted = load_prompts(args.prompts, args.limit, as_chat=CHAT_TEMPLATE in model.manifest.files)
    for prompt in wanted:
        try:
            lengths.append(len(model.encode(prompt)))
        except ContextOverflowError:
            continue
        prompts.append(prompt)
    if not prompts:
        raise PromptError(f"no prompt fits into the context of {model.context_length} tokens")
    if len(prompts) < len(wanted):
        print(f"{len(wanted) - len(prompts)} of {len(wanted)} prompts are too long: left out", file=sys.stderr)
    return prompts, lengths


def _measure(
    model: Model, prompts: list[Prompt], configurations: list[Configuration], options: GenerationKeywords
) -> tuple[list[dict[Configuration, Run]], bool]:
    """Runs of all prompts, or of those that were finished before Ctrl-C."""
    from tqdm import tqdm

    results: list[dict[Configuration, Run]] = []
    with tqdm(total=len(prompts) * len(configurations), unit="run", leave=False, disable=None) as bar:
        try:
            for runs in measure(model, prompts, configurations, options, bar.update):
                results.append(runs)
        except KeyboardInterrupt:
            return results, True
    return results, False
