"""`ondevice bench`: its options, which measurement they choose, and the tests of llama-bench, the default."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import TypeVar

from ondevice import machine
from ondevice.cli.bench import mtp_list, speed_report, tables
from ondevice.cli.bench.drafters import QUICK_REPEATS, QUICK_TOKENS, REPEATS, SCENARIO_TOKENS, TOKENS, run_drafters
from ondevice.cli.bench.measure import SCHEDULES, load_variant
from ondevice.cli.bench.speed import SpeedTest, cases_of, run_cases
from ondevice.cli.main import FAILED, INTERRUPTED
from ondevice.cli.options import add_count, add_model_arguments, drafter
from ondevice.cli.prompts import add_prompt_set_arguments, check_counts
from ondevice.cli.terminal.progress import ProgressBar
from ondevice.errors import UsageError
from ondevice.generate.drafters import registry

Item = TypeVar("Item")

ENGINES = ("auto", "simd", "ort")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(
        parser,
        _listed(int, _is_count, "not a number from 1 on"),
        _listed(str, ENGINES.__contains__, f"none of {', '.join(ENGINES)}"),
        nargs="+",
    )
    group = parser.add_argument_group("tests", "As in llama-bench. Lists are separated by commas; 0 leaves a test out.")
    counts = _listed(int, str.isdecimal, "not a whole number")
    group.add_argument("-p", "--n-prompt", type=counts, metavar="LIST", help="read prompts of N tokens (default: 512)")
    group.add_argument("-n", "--n-gen", type=counts, metavar="LIST", help="generate N tokens (default: 128)")
    text = "read a prompt and generate, both in one speed; may be repeated"
    group.add_argument("-pg", type=_pair, action="append", metavar="PP,TG", help=text)
    text = "the same tests behind N tokens of context (default: 0)"
    group.add_argument("-d", "--n-depth", type=counts, metavar="LIST", help=text)
    group.add_argument(
        "--accept",
        type=_listed(float, _is_share, "not a number from 0 to 1"),
        metavar="LIST",
        help="draft tokens that are right with this probability, at the cost of the bundle's drafter: prices rounds "
        "without depending on text",
    )
    group = parser.add_argument_group("other measurements", "of drafters on text, for one bundle")
    modes = group.add_mutually_exclusive_group()
    modes.add_argument("--drafts", action="store_true", help="every drafter with every draft length, on prompts")
    modes.add_argument(
        "--scenarios",
        action="store_true",
        help="the fastest drafter for each of several kinds of text, at temperature 0 and at the model's default",
    )
    modes.add_argument(
        "--mtp-bench", action="store_true", help="acceptance on nine prompts of 192 tokens, as measured in llama.cpp"
    )
    add_prompt_set_arguments(group)
    text = f"per prompt (default: --drafts {TOKENS}, --scenarios {SCENARIO_TOKENS}, --mtp-bench {mtp_list.NEW_TOKENS})"
    add_count(group, "--max-new-tokens", text=text)
    group.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help="default: 0, the most likely token; with --scenarios 0 and the model's default",
    )
    group.add_argument("--seed", type=int, metavar="N", help="default: 0")
    group.add_argument(
        "--quick",
        action="store_true",
        help=f"with --scenarios: one prompt per scenario, {QUICK_TOKENS} tokens, {QUICK_REPEATS} repetitions",
    )
    group = parser.add_argument_group("configurations")
    group.add_argument(
        "--drafters",
        type=_listed(drafter),
        metavar="LIST",
        help=f"of {','.join(registry.REGISTRY)}, a draft bundle's PATH, auto+PATH (default: none and auto, or the "
        "bundle's only drafter; with --drafts and --scenarios all of the bundle)",
    )
    group.add_argument(
        "--lengths",
        type=_listed(str, _is_length, f"neither a number from 1 on nor one of {', '.join(SCHEDULES)}"),
        metavar="LIST",
        help="draft lengths: numbers, heuristic, auto (default: auto; with --drafts 1,2,4,6,auto)",
    )
    text = f"of everything (default: {REPEATS}); not with --drafts and --mtp-bench, which run once"
    add_count(group, "-r", "--repetitions", text=text)
    group = parser.add_argument_group("output")
    group.add_argument(
        "-o",
        "--output",
        choices=speed_report.FORMATS,
        default="md",
        help="form: md fits 80 columns; jsonl is for tests only, csv for tests and --scenarios",
    )
    group.add_argument("--wide", action="store_true", help="tables as wide as they are, not cut to 80 columns")
    text = "draw a chart of the speeds of --drafts or --scenarios (needs matplotlib)"
    group.add_argument("--plot", type=Path, metavar="FILE", help=text)


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


def _is_share(word: str) -> bool:
    return word.replace(".", "", 1).isdecimal() and 0.0 <= float(word) <= 1.0


def _pair(words: str) -> tuple[int, int]:
    """Parse `PP,TG`."""
    found = words.split(",")
    if len(found) != 2 or not all(map(_is_count, found)):
        raise argparse.ArgumentTypeError(f"{words!r} is not two numbers from 1 on, such as 512,128")
    return int(found[0]), int(found[1])


def run(args: argparse.Namespace) -> int:
    _check_mode(args)
    check_counts(args)
    if args.plot is not None:
        tables.check_plot(args.plot)
    args.seed = args.seed or 0
    if args.drafts or args.scenarios:
        return run_drafters(args)
    return mtp_list.run_mtp_list(args) if args.mtp_bench else _run_tests(args)


# Options of each mode.

TEST_OPTIONS = ("n_prompt", "n_gen", "pg", "n_depth", "accept")
TEXT_OPTIONS = ("prompts", "limit", "max_new_tokens", "temperature", "seed", "plot")
"""Options that only the tests have, and those that only the other measurements have."""


def _check_mode(args: argparse.Namespace) -> None:
    """Refuse the options of other modes."""
    if not args.scenarios:
        _refuse(args, ("quick",), "needs --scenarios")
    if not (args.drafts or args.scenarios or args.mtp_bench):
        _refuse(args, TEXT_OPTIONS, "needs --drafts, --scenarios or --mtp-bench")
        return
    mode = "--drafts" if args.drafts else "--scenarios" if args.scenarios else "--mtp-bench"
    _refuse(args, TEST_OPTIONS, f"does not go with {mode}")
    if len(args.bundle) > 1:
        raise UsageError(f"{mode} measures one bundle, not {len(args.bundle)}")
    if args.scenarios:
        _refuse(args, ("prompts",), "does not go with --scenarios, which has prompts of its own")
        _refuse(args, ("lengths",), "does not go with --scenarios, whose drafters choose lengths by themselves")
    else:
        for name in ("engine", "threads"):
            if len(getattr(args, name) or ()) > 1:
                raise UsageError(f"--{name} with several values does not go with {mode}")
        if args.drafts:
            _refuse(args, ("repetitions",), "does not go with --drafts: measure more prompts")
    if args.mtp_bench:
        _refuse(args, ("repetitions", "plot"), "does not go with --mtp-bench")
    if args.output == "jsonl" or (args.output == "csv" and not args.scenarios):
        raise UsageError(f"{mode} has no output {args.output}: choose json or md")


def _refuse(args: argparse.Namespace, names: Sequence[str], complaint: str) -> None:
    """UsageError if one of these options was given."""
    for name in names:
        if getattr(args, name) not in (None, False):
            raise UsageError(f"{'-pg' if name == 'pg' else '--' + name.replace('_', '-')} {complaint}")


# The tests of llama-bench.


def _run_tests(args: argparse.Namespace) -> int:
    depths = args.n_depth or [0]
    single = [(count, 0) for count in args.n_prompt or [512]] + [(0, count) for count in args.n_gen or [128]]
    shapes = [shape for shape in [*single, *(args.pg or [])] if any(shape)]
    if not shapes:
        raise UsageError("there is no test: give -p, -n or -pg a number above 0")
    tests = [SpeedTest(prompt, new, depth) for depth in depths for prompt, new in shapes]
    results: list[speed_report.Result] = []
    interrupted = False
    for bundle, engine, threads in product(args.bundle, args.engine or ["auto"], args.threads or [None]):
        if interrupted:
            break
        with load_variant(args, bundle, engine, threads) as model:
            facts = speed_report.ModelFacts.of(model, bundle)
            drafters = [registry.NONE, *registry.offered(model.engine)[-1:]] if args.drafters is None else args.drafters
            cases = cases_of(tests, drafters, args.lengths or ["auto"], args.accept or [])
            repetitions = args.repetitions or REPEATS
            with ProgressBar(f"{facts.name}, {engine}", unit="run") as bar:
                rows, interrupted = run_cases(model, cases, repetitions, bar.show)
            results += [(facts, row) for row in rows]
    if results:
        print(speed_report.as_text(results, args.output, wide=args.wide))
    if args.output == "md" and results:
        print(f"\n{machine.processor_name()}, {machine.os_name()}")
        print(tables.versions_line({"versions": tables.versions(tables.PACKAGES)}))
    different = [row.case.name for _, row in results if not row.equal]
    if different:
        print(f"tokens differ from plain decoding: {', '.join(different)}", file=sys.stderr)
    return INTERRUPTED if interrupted else FAILED if different else 0
