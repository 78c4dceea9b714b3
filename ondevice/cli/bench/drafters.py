"""`ondevice bench --drafts` and `--scenarios`: every drafter on prompts, or on several kinds of text."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import product
from typing import TYPE_CHECKING

from ondevice.bundle import CHAT_TEMPLATE
from ondevice.cli.bench import scenario_report, tables
from ondevice.cli.bench.measure import (
    PLAIN,
    Configuration,
    Row,
    Run,
    Scenario,
    Variant,
    load_scenarios,
    load_variant,
    rows_of,
    run_in_turns,
)
from ondevice.cli.main import FAILED, INTERRUPTED
from ondevice.cli.prompts import fitting_prompts
from ondevice.errors import ContextOverflowError, PromptError
from ondevice.generate.drafters import registry

if TYPE_CHECKING:
    from ondevice.model import Model
    from ondevice.options import GenerationKeywords

TOKENS = 128
SCENARIO_TOKENS, QUICK_TOKENS = 96, 48
"""Defaults of `--max-new-tokens`: with `--drafts`, with `--scenarios`, and with `--quick`."""

REPEATS, QUICK_REPEATS = 5, 3
"""Defaults of `--repetitions`, and with `--quick`."""

DRAFT_LENGTHS = ("1", "2", "4", "6", "auto")
"""Default of `--lengths` with `--drafts`."""


def run_drafters(args: argparse.Namespace) -> int:
    """Measure and print; the exit code."""
    usual = (QUICK_REPEATS if args.quick else REPEATS) if args.scenarios else 1
    repeats = usual if args.repetitions is None else args.repetitions
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
    if args.output == "json":
        print(json.dumps({**facts, "rows": [{name: getattr(row, name) for name in report.FIELDS} for row in rows]}))
    elif args.output == "csv":
        print(scenario_report.as_csv(rows), end="")
    else:
        print(report.report(rows, tables.footer(facts, report.conditions(rows, facts)), wide=args.wide))
    if args.plot is not None:
        report.draw(rows, f"{facts['bundle']}, {facts['threads']} threads, {facts['processor']}", args.plot)
    if interrupted:
        return INTERRUPTED
    return FAILED if any(row.equal < row.prompts for row in rows) else 0


def _load_models(args: argparse.Namespace, stack: ExitStack) -> list[Model]:
    """A model for each engine and number of threads, which `stack` closes."""
    models: dict[tuple[str, int], Model] = {}
    for engine, threads in product(args.engine or ["auto"], args.threads or [None]):
        model = stack.enter_context(load_variant(args, args.bundle[0], engine, threads))
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
        lengths = ["auto"] if args.scenarios else args.lengths or DRAFT_LENGTHS
        configurations = [PLAIN, *(Configuration(name, length) for name in names for length in lengths)]
        variants += [Variant(model, each) for each in configurations]
    return variants
