"""Load what is compared, measure scenario by scenario, show."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from ondevice.bundle import CHAT_TEMPLATE
from ondevice.drafters import registry
from ondevice.errors import ContextOverflowError, PromptError, UsageError
from ondevice.terminal.bench.configuration import PLAIN, Configuration
from ondevice.terminal.bench.footer import setup as facts_of
from ondevice.terminal.bench.footer import setup_line, versions_line
from ondevice.terminal.bench.scenarios import plot
from ondevice.terminal.bench.scenarios.measurement import Case, Setup, Way, measure_case
from ondevice.terminal.bench.scenarios.report import as_csv, as_dict, report
from ondevice.terminal.bench.scenarios.row import ScenarioRow, rows_of
from ondevice.terminal.bench.scenarios.scenario import Scenario, load_scenarios
from ondevice.terminal.exit_codes import DIFFERENT, INTERRUPTED
from ondevice.terminal.loading import load_model

if TYPE_CHECKING:
    from ondevice.model import Model

TOKENS, QUICK_TOKENS = 96, 48
REPEATS, QUICK_REPEATS = 5, 3


def run(args: argparse.Namespace) -> int:
    """What `ondevice bench --scenarios` does; `args` are those of `ondevice bench`."""
    if args.prompts is not None:
        raise UsageError("--scenarios has prompts of its own: leave --prompts out")
    repeats = args.repeat or (QUICK_REPEATS if args.quick else REPEATS)
    if repeats < 1:
        raise UsageError(f"--repeat must be a whole number from 1 on, not {repeats}")
    with ExitStack() as stack:
        models = {setup: stack.enter_context(model) for setup, model in _models(args).items()}
        model = next(iter(models.values()))
        scenarios = _fitting(list(models.values()), args)
        cases = _cases(model, scenarios, args)
        rows, interrupted = _measure(models, _ways(models, args), cases, repeats)
        facts = {
            **facts_of(model.manifest, model.engine.name, model.threads),
            "kv_cache": model.engine.kv_cache,
            "repeats": repeats,
            "seed": args.seed,
        }
    if not rows:
        return INTERRUPTED
    if args.json:
        print(json.dumps({**facts, "rows": [as_dict(row) for row in rows]}))
    elif args.csv:
        print(as_csv(rows), end="")
    else:
        print(report(rows, _foot(facts, rows)))
    if args.plot is not None:
        plot.draw(rows, f"{facts['bundle']}, {facts['threads']} threads, {facts['processor']}", args.plot)
    if interrupted:
        return INTERRUPTED
    return DIFFERENT if any(row.equal < row.prompts for row in rows) else 0


def _models(args: argparse.Namespace) -> dict[Setup, Model]:
    """One per engine and number of threads."""
    models: dict[Setup, Model] = {}
    for engine in args.engines or [args.engine]:
        for threads in args.threads or [None]:
            model = load_model(argparse.Namespace(**{**vars(args), "engine": engine, "threads": threads}))
            models[Setup(model.engine.name, model.threads)] = model
    return models


def _fitting(models: Sequence[Model], args: argparse.Namespace) -> list[Scenario]:
    limit = args.limit or (1 if args.quick else None)
    scenarios = load_scenarios(limit, as_chat=CHAT_TEMPLATE in models[0].manifest.files)
    try:
        for scenario in scenarios:
            for prompt in scenario.prompts:
                models[0].encode(prompt)
    except ContextOverflowError as error:
        raise PromptError(f"the scenarios need a longer context: {error}") from error
    return scenarios


def _cases(model: Model, scenarios: Sequence[Scenario], args: argparse.Namespace) -> list[Case]:
    """Every scenario greedily and as the model samples by default; at one temperature where that was given."""
    own = model.defaults.temperature
    temperatures = list(dict.fromkeys([0.0, own])) if args.temperature is None else [args.temperature]
    tokens = args.max_new_tokens or (QUICK_TOKENS if args.quick else TOKENS)
    return [
        Case(scenario, each, {"max_new_tokens": tokens, "temperature": each, "seed": args.seed})
        for scenario in scenarios
        for each in temperatures
    ]


def _ways(models: Mapping[Setup, Model], args: argparse.Namespace) -> list[Way]:
    """Plain decoding and every drafter; beside the first engine and number of threads, the last of those alone."""
    ways = []
    for number, (setup, model) in enumerate(models.items()):
        names = registry.offered(model.engine) if args.drafters is None else args.drafters
        names = names if number == 0 else names[-1:]
        ways += [Way(setup, PLAIN), *(Way(setup, Configuration(name, "auto")) for name in names)]
    return ways


def _measure(
    models: Mapping[Setup, Model], ways: Sequence[Way], cases: Sequence[Case], repeats: int
) -> tuple[list[ScenarioRow], bool]:
    """Rows of all cases, or of those that were finished before Ctrl-C."""
    from tqdm import tqdm

    rows: list[ScenarioRow] = []
    runs = len(ways) * repeats * sum(len(case.scenario.prompts) for case in cases)
    with tqdm(total=runs, unit="run", leave=False, disable=None) as bar:
        try:
            for case in cases:
                rows += rows_of(case, measure_case(models, ways, case, repeats, bar.update))
        except KeyboardInterrupt:
            return rows, True
    return rows, False


def _foot(facts: Mapping[str, Any], rows: Sequence[ScenarioRow]) -> list[str]:
    plain = [row for row in rows if row.drafter == registry.NONE and row.setup == rows[0].setup]
    tokens, replies = sum(row.new_tokens for row in plain), sum(row.prompts for row in plain)
    return [
        setup_line(dict(facts)),
        f"{replies} replies of {tokens / replies:.0f} tokens on average, {facts['repeats']} repeats; seed "
        f"{facts['seed']}; {facts['kv_cache']} KV cache",
        versions_line(dict(facts)),
    ]
