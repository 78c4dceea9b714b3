"""Scenarios, which are kinds of text with a few prompts each, and measuring one several times in several variants.

A variant is a configuration (drafter and draft length) on a backend (engine and threads).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from ondevice.cli.bench.measure import PLAIN, WARM_UP_TOKENS, Configuration, Run, acceptance_by_position, run_prompt

if TYPE_CHECKING:
    from ondevice.model import Model
    from ondevice.options import GenerationKeywords
    from ondevice.text.codec import Prompt

PROMPTS = Path(__file__).parent / "prompts"
SEPARATOR = "\n=====\n"
"""Stands between the prompts of a file."""

FILES = {
    "code completion": "completion.txt",
    "code editing": "editing.txt",
    "summary": "summary.txt",
    "question": "question.txt",
    "chat": "chat.txt",
    "translation": "translation.txt",
    "extraction": "extraction.txt",
}
RAW = frozenset({"code completion", "code editing"})
"""Scenarios whose prompts are continued as they are, as for an editor; with a chat template, the others are a user's
message."""


@dataclass(frozen=True)
class Scenario:
    """A kind of text, with prompts that ship with the package."""

    name: str
    prompts: tuple[Prompt, ...]


def load_scenarios(limit: int | None, *, as_chat: bool) -> list[Scenario]:
    """Read all scenarios.

    Args:
        limit: number of prompts of each; None takes all.
        as_chat: whether the bundle has a chat template.
    """
    return [Scenario(name, _prompts(name, as_chat)[:limit]) for name in FILES]


def _prompts(name: str, as_chat: bool) -> tuple[Prompt, ...]:
    texts = (PROMPTS / FILES[name]).read_text("utf-8").split(SEPARATOR)
    if name in RAW:
        return tuple(text.rstrip("\n") for text in texts)
    if as_chat:
        return tuple([{"role": "user", "content": text.strip()}] for text in texts)
    return tuple(text.strip() + "\n\n" for text in texts)


class Backend(NamedTuple):
    """What runs the forwards."""

    engine: str
    threads: int


class Variant(NamedTuple):
    """One of the things that are compared: a configuration on a backend."""

    backend: Backend
    configuration: Configuration


@dataclass(frozen=True)
class Case:
    """A scenario with a temperature; `options` are keywords of `Model.stream` that all variants share."""

    scenario: Scenario
    temperature: float
    options: GenerationKeywords


Repeat = list[Run]
"""The runs of one variant, one per prompt."""


def measure_case(
    models: Mapping[Backend, Model],
    variants: Sequence[Variant],
    case: Case,
    repeats: int,
    progress: Callable[[], None] = lambda: None,
) -> dict[Variant, list[Repeat]]:
    """Run a case's prompts several times in every variant.

    All variants run a prompt before the next prompt starts, each time beginning with another variant, so that a machine
    that gets warm or busy slows all of them equally. Texts are forgotten between runs; what drafters have learnt about
    acceptance is kept, as in an application that continues with similar texts.

    Args:
        models: by backend.
        progress: called after every run.
    """
    prompts = case.scenario.prompts
    for variant in variants:
        short: GenerationKeywords = {**case.options, "max_new_tokens": WARM_UP_TOKENS}
        run_prompt(models[variant.backend], prompts[0], variant.configuration, short)
    results: dict[Variant, list[Repeat]] = {variant: [] for variant in variants}
    turn = 0
    for _ in range(repeats):
        for variant in variants:
            results[variant].append([])
        for prompt in prompts:
            start = turn % len(variants)
            turn += 1
            for variant in [*variants[start:], *variants[:start]]:
                run = run_prompt(models[variant.backend], prompt, variant.configuration, case.options)
                results[variant][-1].append(run)
                progress()
    return results


@dataclass(frozen=True)
class ScenarioRow:
    """A variant's result in a case: medians over repeats, each of which is a sum over prompts.

    speed_ups : by repeat, decoding speed over that of plain decoding in the same repeat, on the same backend
    acceptance : share of the drafted tokens at position 1, 2, ... of a draft that was accepted
    idle_rounds : share of rounds without a draft
    equal : number of prompts, of `prompts`, with the tokens of plain decoding in every repeat
    """

    scenario: str
    temperature: float
    engine: str
    threads: int
    drafter: str
    prompts: int
    new_tokens: int
    first_token_ms: float
    ms_per_token: float
    tokens_per_round: float
    acceptance: tuple[float, ...]
    idle_rounds: float
    speed_ups: tuple[float, ...]
    equal: int

    @property
    def backend(self) -> Backend:
        return Backend(self.engine, self.threads)

    @property
    def speed_up(self) -> float:
        return median(self.speed_ups)

    @property
    def spread(self) -> float:
        """Half the difference between the largest and the smallest of `speed_ups`."""
        return (max(self.speed_ups) - min(self.speed_ups)) / 2

    @classmethod
    def of(cls, case: Case, variant: Variant, repeats: Sequence[Repeat], plain: Sequence[Repeat]) -> ScenarioRow:
        """Sum up the repeats of a variant.

        Args:
            plain: repeats of plain decoding on the same backend.
        """
        runs = [run for repeat in repeats for run in repeat]
        forwards = sum(run.stats.target_forwards for run in runs)
        decoded = sum(run.stats.new_tokens - 1 for run in runs)
        pairs = [list(zip(repeat, other, strict=True)) for repeat, other in zip(repeats, plain, strict=True)]
        different = {
            number for pair in pairs for number, (run, other) in enumerate(pair) if run.token_ids != other.token_ids
        }
        return cls(
            scenario=case.scenario.name,
            temperature=case.temperature,
            engine=variant.backend.engine,
            threads=variant.backend.threads,
            drafter=variant.configuration.drafter,
            prompts=len(case.scenario.prompts),
            new_tokens=sum(run.stats.new_tokens for run in repeats[0]),
            first_token_ms=1e3 * median(run.first_token_s for run in runs),
            ms_per_token=1e3 * median(map(_seconds_per_token, repeats)),
            tokens_per_round=decoded / forwards if forwards else 0.0,
            acceptance=acceptance_by_position(runs),
            idle_rounds=sum(run.stats.rounds_without_draft for run in runs) / forwards if forwards else 0.0,
            speed_ups=tuple(
                _seconds_per_token(other) / _seconds_per_token(repeat)
                for repeat, other in zip(repeats, plain, strict=True)
            ),
            equal=len(case.scenario.prompts) - len(different),
        )


def scenario_rows(case: Case, results: Mapping[Variant, Sequence[Repeat]]) -> list[ScenarioRow]:
    """One row per variant of the results of `measure_case`."""
    return [
        ScenarioRow.of(case, variant, repeats, results[Variant(variant.backend, PLAIN)])
        for variant, repeats in results.items()
    ]


def _seconds_per_token(repeat: Repeat) -> float:
    tokens = sum(run.stats.new_tokens - 1 for run in repeat)
    return sum(run.stats.decode_s for run in repeat) / tokens if tokens else 1.0
