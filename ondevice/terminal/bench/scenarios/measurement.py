"""Measuring a scenario: every prompt, every way of decoding, in turn, several times."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ondevice.terminal.bench.configuration import Configuration
from ondevice.terminal.bench.runner import WARM_UP_TOKENS, Run, run_prompt
from ondevice.terminal.bench.scenarios.scenario import Scenario

if TYPE_CHECKING:
    from ondevice.model import Model
    from ondevice.options import GenerationKeywords


class Setup(NamedTuple):
    """What computes."""

    engine: str
    threads: int


class Way(NamedTuple):
    """What computes, and what drafts for it."""

    setup: Setup
    configuration: Configuration


@dataclass(frozen=True)
class Case:
    """A scenario, and how tokens are chosen in it."""

    scenario: Scenario
    temperature: float
    options: GenerationKeywords


Repeat = list[Run]
"""One run per prompt."""


def measure_case(
    models: Mapping[Setup, Model],
    ways: Sequence[Way],
    case: Case,
    repeats: int,
    progress: Callable[[], None] = lambda: None,
) -> dict[Way, list[Repeat]]:
    """All repeats of all ways of decoding.

    What a machine that is busy or gets warm does, it does to all of them alike: each prompt goes through all before the
    next one starts, beginning with another way each time. Drafters keep what they learnt about acceptance from one run
    to the next, as they do for somebody who goes on with such texts; the texts themselves are forgotten.
    """
    prompts = case.scenario.prompts
    for way in ways:
        short: GenerationKeywords = {**case.options, "max_new_tokens": WARM_UP_TOKENS}
        run_prompt(models[way.setup], prompts[0], way.configuration, short)
    results: dict[Way, list[Repeat]] = {way: [] for way in ways}
    turn = 0
    for _ in range(repeats):
        for way in ways:
            results[way].append([])
        for prompt in prompts:
            start = turn % len(ways)
            turn += 1
            for way in [*ways[start:], *ways[:start]]:
                run = run_prompt(models[way.setup], prompt, way.configuration, case.options)
                results[way][-1].append(run)
                progress()
    return results
