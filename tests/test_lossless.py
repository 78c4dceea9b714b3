"""On the pair that ships: whatever drafts, however long, the output is plain decoding's."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from ondevice import Model, Reply
from ondevice.drafters.mtp import MtpDrafter
from ondevice.drafters.protocol import Draft, DraftRequest
from ondevice.options import ScheduleName

SHORT = "def fibonacci(n):"
LONG = (
    "import os\nimport re\n\n\nclass Parser:\n"
    + "".join(f"    def field_{i}(self):\n        return self._fields[{i}]\n\n" for i in range(30))
    + "    def close(self):"
)
"""Past the window of 256 tokens, and repetitive, so that n-grams have something to find."""

PROMPTS = {"short": SHORT, "long": LONG}
DRAFTERS = ("mtp", "ngram", "medusa", "blockwise", "auto")
SCHEDULES = (*itertools.product(("constant", "heuristic"), (1, 4, 7)), ("auto", None))


def plain(model: Model, prompt: str, **options: Any) -> Reply:
    return model.generate(prompt, drafter="none", **options)


@pytest.fixture(scope="module")
def expected(reference_model: Model) -> dict[tuple[str, float], Reply]:
    return {
        (name, temperature): plain(reference_model, text, max_new_tokens=64, temperature=temperature, seed=11)
        for name, text in PROMPTS.items()
        for temperature in (0.0, 0.9)
    }


@pytest.mark.parametrize(("schedule", "k"), SCHEDULES)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("temperature", [0.0, 0.9], ids=["greedy", "seeded"])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_output_is_that_of_plain_decoding(
    reference_model: Model,
    expected: dict[tuple[str, float], Reply],
    prompt: str,
    temperature: float,
    drafter: str,
    schedule: ScheduleName,
    k: int | None,
) -> None:
    reply = reference_model.generate(
        PROMPTS[prompt],
        max_new_tokens=64,
        temperature=temperature,
        seed=11,
        drafter=drafter,
        num_assistant_tokens=k,
        num_assistant_tokens_schedule=schedule,
    )
    assert reply.token_ids == expected[prompt, temperature].token_ids
    assert reply.text == expected[prompt, temperature].text
    if schedule == "constant" and drafter == "mtp":
        assert 0 < reply.stats.accepted < reply.stats.drafted


def test_drafting_saves_forwards(reference_model: Model) -> None:
    reply = reference_model.generate(LONG, max_new_tokens=64, temperature=0.0, drafter="mtp", num_assistant_tokens=4)
    assert reply.stats.target_forwards < 63


def test_a_penalty_sees_the_draft_path(reference_model: Model) -> None:
    changed = False
    for prompt in PROMPTS.values():
        options: dict[str, Any] = {"max_new_tokens": 48, "temperature": 0.0, "repetition_penalty": 1.3}
        wanted = plain(reference_model, prompt, **options)
        changed |= wanted.token_ids != plain(reference_model, prompt, max_new_tokens=48, temperature=0.0).token_ids
        drafted = reference_model.generate(
            prompt, drafter="mtp", num_assistant_tokens=6, num_assistant_tokens_schedule="constant", **options
        )
        assert drafted.token_ids == wanted.token_ids
    assert changed, "the penalty did nothing, so nothing was tested"


def test_a_logits_processor_sees_the_draft_path(reference_model: Model) -> None:
    """One that forbids the last token but one: what it does depends on every token before."""
    contexts: list[int] = []

    def no_echo(logits: np.ndarray, context: Sequence[int]) -> np.ndarray:
        contexts.append(len(context))
        logits[context[-2]] = -np.inf
        return logits

    options: dict[str, Any] = {"max_new_tokens": 48, "temperature": 0.0, "logits_processors": [no_echo]}
    wanted = plain(reference_model, SHORT, **options)
    assert contexts == list(range(contexts[0], contexts[0] + 48))
    assert all(a != b for a, b in zip(wanted.token_ids, wanted.token_ids[2:], strict=False))
    drafted = reference_model.generate(
        SHORT, drafter="mtp", num_assistant_tokens=5, num_assistant_tokens_schedule="constant", **options
    )
    assert drafted.token_ids == wanted.token_ids


@pytest.mark.parametrize("drafter", [*DRAFTERS, "none"])
def test_a_reply_that_was_cut_off_goes_on_as_it_would_have(reference_model: Model, drafter: str) -> None:
    """With its seed, whatever drafts: draws depend on the place in the text, not on those before."""
    whole = plain(reference_model, SHORT, max_new_tokens=48, temperature=1.0, seed=5)
    begun = [*reference_model.encode(SHORT), *whole.token_ids[:20]]
    rest = reference_model.generate(begun, max_new_tokens=28, temperature=1.0, seed=5, drafter=drafter)
    assert rest.token_ids == whole.token_ids[20:]


def test_drafts_that_share_the_target_s_noise_are_right_more_often(reference_model: Model) -> None:
    class Greedy(MtpDrafter):
        def draft(self, request: DraftRequest) -> Draft:
            return super().draft(DraftRequest(request.nodes))

    target = reference_model.manifest.target
    taken = []
    for kind in (Greedy, MtpDrafter):
        drafter = kind(target.hidden_size, target.vocab_size)
        options: dict[str, Any] = {"drafter": drafter, "num_assistant_tokens_schedule": "constant"}
        replies = [
            reference_model.generate(SHORT, max_new_tokens=100, temperature=1.0, seed=seed, **options)
            for seed in range(6)
        ]
        rounds = sum(each.stats.num_drafts_per_pos[0] for each in replies)
        taken.append(sum(each.stats.num_accepted_tokens_per_pos[0] for each in replies) / rounds)
    assert taken[1] > 1.1 * taken[0]
