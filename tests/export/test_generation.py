"""Exported pairs of every family generate what transformers generates, past the window too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import ondevice
from ondevice import Model
from ondevice.engines.protocol import Rows, TokenTree
from ondevice.options import ScheduleName
from tests.export.conftest import Pair
from tests.fixtures.tiny_models import VOCAB, WINDOW

NEW_TOKENS = 64
PROMPT = [2, *np.random.default_rng(3).integers(3, VOCAB, WINDOW - 4).tolist()]
"""Shorter than the window: the 64 new tokens carry the sequence past it."""


@pytest.fixture(scope="module")
def loaded(pair: Pair) -> Iterator[tuple[Model, tuple[int, ...]]]:
    """The model, and transformers' greedy continuation."""
    target: Any = pair.target
    wanted = target.generate(
        torch.tensor([PROMPT]), max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False
    )[0, len(PROMPT) :]
    with ondevice.load(pair.bundle, threads=2) as model:
        yield model, tuple(wanted.tolist())


def test_greedy_tokens_are_those_of_transformers(loaded: tuple[Model, tuple[int, ...]]) -> None:
    model, wanted = loaded
    assert model.generate(PROMPT, max_new_tokens=NEW_TOKENS, temperature=0.0, drafter="none").token_ids == wanted


def test_drafts_change_none_of_them(loaded: tuple[Model, tuple[int, ...]]) -> None:
    model, wanted = loaded
    schedules: list[tuple[ScheduleName, int]] = [("constant", 3), ("heuristic", 6)]
    for number, drafter in enumerate(("mtp", "ngram", "medusa", "blockwise", "auto")):
        schedule, k = schedules[number % 2]
        reply = model.generate(
            PROMPT,
            max_new_tokens=NEW_TOKENS,
            temperature=0.0,
            drafter=drafter,
            num_assistant_tokens=k,
            num_assistant_tokens_schedule=schedule,
        )
        assert reply.token_ids == wanted
        if drafter == "mtp":
            assert reply.stats.drafted > 0


@pytest.mark.parametrize("length", [WINDOW - 5, WINDOW, 4 * WINDOW])
def test_drafts_are_those_of_transformers(loaded: tuple[Model, tuple[int, ...]], pair: Pair, length: int) -> None:
    """Three steps of a round, from a session's own cache; the newest token follows `length` verified ones."""
    engine = loaded[0].engine
    session = engine.open_session()
    ids = np.random.default_rng(length).integers(3, VOCAB, length + 1).tolist()
    outputs = engine.forward([Rows(session, TokenTree.chain(ids[:-1]), [length - 1])])[0]
    hidden = outputs.hidden[0].copy()
    session.commit(range(length))
    with torch.no_grad():
        target = pair.target(torch.tensor([ids[:-1]]), output_hidden_states=True, return_shared_kv_states=True)
        state = target.hidden_states[-1][:, -1:]
        token = ids[-1]
        for _ in range(3):
            embedded = pair.target.get_input_embeddings()(torch.tensor([[token]]))
            wanted = pair.drafter(
                inputs_embeds=torch.cat([embedded, state], -1),
                position_ids=torch.tensor([[length]]),
                shared_kv_states=target.shared_kv_states,
            )
            step = session.draft_step(token, hidden)
            np.testing.assert_allclose(step.logits, wanted.logits[0, 0].numpy()[step.candidates], rtol=0, atol=1e-4)
            np.testing.assert_allclose(step.hidden, wanted.last_hidden_state[0, 0].numpy(), rtol=0, atol=1e-4)
            token, hidden, state = int(wanted.logits.argmax()), step.hidden, wanted.last_hidden_state
            assert token == step.candidates[step.logits.argmax()]
