"""Biases, penalties and log probabilities on the pair that ships: drafts change none of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from ondevice import Model
from ondevice.errors import UsageError
from tests.test_lossless import DRAFTERS, LONG, SHORT

OPTIONS: dict[str, dict[str, Any]] = {
    "bias": {"logit_bias": {214: -100.0, 400: 5.5}},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 2.0},
    "all": {
        "logit_bias": {300: 3.0}, "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1,
        "top_logprobs": 5,
    },
    "logprobs": {"logprobs": True},
}  # fmt: skip
TEMPERATURES = pytest.mark.parametrize("temperature", [0.0, 0.9], ids=["greedy", "seeded"])


@pytest.mark.parametrize("drafter", DRAFTERS)
@TEMPERATURES
@pytest.mark.parametrize("chosen", OPTIONS)
def test_output_is_that_of_plain_decoding(
    reference_model: Model, chosen: str, temperature: float, drafter: str
) -> None:
    options: dict[str, Any] = {"max_new_tokens": 32, "temperature": temperature, "seed": 3, **OPTIONS[chosen]}
    plain = reference_model.generate(LONG, drafter="none", **options)
    drafted = reference_model.generate(
        LONG, drafter=drafter, num_assistant_tokens=5, num_assistant_tokens_schedule="constant", **options
    )
    assert drafted.token_ids == plain.token_ids
    assert drafted.logprobs == plain.logprobs
    if drafter == "mtp":
        assert drafted.stats.accepted


@TEMPERATURES
@pytest.mark.parametrize("chosen", ["bias", "presence", "frequency"])
def test_it_does_something(reference_model: Model, chosen: str, temperature: float) -> None:
    options: dict[str, Any] = {"max_new_tokens": 40, "temperature": temperature, "seed": 3}
    changed = reference_model.generate(LONG, **options, **OPTIONS[chosen])
    assert changed.token_ids != reference_model.generate(LONG, **options).token_ids


@TEMPERATURES
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_what_a_checkpoint_suppresses_is_never_said(
    reference_model: Model, drafter: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"max_new_tokens": 32, "temperature": temperature, "seed": 3}
    usual = reference_model.generate(LONG, **options).token_ids
    suppressed = tuple(sorted(set(usual))[::2])
    monkeypatch.setattr(
        reference_model, "defaults", dataclasses.replace(reference_model.defaults, suppress_tokens=suppressed)
    )
    drafted = reference_model.generate(
        LONG, drafter=drafter, num_assistant_tokens=5, num_assistant_tokens_schedule="constant", **options
    )
    assert set(suppressed).isdisjoint(drafted.token_ids)
    assert drafted.token_ids == reference_model.generate(LONG, drafter="none", **options).token_ids


def test_logprobs_go_with_the_tokens(reference_model: Model) -> None:
    reply = reference_model.generate(SHORT, max_new_tokens=24, temperature=0.0, top_logprobs=3)
    assert tuple(each.token_id for each in reply.logprobs) == reply.token_ids
    for each in reply.logprobs:
        assert len(each.top) == 3
        assert each.top[0] == (each.token_id, each.logprob)  # greedy takes the likeliest
        assert 0 >= each.top[0][1] >= each.top[1][1] >= each.top[2][1]
    assert reference_model.generate(SHORT, max_new_tokens=4).logprobs == ()


def test_a_stop_string_cuts_them_with_the_ids(reference_model: Model) -> None:
    whole = reference_model.generate(SHORT, max_new_tokens=40, temperature=0.0)
    stop = whole.text[10:14]
    reply = reference_model.generate(SHORT, max_new_tokens=40, temperature=0.0, stop=stop, logprobs=True)
    assert reply.finish_reason == "stop"
    assert len(reply.token_ids) < 40
    assert tuple(each.token_id for each in reply.logprobs) == reply.token_ids


@pytest.mark.parametrize(
    "options",
    [{"logprobs": 1}, {"top_logprobs": 21}, {"top_logprobs": True}, {"logit_bias": {10**6: 1.0}}, {"logit_bias": 5}],
    ids=str,
)
def test_senseless_choices(reference_model: Model, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        reference_model.generate(SHORT, max_new_tokens=1, **options)
