"""Measuring drafters: prompts run in every configuration on every model, and one row of sums for each of these.

In order: scenarios, which are kinds of text with a few prompts each; runs; rows.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from ondevice import machine
from ondevice.cli.options import load_model
from ondevice.generate.drafters import registry
from ondevice.generate.stats import Stats

if TYPE_CHECKING:
    from ondevice.model import Model
    from ondevice.options import GenerationKeywords, ScheduleName
    from ondevice.text.codec import Prompt

PROMPTS = Path(__file__).parent / "prompts"
SEPARATOR = "\n=====\n"
"""Stands between the prompts of a file."""

SCENARIOS = ("code completion", "code editing", "summary", "question", "chat", "translation", "extraction")
"""Names of scenarios; the last word is the name of the file with the prompts."""

RAW = frozenset({"code completion", "code editing"})
"""Scenarios whose prompts are continued as they are, as for an editor; with a chat template, the others are a user's
message."""

SCHEDULES = ("heuristic", "auto")

WARM_UP_TOKENS = 8
"""Tokens of the runs before the measurement, which pay one-time costs such as compiling."""


class Scenario(NamedTuple):
    """A kind of text, with its prompts."""

    name: str
    prompts: tuple[Prompt, ...]


def load_scenarios(limit: int | None, *, as_chat: bool) -> list[Scenario]:
    """Read `limit` prompts of each scenario, or all; as messages if the bundle has a chat template."""
    return [Scenario(name, read_prompts(name, as_chat=as_chat)[:limit]) for name in SCENARIOS]


def read_prompts(name: str, *, as_chat: bool) -> tuple[Prompt, ...]:
    """Read the prompts of a kind of text, whose last word is the name of their file; as messages if `as_chat`."""
    texts = (PROMPTS / f"{name.rsplit(maxsplit=1)[-1]}.txt").read_text("utf-8").split(SEPARATOR)
    if name in RAW:
        return tuple(text.rstrip("\n") for text in texts)
    if as_chat:
        return tuple([{"role": "user", "content": text.strip()}] for text in texts)
    return tuple(text.strip() + "\n\n" for text in texts)


@dataclass(frozen=True)
class Configuration:
    """A drafter with a draft length: a number, or one of `SCHEDULES`, which choose it."""

    drafter: str
    length: str

    def options(self) -> GenerationKeywords:
        """Keywords of `Model.stream`."""
        if self == PLAIN:
            return {"drafter": registry.NONE}
        if self.length in SCHEDULES:
            return {"drafter": self.drafter, "num_assistant_tokens_schedule": cast("ScheduleName", self.length)}
        return {
            "drafter": self.drafter,
            "num_assistant_tokens_schedule": "constant",
            "num_assistant_tokens": int(self.length),
        }


PLAIN = Configuration(registry.NONE, "0")


class Variant(NamedTuple):
    """One of the things that are compared: a configuration on a model, which has an engine and a number of threads."""

    model: Model
    configuration: Configuration


class Run(NamedTuple):
    """One prompt in one variant: the generated tokens, seconds until the first one, and the statistics."""

    token_ids: tuple[int, ...]
    first_token_s: float
    stats: Stats


def load_variant(args: argparse.Namespace, bundle: str, engine: str | None, threads: int | None) -> Model:
    """Load a bundle with this engine, by default `auto`, and number of threads."""
    return load_model(
        argparse.Namespace(**{**vars(args), "bundle": bundle, "engine": engine or "auto", "threads": threads})
    )


def run_in_turns(
    variants: Sequence[Variant],
    prompts: Sequence[Prompt],
    options: GenerationKeywords,
    repeats: int,
    progress: Callable[[], None],
) -> Iterator[dict[Variant, Run]]:
    """Run every prompt in every variant, and all of this several times.

    All variants run a prompt before the next prompt starts, each time beginning with another variant, so that a machine
    that gets warm or busy slows all of them equally.

    Args:
        options: keywords of `Model.stream` that all variants share.
        progress: called after every run.

    Yields:
        The runs of one prompt, so that an interrupted benchmark can report complete prompts.
    """
    for model, configuration in variants:
        run_prompt(model, prompts[0], configuration, {**options, "max_new_tokens": WARM_UP_TOKENS})
    for number, prompt in enumerate([*prompts] * repeats):
        start = number % len(variants)
        runs = {}
        for variant in [*variants[start:], *variants[:start]]:
            runs[variant] = run_prompt(variant.model, prompt, variant.configuration, options)
            progress()
        yield runs


def run_prompt(model: Model, prompt: Prompt, configuration: Configuration, options: GenerationKeywords) -> Run:
    """Generate once, on a model that has forgotten all earlier texts, in which a drafter would find the reply.

    What drafters have learnt about acceptance is kept, as in an application that continues with similar texts.
    """
    model.forget()
    machine.reset_peak_rss()
    token_ids: list[int] = []
    first_token_s = 0.0
    started = perf_counter()
    chosen: GenerationKeywords = {**options, **configuration.options()}
    with model.stream(prompt, **chosen) as generation:
        for step in generation:
            first_token_s = first_token_s or perf_counter() - started
            token_ids += step.token_ids
    return Run(tuple(token_ids), first_token_s, generation.stats)


@dataclass(frozen=True)
class Row:
    """A variant's result: sums over the prompts, medians over their repeats.

    Speeds are total tokens over total seconds, so that long replies weigh more; `first_token_ms` is a median.

    scenario : kind of the prompts
    drafter, length : of the configuration
    name : drafters that ran, joined with `+`; differs from `drafter` for `auto`
    new_tokens : of one repeat
    acceptance : share of the drafted tokens at position 1, 2, ... of a draft that was accepted
    idle_rounds : share of rounds without a draft
    speed_ups : by repeat, decoding speed over that of plain decoding of the same prompts on the same model
    equal : number of prompts, of `prompts`, with the tokens of plain decoding in every repeat
    """

    scenario: str
    temperature: float
    engine: str
    threads: int
    drafter: str
    length: str
    name: str
    prompts: int
    new_tokens: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    first_token_ms: float
    tokens_per_round: float
    acceptance: tuple[float, ...]
    idle_rounds: float
    peak_rss_bytes: int
    speed_ups: tuple[float, ...]
    equal: int

    @property
    def is_plain(self) -> bool:
        return self.drafter == PLAIN.drafter

    @property
    def backend(self) -> tuple[str, int]:
        """The engine that ran the forwards, and its number of threads."""
        return self.engine, self.threads

    @property
    def ms_per_token(self) -> float:
        return _ratio(1000, self.decode_tokens_per_s)

    @property
    def speed_up(self) -> float:
        return median(self.speed_ups)

    @property
    def spread(self) -> float:
        """Half the difference between the largest and the smallest of `speed_ups`."""
        return (max(self.speed_ups) - min(self.speed_ups)) / 2

    @classmethod
    def of(
        cls,
        variant: Variant,
        runs: Sequence[Run],
        plain: Sequence[Run],
        *,
        repeats: int = 1,
        scenario: str = "",
        temperature: float = 0.0,
    ) -> Row:
        """Sum up the runs of a variant.

        Args:
            runs: of all prompts, then of all of them again for every further repeat.
            plain: runs of plain decoding on the same model, in the same order.
        """
        stats = [run.stats for run in runs]
        rounds = sum(one.target_forwards for one in stats)
        count = len(runs) // repeats
        speeds, plain_speeds = (
            [_decode_speed(each[start : start + count]) for start in range(0, len(runs), count)]
            for each in (runs, plain)
        )
        different = {
            number % count
            for number, (run, other) in enumerate(zip(runs, plain, strict=True))
            if run.token_ids != other.token_ids
        }
        return cls(
            scenario=scenario,
            temperature=temperature,
            engine=variant.model.engine.name,
            threads=variant.model.threads,
            drafter=variant.configuration.drafter,
            length=variant.configuration.length,
            name=stats[0].drafter,
            prompts=count,
            new_tokens=sum(one.new_tokens for one in stats[:count]),
            prefill_tokens_per_s=_ratio(sum(one.prompt_tokens for one in stats), sum(one.prefill_s for one in stats)),
            decode_tokens_per_s=median(speeds),
            first_token_ms=1000 * median(run.first_token_s for run in runs),
            tokens_per_round=_ratio(sum(one.new_tokens - 1 for one in stats), rounds),
            acceptance=acceptance_by_position(stats),
            idle_rounds=_ratio(sum(one.rounds_without_draft for one in stats), rounds),
            peak_rss_bytes=max(one.peak_rss_bytes for one in stats),
            speed_ups=tuple(map(_ratio, speeds, plain_speeds)),
            equal=count - len(different),
        )


def rows_of(results: Sequence[dict[Variant, Run]], **about: Any) -> list[Row]:
    """One row per variant of the results of `run_in_turns`; `about` are keywords of `Row.of`."""
    runs = {variant: [turn[variant] for turn in results] for variant in (results[0] if results else ())}
    return [Row.of(each, own, runs[Variant(each.model, PLAIN)], **about) for each, own in runs.items()]


def _decode_speed(runs: Sequence[Run]) -> float:
    return _ratio(sum(run.stats.new_tokens - 1 for run in runs), sum(run.stats.decode_s for run in runs))


def acceptance_by_position(stats: Sequence[Stats]) -> tuple[float, ...]:
    """Share of the drafted tokens at position 1, 2, ... of a draft that was accepted."""
    drafted = map(sum, zip_longest(*(one.num_drafts_per_pos for one in stats), fillvalue=0))
    accepted = map(sum, zip_longest(*(one.num_accepted_tokens_per_pos for one in stats), fillvalue=0))
    return tuple(_ratio(taken, offered) for taken, offered in zip(accepted, drafted, strict=True))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
