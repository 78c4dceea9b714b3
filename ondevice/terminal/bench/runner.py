"""Measuring: every prompt in every configuration, in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

from ondevice import machine
from ondevice.decoding.record import Stats
from ondevice.terminal.bench.configuration import Configuration

if TYPE_CHECKING:
    from ondevice.model import Model
    from ondevice.options import GenerationKeywords
    from ondevice.text.prompt import Prompt

WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Run:
    """One prompt in one configuration."""

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
    """Yield one prompt's runs at a time, so that an interrupted benchmark still has whole prompts to report.

    A machine that gets warm or busy is so for all configurations alike: each prompt goes through all of them before
    the next one starts, every time beginning with another. Before every run the model forgets, or a drafter would
    find the answer in its memory.

    Args:
        options: keywords of `Model.stream` that all configurations share.
        progress: called after every run.
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
    """Generate once, on a model that has seen no text before."""
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
