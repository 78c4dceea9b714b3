"""`Model.forget`: nothing of an earlier text is left to draft from, or to skip computing."""

import pytest

from ondevice.errors import UsageError
from tests.fixtures.model_made import load_toy, write_bundle


@pytest.fixture
def model(tmp_path):
    with load_toy(write_bundle(tmp_path / "toy")) as model:
        yield model


def run(model):
    """Tokens, how many were drafted right, and what it cost."""
    options = {"max_new_tokens": 40, "drafter": "ngram", "num_assistant_tokens_schedule": "constant"}
    before = model.engine.forwards
    reply = model.generate("abcde", **options, num_assistant_tokens=4)
    return reply.token_ids, reply.stats.accepted, model.engine.forwards - before


def test_a_repeated_prompt_is_drafted_from_memory_unless_forgotten(model):
    first = run(model)
    assert run(model)[1] > first[1]
    model.forget()
    assert run(model) == first


def test_the_cache_is_computed_anew(model):
    model.generate("abcdeabcde", max_new_tokens=1)
    assert model.generate("abcdeabcde", max_new_tokens=1).stats.cached_tokens == 10
    model.forget()
    assert model.generate("abcdeabcde", max_new_tokens=1).stats.cached_tokens == 0


def test_a_running_generation_keeps_its_memory(model):
    steps = model.stream("abc", max_new_tokens=5)
    next(steps)
    with pytest.raises(UsageError, match="generating"):
        model.forget()
    steps.close()
    model.forget()
