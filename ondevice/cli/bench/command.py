"""`ondevice bench`: options, and its two modes: one set of prompts, or `--scenarios`."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ondevice.bundle import CHAT_TEMPLATE
from ondevice.cli.bench import scenario_report, tables
from ondevice.cli.bench.measure import (
    PLAIN,
    Configuration,
    Run,
    combine,
    measure,
    parse_drafters,
    parse_engines,
    parse_lengths,
    parse_threads,
    rows_of,
)
from ondevice.cli.bench.scenarios import (
    Backend,
    Case,
    Scenario,
    ScenarioRow,
    Variant,
    load_scenarios,
    measure_case,
    scenario_rows,
)
from ondevice.cli.main import FAILED, INTERRUPTED
from ondevice.cli.options import add_model_arguments, load_model
from ondevice.cli.prompts import add_prompt_set_arguments, check_counts, fitting_prompts
from ondevice.errors import ContextOverflowError, PromptError, UsageError
from ondevice.generate.drafters import registry

if TYPE_CHECKING:
    from ondevice.model import Model
    from ondevice.options import GenerationKeywords

Result = TypeVar("Result")

TOKENS = 128
SCENARIO_TOKENS, QUICK_TOKENS = 96, 48
"""Defaults of `--max-new-tokens`: without `--scenarios`, with it, and with `--quick`."""

REPEATS, QUICK_REPEATS = 5, 3
"""Defaults of `--repeat`, and with `--quick`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser, parse_threads)
    group = parser.add_argument_group("prompts")
    add_prompt_set_arguments(group)
    group.add_argument(
        "--max-new-tokens",
        type=int,
        metavar="N",
        help=f"per prompt (default: {TOKENS}; with --scenarios {SCENARIO_TOKENS})",
    )
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
        type=parse_drafters,
        metavar="LIST",
        help=f"of {','.join(registry.REGISTRY)}, a draft bundle's PATH, auto+PATH (default: all of the bundle)",
    )
    group.add_argument(
        "--lengths",
        type=parse_lengths,
        default=["1", "2", "4", "6", "auto"],
        metavar="LIST",
        help="draft lengths: numbers, heuristic, auto (default: 1,2,4,6,auto)",
    )
    group = parser.add_argument_group(
        "scenarios", "Several kinds of text, at temperature 0 and at the model's default."
    )
    group.add_argument("--scenarios", action="store_true", help="find the fastest drafter for each kind of text")
    group.add_argument("--repeat", type=int, metavar="N", help=f"measure everything N times (default: {REPEATS})")
    group.add_argument(
        "--quick",
        action="store_true",
        help=f"one prompt per scenario, {QUICK_TOKENS} tokens, {QUICK_REPEATS} repeats",
    )
    group.add_argument("--engines", type=parse_engines, metavar="LIST", help="compare the latency of engines: simd,ort")
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    group.add_argument("--csv", action="store_true", help="with --scenarios: print comma-separated values")
    group.add_argument("--plot", type=Path, metavar="FILE", help="draw a chart of the speeds (needs matplotlib)")


def run(args: argparse.Namespace) -> int:
    check_counts(args)
    if args.plot is not None:
        tables.check_plot(args.plot)
    return _run_scenarios(args) if args.scenarios else _run_prompts(args)


def _run_prompts(args: argparse.Namespace) -> int:
    """Measure one set of prompts in every configuration."""
    _reject_scenario_options(args)
    args.threads = args.threads and args.threads[0]
    with load_model(args) as model:
        prompts, prompt_tokens = fitting_prompts(model, args)
        options: GenerationKeywords = {
            "max_new_tokens": TOKENS if args.max_new_tokens is None else args.max_new_tokens,
            "temperature": args.temperature or 0.0,
            "seed": args.seed,
        }
        drafters = registry.offered(model.engine) if args.drafters is None else args.drafters
        configurations = combine(drafters, args.lengths)
        results: list[dict[Configuration, Run]] = []
        with _run_bar(len(prompts) * len(configurations)) as bar:
            interrupted = _collect(measure(model, prompts, configurations, options, bar.update), results)
        if not results:
            return INTERRUPTED
        rows = rows_of(results)
        facts = tables.conditions(model, rows[0], sum(prompt_tokens[: len(results)]), options)
    if args.json:
        print(json.dumps({**facts, "rows": [dataclasses.asdict(row) for row in rows]}))
    else:
        print(f"{tables.markdown(rows)}\n\n{tables.footer(facts)}")
    if args.plot is not None:
        tables.draw(rows, _plot_title(facts), args.plot)
    return _exit_code(interrupted, rows)


def _reject_scenario_options(args: argparse.Namespace) -> None:
    given = {name: bool(getattr(args, name)) for name in ("quick", "engines", "csv")}
    given["repeat"] = args.repeat is not None
    given["threads with several numbers"] = args.threads is not None and len(args.threads) > 1
    for name, value in given.items():
        if value:
            raise UsageError(f"--{name} needs --scenarios")


def _run_scenarios(args: argparse.Namespace) -> int:
    """Measure every scenario in every variant, several times."""
    if args.prompts is not None:
        raise UsageError("--scenarios has prompts of its own: leave --prompts out")
    usual = QUICK_REPEATS if args.quick else REPEATS
    repeats = usual if args.repeat is None else args.repeat
    if repeats < 1:
        raise UsageError(f"--repeat must be a whole number from 1 on, not {repeats}")
    with ExitStack() as stack:
        models = {backend: stack.enter_context(model) for backend, model in _load_models(args).items()}
        model = next(iter(models.values()))
        cases = _cases(model, _fitting_scenarios(model, args), args)
        variants = _variants(models, args)
        results: list[list[ScenarioRow]] = []
        with _run_bar(len(variants) * repeats * sum(len(case.scenario.prompts) for case in cases)) as bar:
            measured = (
                scenario_rows(case, measure_case(models, variants, case, repeats, bar.update)) for case in cases
            )
            interrupted = _collect(measured, results)
        facts = {
            **tables.setup(model.manifest, model.engine.name, model.threads),
            "kv_cache": model.engine.kv_cache,
            "repeats": repeats,
            "seed": args.seed,
        }
    if not results:
        return INTERRUPTED
    rows = [row for case_rows in results for row in case_rows]
    if args.json:
        print(json.dumps({**facts, "rows": [scenario_report.as_dict(row) for row in rows]}))
    elif args.csv:
        print(scenario_report.as_csv(rows), end="")
    else:
        print(scenario_report.report(rows, _foot(facts, rows)))
    if args.plot is not None:
        scenario_report.draw(rows, _plot_title(facts), args.plot)
    return _exit_code(interrupted, rows)


def _load_models(args: argparse.Namespace) -> dict[Backend, Model]:
    """A model for each engine and number of threads."""
    models: dict[Backend, Model] = {}
    for engine in args.engines or [args.engine]:
        for threads in args.threads or [None]:
            model = load_model(argparse.Namespace(**{**vars(args), "engine": engine, "threads": threads}))
            models[Backend(model.engine.name, model.threads)] = model
    return models


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


def _cases(model: Model, scenarios: Sequence[Scenario], args: argparse.Namespace) -> list[Case]:
    """Every scenario at temperature 0 and at the model's default, or only at `--temperature`."""
    default = model.defaults.temperature
    temperatures = list(dict.fromkeys([0.0, default])) if args.temperature is None else [args.temperature]
    tokens = args.max_new_tokens or (QUICK_TOKENS if args.quick else SCENARIO_TOKENS)
    return [
        Case(scenario, each, {"max_new_tokens": tokens, "temperature": each, "seed": args.seed})
        for scenario in scenarios
        for each in temperatures
    ]


def _variants(models: Mapping[Backend, Model], args: argparse.Namespace) -> list[Variant]:
    """Plain decoding and every drafter on the first backend; plain decoding and the last drafter on the others."""
    variants = []
    for number, (backend, model) in enumerate(models.items()):
        names = registry.offered(model.engine) if args.drafters is None else args.drafters
        names = names if number == 0 else names[-1:]
        variants += [Variant(backend, PLAIN), *(Variant(backend, Configuration(name, "auto")) for name in names)]
    return variants


def _foot(facts: dict[str, Any], rows: Sequence[ScenarioRow]) -> list[str]:
    """Lines about the conditions of the measurement."""
    plain = [row for row in rows if row.drafter == registry.NONE and row.backend == rows[0].backend]
    tokens, replies = sum(row.new_tokens for row in plain), sum(row.prompts for row in plain)
    return [
        tables.setup_line(facts),
        f"{replies} replies of {tokens / replies:.0f} tokens on average, {facts['repeats']} repeats; seed "
        f"{facts['seed']}; {facts['kv_cache']} KV cache",
        tables.versions_line(facts),
    ]


def _run_bar(total: int) -> Any:
    """A bar of runs on stderr, only on a terminal."""
    from tqdm import tqdm

    return tqdm(total=total, unit="run", leave=False, disable=None)


def _collect(results: Iterable[Result], collected: list[Result]) -> bool:
    """Append results to a list as they are measured; True if Ctrl-C ended it."""
    try:
        for result in results:  # one by one, so that the list keeps those before an interruption
            collected.append(result)
    except KeyboardInterrupt:
        return True
    return False


def _plot_title(facts: Mapping[str, Any]) -> str:
    return f"{facts['bundle']}, {facts['threads']} threads, {facts['processor']}"


def _exit_code(interrupted: bool, rows: Iterable[Any]) -> int:
    if interrupted:
        return INTERRUPTED
    return FAILED if any(row.equal < row.prompts for row in rows) else 0
