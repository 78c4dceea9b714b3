"""`ondevice bench`: parse, measure, show."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

from ondevice.drafters import registry
from ondevice.errors import UsageError
from ondevice.terminal.bench import plot
from ondevice.terminal.bench.configuration import (
    Configuration,
    combine,
    parse_drafters,
    parse_engines,
    parse_lengths,
    parse_threads,
)
from ondevice.terminal.bench.footer import conditions, footer
from ondevice.terminal.bench.row import rows_of
from ondevice.terminal.bench.runner import Run, measure
from ondevice.terminal.bench.scenarios import command as scenarios
from ondevice.terminal.bench.table import markdown
from ondevice.terminal.exit_codes import DIFFERENT, INTERRUPTED
from ondevice.terminal.loading import load_model
from ondevice.terminal.options import add_model_arguments
from ondevice.terminal.prompt_set import add_prompt_set_arguments, check_limit, fitting_prompts

if TYPE_CHECKING:
    from ondevice.model import Model
    from ondevice.options import GenerationKeywords
    from ondevice.text.prompt import Prompt

TOKENS = 128


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser, parse_threads)
    group = parser.add_argument_group("prompts")
    add_prompt_set_arguments(group)
    group.add_argument("--max-new-tokens", type=int, metavar="N", help=f"per prompt (default: {TOKENS})")
    group.add_argument("--temperature", type=float, metavar="T", help="default: 0, the likeliest token")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="default: 0")
    group = parser.add_argument_group("configurations")
    group.add_argument(
        "--drafters",
        type=parse_drafters,
        metavar="LIST",
        help=f"of {','.join(registry.REGISTRY)}, a draft bundle's PATH, auto+PATH (default: what the bundle offers)",
    )
    group.add_argument(
        "--lengths",
        type=parse_lengths,
        default=["1", "2", "4", "6", "auto"],
        metavar="LIST",
        help="numbers, heuristic and auto (default: 1,2,4,6,auto)",
    )
    group = parser.add_argument_group("scenarios", "Several kinds of text, at T = 0 and as the model samples.")
    group.add_argument("--scenarios", action="store_true", help="which drafter pays for which kind of text")
    group.add_argument("--repeat", type=int, metavar="N", help="measure all of it N times (default: 5)")
    group.add_argument("--quick", action="store_true", help="one prompt per scenario, 48 tokens, 3 repeats")
    group.add_argument("--engines", type=parse_engines, metavar="LIST", help="compare latency: simd,ort")
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    group.add_argument("--csv", action="store_true", help="with --scenarios: print lines of comma-separated values")
    group.add_argument("--plot", type=Path, metavar="FILE", help="draw the decoding speeds (needs matplotlib)")


def run(args: argparse.Namespace) -> int:
    check_limit(args)
    if args.plot is not None:
        plot.check(args.plot)
    if args.scenarios:
        return scenarios.run(args)
    _check_no_scenarios(args)
    args.threads = args.threads and args.threads[0]
    with load_model(args) as model:
        prompts, prompt_tokens = fitting_prompts(model, args)
        options: GenerationKeywords = {
            "max_new_tokens": TOKENS if args.max_new_tokens is None else args.max_new_tokens,
            "temperature": args.temperature or 0.0,
            "seed": args.seed,
        }
        drafters = registry.offered(model.engine) if args.drafters is None else args.drafters
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


def _check_no_scenarios(args: argparse.Namespace) -> None:
    given = {name: getattr(args, name) for name in ("repeat", "quick", "engines", "csv")}
    given["threads with several numbers"] = bool(args.threads and len(args.threads) > 1)
    for name, value in given.items():
        if value:
            raise UsageError(f"--{name} needs --scenarios")


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
