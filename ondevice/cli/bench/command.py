"""`ondevice bench`: options, and its two modes: one set of prompts, or `--scenarios`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ondevice.bundle import CHAT_TEMPLATE
from ondevice.cli.bench import scenario_report, tables
from ondevice.cli.bench.measure import (
    PLAIN,
    SCHEDULES,
    Configuration,
    Row,
    Run,
    Scenario,
    Variant,
    load_scenarios,
    rows_of,
    run_in_turns,
)
from ondevice.cli.main import FAILED, INTERRUPTED
from ondevice.cli.options import add_count, add_model_arguments, drafter, load_model
from ondevice.cli.prompts import add_prompt_set_arguments, check_counts, fitting_prompts
from ondevice.errors import ContextOverflowError, PromptError, UsageError
from ondevice.generate.drafters import registry

if TYPE_CHECKING:
    from ondevice.model import Model
    from ondevice.options import GenerationKeywords

Item = TypeVar("Item")

ENGINES = ("simd", "ort")

TOKENS = 128
SCENARIO_TOKENS, QUICK_TOKENS = 96, 48
"""Defaults of `--max-new-tokens`: without `--scenarios`, with it, and with `--quick`."""

REPEATS, QUICK_REPEATS = 5, 3
"""Defaults of `--repeat`, and with `--quick`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser, _listed(int, _is_count, "not a number from 1 on"))
    group = parser.add_argument_group("prompts")
    add_prompt_set_arguments(group)
    add_count(group, "--max-new-tokens", text=f"per prompt (default: {TOKENS}; with --scenarios {SCENARIO_TOKENS})")
    group.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help="default: 0, the most likely token; with --scenarios 0 and the model's default",
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="default: 0")
    group = parser.add_argument_group("configurations")
    group.add_argument(
        "--drafters",
        type=_listed(drafter),
        metavar="LIST",
        help=f"of {','.join(registry.REGISTRY)}, a draft bundle's PATH, auto+PATH (default: all of the bundle)",
    )
    group.add_argument(
        "--lengths",
        type=_listed(str, _is_length, f"neither a number from 1 on nor one of {', '.join(SCHEDULES)}"),
        default=["1", "2", "4", "6", "auto"],
        metavar="LIST",
        help="draft lengths: numbers, heuristic, auto (default: 1,2,4,6,auto)",
    )
    group = parser.add_argument_group(
        "scenarios", "Several kinds of text, at temperature 0 and at the model's default."
    )
    group.add_argument("--scenarios", action="store_true", help="find the fastest drafter for each kind of text")
    add_count(group, "--repeat", text=f"measure everything N times (default: {REPEATS})")
    group.add_argument(
        "--quick",
        action="store_true",
        help=f"one prompt per scenario, {QUICK_TOKENS} tokens, {QUICK_REPEATS} repeats",
    )
    group.add_argument(
        "--engines",
        type=_listed(str, ENGINES.__contains__, f"none of {', '.join(ENGINES)}"),
        metavar="LIST",
        help="compare the latency of engines: simd,ort",
    )
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    group.add_argument("--csv", action="store_true", help="with --scenarios: print comma-separated values")
    group.add_argument("--plot", type=Path, metavar="FILE", help="draw a chart of the speeds (needs matplotlib)")


def _listed(
    parse: Callable[[str], Item], is_valid: Callable[[str], bool] = bool, complaint: str = ""
) -> Callable[[str], list[Item]]:
    """A parser of words between commas, each of which `parse` reads; `complaint` follows one that is not valid."""

    def parse_all(words: str) -> list[Item]:
        chosen = dict.fromkeys(word.strip() for word in words.split(",") if word.strip())
        if not chosen:
            raise argparse.ArgumentTypeError("the list is empty")
        for word in chosen:
            if not is_valid(word):
                raise argparse.ArgumentTypeError(f"{word!r} is {complaint}")
        return [parse(word) for word in chosen]

    return parse_all


def _is_count(word: str) -> bool:
    return word.isdecimal() and int(word) > 0


def _is_length(word: str) -> bool:
    return word in SCHEDULES or _is_count(word)


def run(args: argparse.Namespace) -> int:
    _check_mode(args)
    check_counts(args)
    if args.plot is not None:
        tables.check_plot(args.plot)
    usual = (QUICK_REPEATS if args.quick else REPEATS) if args.scenarios else 1
    repeats = usual if args.repeat is None else args.repeat
    with ExitStack() as stack:
        models = _load_models(args, stack)
        model = models[0]
        if args.scenarios:
            scenarios = _fitting_scenarios(model, args)
        else:
            scenarios = [Scenario("", tuple(fitting_prompts(model, args)))]
        rows, interrupted = _measure(models, scenarios, repeats, args)
        if not rows:
            return INTERRUPTED
        plain = rows[0]
        facts = {**tables.setup(model.manifest, plain.engine, plain.threads), "kv_cache": model.engine.kv_cache}
        if args.scenarios:
            facts |= {"repeats": repeats, "seed": args.seed}
        else:
            facts |= {
                "prompts": plain.prompts,
                "prompt_tokens": sum(len(model.encode(each)) for each in scenarios[0].prompts[: plain.prompts]),
                "new_tokens": plain.new_tokens,
                "temperature": plain.temperature,
                "seed": args.seed,
                "load_s": model.load_s,
            }
    report = scenario_report if args.scenarios else tables
    if args.json:
        print(json.dumps({**facts, "rows": [{name: getattr(row, name) for name in report.FIELDS} for row in rows]}))
    elif args.csv:
        print(scenario_report.as_csv(rows), end="")
    else:
        print(report.report(rows, tables.footer(facts, report.conditions(rows, facts))))
    if args.plot is not None:
        report.draw(rows, f"{facts['bundle']}, {facts['threads']} threads, {facts['processor']}", args.plot)
    if interrupted:
        return INTERRUPTED
    return FAILED if any(row.equal < row.prompts for row in rows) else 0


def _check_mode(args: argparse.Namespace) -> None:
    """Refuse the options of the other mode."""
    if args.scenarios and args.prompts is not None:
        raise UsageError("--scenarios has prompts of its own: leave --prompts out")
    given = {name: bool(getattr(args, name)) for name in ("quick", "engines", "csv")}
    given["repeat"] = args.repeat is not None
    given["threads with several numbers"] = bool(args.threads and len(args.threads) > 1)
    for name, value in given.items():
        if value and not args.scenarios:
            raise UsageError(f"--{name} needs --scenarios")


def _load_models(args: argparse.Namespace, stack: ExitStack) -> list[Model]:
    """A model for each engine and number of threads, which `stack` closes."""
    models: dict[tuple[str, int], Model] = {}
    for engine in args.engines or [args.engine]:
        for threads in args.threads or [None]:
            chosen = argparse.Namespace(**{**vars(args), "engine": engine, "threads": threads})
            model = stack.enter_context(load_model(chosen))
            models[model.engine.name, model.threads] = model
    return list(models.values())


def _fitting_scenarios(model: Model, args: argparse.Namespace) -> list[Scenario]:
    limit = args.limit or (1 if args.quick else None)
    scenarios = load_scenarios(limit, as_chat=CHAT_TEMPLATE in model.manifest.files)
    try:
        for scenario in scenarios:
            for prompt in scenario.prompts:
                model.encode(prompt)
    except ContextOverflowError as error:
        raise PromptError(f"the scenarios need a longer context: {error}") from error
    return scenarios


def _measure(
    models: Sequence[Model], scenarios: Sequence[Scenario], repeats: int, args: argparse.Namespace
) -> tuple[list[Row], bool]:
    """Run every scenario at every temperature in every variant.

    Returns:
        The rows, of the complete scenarios or of the complete prompts where Ctrl-C ended it; whether it did.
    """
    from tqdm import tqdm

    variants = _variants(models, args)
    temperatures = [0.0, models[0].defaults.temperature] if args.scenarios else [0.0]
    temperatures = list(dict.fromkeys(temperatures)) if args.temperature is None else [args.temperature]
    tokens = args.max_new_tokens or ((QUICK_TOKENS if args.quick else SCENARIO_TOKENS) if args.scenarios else TOKENS)
    total = len(variants) * repeats * len(temperatures) * sum(len(scenario.prompts) for scenario in scenarios)
    rows: list[Row] = []
    results: list[dict[Variant, Run]] = []
    with tqdm(total=total, unit="run", leave=False, disable=None) as bar:
        try:
            for scenario, temperature in product(scenarios, temperatures):
                options: GenerationKeywords = {"max_new_tokens": tokens, "temperature": temperature, "seed": args.seed}
                results.clear()
                for runs in run_in_turns(variants, scenario.prompts, options, repeats, bar.update):
                    results.append(runs)  # one by one, so that the list keeps those before an interruption
                rows += rows_of(results, repeats=repeats, scenario=scenario.name, temperature=temperature)
        except KeyboardInterrupt:
            return rows if args.scenarios else rows_of(results, temperature=temperatures[0]), True
    return rows, False


def _variants(models: Sequence[Model], args: argparse.Namespace) -> list[Variant]:
    """Plain decoding and every drafter on the first model; plain decoding and the last drafter on the others."""
    variants = []
    for number, model in enumerate(models):
        names = registry.offered(model.engine) if args.drafters is None else args.drafters
        names = [name for name in names if name != registry.NONE][-1 if number else 0 :]
        lengths = ["auto"] if args.scenarios else args.lengths
        configurations = [PLAIN, *(Configuration(name, length) for name in names for length in lengths)]
        variants += [Variant(model, each) for each in configurations]
    return variants
