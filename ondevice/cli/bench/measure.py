"""Measuring drafters: the configurations, runs of prompts in each of them, and one row of sums per configuration."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, cast

from ondevice import machine
from ondevice.cli.options import drafter
from ondevice.generate.drafters import registry
from ondevice.generate.stats import Stats

if TYPE_CHECKING:
    from ondevice.model import Model
    from ondevice.options import GenerationKeywords, ScheduleName
    from ondevice.text.codec import Prompt

ENGINES = ("simd", "ort")
SCHEDULES = ("heuristic", "auto")

WARM_UP_TOKENS = 8
"""Tokens of the runs before the measurement, which pay one-time costs such as compiling."""


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
        length = int(self.length)
        return {
            "drafter": self.drafter,
            "num_assistant_tokens_schedule": "constant",
            "num_assistant_tokens": length,
        }


PLAIN = Configuration(registry.NONE, "0")


def combine(drafters: Iterable[str], lengths: Iterable[str]) -> list[Configuration]:
    """Plain decoding, then every drafter with every length."""
    lengths = list(lengths)
    return [PLAIN, *(Configuration(drafter, length) for drafter in drafters for length in lengths)]


def parse_drafters(words: str) -> list[str]:
    """Parse `--drafters`; `none` is dropped, because plain decoding is always measured."""
    return [drafter(word) for word in _split(words) if word != registry.NONE]


def parse_lengths(words: str) -> list[str]:
    """Parse `--lengths`."""
    chosen = _split(words)
    for word in chosen:
        if word not in SCHEDULES and not (word.isdecimal() and int(word) > 0):
            raise ArgumentTypeError(f"{word!r} is neither a number from 1 on nor one of {', '.join(SCHEDULES)}")
    return chosen


def parse_engines(words: str) -> list[str]:
    """Parse `--engines`."""
    chosen = _split(words)
    for word in chosen:
        if word not in ENGINES:
            raise ArgumentTypeError(f"{word!r} is none of {', '.join(ENGINES)}")
    return chosen


def parse_threads(words: str) -> list[int]:
    """Parse `--threads`, which takes several numbers with `--scenarios`."""
    chosen = _split(words)
    for word in chosen:
        if not (word.isdecimal() and int(word) > 0):
            raise ArgumentTypeError(f"{word!r} is not a number from 1 on")
    return [int(word) for word in chosen]


def _split(words: str) -> list[str]:
    chosen = list(dict.fromkeys(word.strip() for word in words.split(",") if word.strip()))
    if not chosen:
        raise ArgumentTypeError("the list is empty")
    return chosen


@dataclass(frozen=True)
class Run:
    """One prompt in one configuration: the generated tokens, seconds until the first one, and the statistics."""

    token_ids: tuple[int, ...]
    first_token_s: float
    stats: Stats


def measure(
    model: Model,
    prompts: Sequence[Prompt],
    configurations: Sequence[Configuration],
    options: GenerationKeywords,
    progress: Callable[[], None] = lambda: None,
) -> Iterator[dict[Configuration, Run]]:
    """Run every prompt in every configuration.

    All configurations run a prompt before the next prompt starts, each time beginning with another configuration, so
    that a machine that gets warm or busy slows all of them equally. Before every run the model forgets earlier texts,
    or a drafter would find the reply in its memory.

    Args:
        options: keywords of `Model.stream` that all configurations share.
        progress: called after every run.

    Yields:
        The runs of one prompt, so that an interrupted benchmark can report complete prompts.
    """
    for configuration in configurations:
        run_prompt(model, prompts[0], configuration, {**options, "max_new_tokens": WARM_UP_TOKENS})
    for number, prompt in enumerate(prompts):
        start = number % len(configurations)
        runs = {}
        for configuration in [*configurations[start:], *configurations[:start]]:
            runs[configuration] = run_prompt(model, prompt, configuration, options)
            progress()
        yield runs


def run_prompt(model: Model, prompt: Prompt, configuration: Configuration, options: GenerationKeywords) -> Run:
    """Generate once, on a model that has forgotten all earlier texts."""
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
    """A configuration's result over all prompts.

    Speeds are total tokens over total seconds, so that long replies weigh more; `first_token_ms` is a median.

    drafter, length : of the configuration
    name : drafters that ran, joined with `+`; differs from `drafter` for `auto`
    acceptance : share of the drafted tokens at position 1, 2, ... of a draft that was accepted
    idle_rounds : share of rounds without a draft
    speed_up : decoding speed over plain decoding speed on the same prompts
    equal : number of prompts, of `prompts`, with the tokens of plain decoding
    """

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
    speed_up: float
    equal: int

    @property
    def label(self) -> str:
        return "plain" if self.is_plain else f"{self.name} {self.length}"

    @property
    def is_plain(self) -> bool:
        return self.drafter == PLAIN.drafter

    @classmethod
    def of(cls, configuration: Configuration, runs: Sequence[Run], plain: Sequence[Run]) -> Row:
        """Sum up the runs of a configuration.

        Args:
            plain: runs of plain decoding on the same prompts, in the same order.
        """
        stats = [run.stats for run in runs]
        decoded = sum(one.new_tokens - 1 for one in stats)
        rounds = sum(one.target_forwards for one in stats)
        speed, plain_speed = _decode_speed(runs), _decode_speed(plain)
        return cls(
            drafter=configuration.drafter,
            length=configuration.length,
            name=stats[0].drafter,
            prompts=len(runs),
            new_tokens=sum(one.new_tokens for one in stats),
            prefill_tokens_per_s=_ratio(sum(one.prompt_tokens for one in stats), sum(one.prefill_s for one in stats)),
            decode_tokens_per_s=speed,
            first_token_ms=1000 * median(run.first_token_s for run in runs),
            tokens_per_round=_ratio(decoded, rounds),
            acceptance=acceptance_by_position(runs),
            idle_rounds=_ratio(sum(one.rounds_without_draft for one in stats), rounds),
            peak_rss_bytes=max(one.peak_rss_bytes for one in stats),
            speed_up=_ratio(speed, plain_speed),
            equal=sum(run.token_ids == other.token_ids for run, other in zip(runs, plain, strict=True)),
        )


def rows_of(results: Sequence[dict[Configuration, Run]]) -> list[Row]:
    """One row per configuration, plain decoding first."""
    plain = [runs[PLAIN] for runs in results]
    ordered = sorted(results[0], key=lambda configuration: configuration != PLAIN) if results else []
    return [Row.of(configuration, [runs[configuration] for runs in results], plain) for configuration in ordered]


def _decode_speed(runs: Sequence[Run]) -> float:
    return _ratio(sum(run.stats.new_tokens - 1 for run in runs), sum(run.stats.decode_s for run in runs))


def acceptance_by_position(runs: Sequence[Run]) -> tuple[float, ...]:
    """Share of the drafted tokens at position 1, 2, ... of a draft that was accepted."""
    drafted = map(sum, zip_longest(*(run.stats.num_drafts_per_pos for run in runs), fillvalue=0))
    accepted = map(sum, zip_longest(*(run.stats.num_accepted_tokens_per_pos for run in runs), fillvalue=0))
    return tuple(_ratio(taken, offered) for taken, offered in zip(accepted, drafted, strict=True))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
