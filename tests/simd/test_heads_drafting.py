"""Medusa and blockwise on random pairs of every family: the text equals plain decoding's, also in shared forwards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import pytest

import ondevice
from ondevice import Model
from ondevice.bundle import Bundle
from ondevice.engines.protocol import KVCacheType
from tests.fixtures.tiny_models import QUANTISED

PROMPTS = ([5, 9, 12, 7, 5, 9, 12, 8, 5, 9], [*range(20, 60), 7, 9])
DRAFTS: dict[str, Any] = {"num_assistant_tokens": 6, "num_assistant_tokens_schedule": "constant"}
NEW = 40
DRAFTERS = ("medusa", "blockwise")


SETTINGS = [(family, get_args(KVCacheType)[number % 2]) for number, family in enumerate(QUANTISED)]
"""Families that can have heads, which checkpoints that were trained quantised cannot."""


@pytest.fixture(scope="module", params=SETTINGS, ids="-".join)
def loaded(bundles: dict[str, Bundle], request: pytest.FixtureRequest) -> Iterator[Model]:
    family, kind = request.param
    with ondevice.load(bundles[family].path, engine="simd", threads=1, kv_cache=kind) as model:
        yield model


@pytest.fixture
def model(loaded: Model) -> Model:
    """The model, without the cached keys and values of earlier tests."""
    loaded.forget()
    return loaded


@pytest.mark.parametrize(("drafter", "temperature"), [("medusa", 0.9), ("blockwise", 0.0), ("medusa", 0.0)])
def test_two_at_once_say_what_each_says_alone(model: Model, drafter: str, temperature: float) -> None:
    options: dict[str, Any] = {"max_new_tokens": NEW, "temperature": temperature, "seed": 4}
    plain = [model.generate(prompt, drafter="none", **options).token_ids for prompt in PROMPTS]
    model.forget()
    streams = [model.stream(prompt, drafter=drafter, **DRAFTS, **options) for prompt in PROMPTS]
    found: list[list[int]] = [[], []]
    running = {0, 1}
    while running:
        for number in sorted(running):
            step = next(streams[number], None)
            if step is None:
                running.remove(number)
            else:
                found[number] += step.token_ids
    assert [tuple(each) for each in found] == plain


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_kept_prefix_and_a_reply_that_was_cut_off(model: Model, drafter: str) -> None:
    whole = model.generate(PROMPTS[1], max_new_tokens=NEW, temperature=0.9, seed=4, drafter="none").token_ids
    options: dict[str, Any] = {"temperature": 0.9, "seed": 4, "drafter": drafter, **DRAFTS}
    part = model.generate(PROMPTS[1], max_new_tokens=15, **options).token_ids
    assert part == whole[:15]
    again = model.generate(PROMPTS[1], max_new_tokens=NEW, **options)
    assert again.token_ids == whole
    assert again.stats.cached_tokens


def test_the_end_of_the_context(bundles: dict[str, Bundle]) -> None:
    with ondevice.load(bundles["e2b"].path, engine="simd", threads=1, context_length=40) as model:
        plain = model.generate(PROMPTS[0], drafter="none", temperature=0.0)
        for drafter in DRAFTERS:
            drafted = model.generate(PROMPTS[0], drafter=drafter, temperature=0.0, **DRAFTS)
            assert drafted.token_ids == plain.token_ids
            assert drafted.finish_reason == plain.finish_reason == "context"


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_penalties_and_log_probabilities(model: Model, drafter: str) -> None:
    options: dict[str, Any] = {"max_new_tokens": NEW, "temperature": 0.9, "seed": 6, "repetition_penalty": 1.4}
    options |= {"logprobs": True, "presence_penalty": 0.5}
    plain = model.generate(PROMPTS[1], drafter="none", **options)
    drafted = model.generate(PROMPTS[1], drafter=drafter, **DRAFTS, **options)
    assert drafted.token_ids == plain.token_ids
    assert drafted.logprobs == plain.logprobs
    assert drafted.stats.drafted
