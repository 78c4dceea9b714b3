"""Published weights in float32 give transformers' logits and greedy text; quantised ones stay close to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ondevice import Model
from ondevice.arrays import Float32Array
from ondevice.engines.protocol import Rows, TokenTree
from tests.conftest import ROOT
from tests.published_models.conftest import MODELS, LoadModel

QUESTIONS = (
    "Why is the sky blue?",
    "Write a haiku about rain.",
    "How many legs has a spider?",
    "Explain recursion to a child.",
    "Translate to French: Good morning, my friend.",
    "def fibonacci(n):",
    "List three uses of a paper clip.",
    "Who wrote Hamlet?",
    "Summarise: The cat sat on the mat, and then it slept.",
    "What is 17 plus 25?",
)
LONG = (ROOT / "LICENSE").read_text("utf-8")[:5000]
"""About 1,000 tokens of English, past Gemma 3's window of 512. A text that repeats itself is no test: there Gemma 3
amplifies the order of sums in single rows, to errors of 0.1."""

NEW_TOKENS = 64

pytestmark = [pytest.mark.needs("oracle"), pytest.mark.slow]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("text", [QUESTIONS[0], LONG])
def test_float32_logits(loaded: LoadModel, oracle: Callable[[str], Any], name: str, text: str) -> None:
    model = loaded(name, "none", "ort")
    ids = model.encode(text)
    assert np.abs(logits(model, ids) - _oracle_logits(oracle(name), ids)).max() < 1e-3


@pytest.mark.parametrize("name", MODELS)
def test_greedy_text(loaded: LoadModel, oracle: Callable[[str], Any], name: str) -> None:
    """Every token is the likeliest of transformers' distribution after the same tokens; ties are within 0.01."""
    model = loaded(name, "none", "ort")
    for question in QUESTIONS:
        ids = model.encode(question)
        reply = model.generate(ids, max_new_tokens=NEW_TOKENS, temperature=0.0, drafter="none")
        assert len(reply.token_ids) == NEW_TOKENS or reply.finish_reason == "stop"
        wanted = _oracle_logits(oracle(name), [*ids, *reply.token_ids])[len(ids) - 1 : -1]
        chosen = wanted[np.arange(len(reply.token_ids)), list(reply.token_ids)]
        assert (chosen > wanted.max(axis=-1) - 0.01).all()


MAX_KL = {
    ("smollm2", "keep"): 0.006,
    ("smollm2", "int8"): 0.007,
    ("gemma3", "keep"): 0.006,
    ("gemma3", "int8"): 0.006,
}
"""Nats per token from transformers' float32 distribution on `LONG`. The int4 of blocks of 32 loses 0.2 and more."""


@pytest.mark.parametrize(("name", "weights"), MAX_KL)
@pytest.mark.parametrize("engine", ["simd", "ort"])
def test_quantised_distributions(
    loaded: LoadModel, oracle: Callable[[str], Any], name: str, weights: str, engine: str
) -> None:
    model = loaded(name, weights, engine)
    ids = model.encode(LONG)
    wanted = torch.tensor(_oracle_logits(oracle(name), ids)).log_softmax(-1)
    found = torch.tensor(logits(model, ids)).log_softmax(-1)
    loss = (wanted.exp() * (wanted - found)).sum(-1).mean()
    assert 0 <= loss < MAX_KL[name, weights]


def logits(model: Model, ids: list[int]) -> Float32Array:
    """The logits of every row of a prompt, float32[T, V], read in chunks."""
    session = model.engine.open_session()
    rows, at = [], 0
    while at < len(ids):
        chunk = ids[at : at + min(session.max_rows(), 128)]
        out = model.engine.forward([Rows(session, TokenTree.chain(chunk), range(len(chunk)))])[0]
        rows.append(out.logits.copy())
        session.commit(range(len(chunk)))
        at += len(chunk)
    session.close()
    return np.concatenate(rows)


def _oracle_logits(original: Any, ids: list[int]) -> Float32Array:
    with torch.inference_mode():
        found: Float32Array = original(torch.tensor([ids])).logits[0].numpy()
    return found
