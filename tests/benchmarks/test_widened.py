"""A small widened pair computes what the reference pair does: logits, greedy text, and the drafts of every drafter."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

import ondevice
from benchmarks.bundles.widened import PAIR, compare, write_bundle, write_draft_model
from ondevice.cli.bench.measure import PLAIN, Configuration
from ondevice.engines.protocol import Rows, TokenTree
from ondevice_export import export

if TYPE_CHECKING:
    from ondevice import Model
    from ondevice.options import GenerationKeywords

PROMPT = (PAIR.parent / "demo_prompt.txt").read_text("utf-8")
TOKENS = 100
"""With the prompt, more than the window: layers with the wrong one would change the text."""

pytestmark = pytest.mark.needs("onnxruntime")  # the engine for float32


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, kernels: None):
    """The pair and its widened form, in float32."""
    directory = tmp_path_factory.mktemp("widened")
    export(PAIR / "target", directory / "pair", quantize="none")
    write_bundle(directory / "wide", "small", quantize="none")
    with (
        ondevice.load(directory / "pair", engine="ort", threads=1) as pair,
        ondevice.load(directory / "wide", engine="ort", threads=1) as wide,
    ):
        yield pair, wide


def logits_and_hidden_states(model: Model):
    """Logits and hidden states of the prompt's tokens: float32[T, V], float32[T, H]."""
    session = model.engine.open_session()
    prompt = TokenTree.chain(model.encode(PROMPT))
    [outputs] = model.engine.forward([Rows(session, prompt, range(len(prompt)))])
    return np.array(outputs.logits), np.array(outputs.hidden)


def test_logits_and_hidden_states_are_the_pairs(models: tuple[Model, Model]) -> None:
    (logits, hidden), (wide_logits, wide_hidden) = map(logits_and_hidden_states, models)
    used = logits.shape[1]
    assert wide_logits.shape[1] == 2 * used
    assert np.abs(wide_logits[:, :used] - logits).max() < 1e-4
    assert wide_logits[:, used:].max() < logits.max(axis=1).min() - 30
    own = hidden.shape[1]
    assert np.abs(wide_hidden[:, :own] - hidden).max() < 1e-4
    assert not wide_hidden[:, own:-1].any()
    assert 2.0**-8 < wide_hidden[:, -1].min() <= wide_hidden[:, -1].max() < 2.0**-2


def test_the_text_and_the_drafts_are_the_pairs(models: tuple[Model, Model]) -> None:
    for configuration in (PLAIN, *(Configuration(name, "4") for name in ("mtp", "medusa", "blockwise"))):
        options: GenerationKeywords = {**configuration.options(), "max_new_tokens": TOKENS, "temperature": 0.0}
        replies = [model.generate(PROMPT, **options) for model in models]
        pair, wide = replies
        assert len(pair.token_ids) == TOKENS
        assert wide.token_ids == pair.token_ids
        assert wide.stats.draft_figures() == pair.stats.draft_figures()


def test_other_prompts_and_sampled_text(models: tuple[Model, Model]) -> None:
    for prompt in ("class Stack:\n", "def is_prime(n):\n"):
        pair, wide = (model.generate(prompt, max_new_tokens=40, temperature=1.0, seed=3) for model in models)
        assert wide.text == pair.text


def test_the_draft_models_logits_are_the_pairs(tmp_path: Path, kernels: None) -> None:
    export(PAIR / "draft-model", tmp_path / "pair", drafter="none", heads="none", quantize="none")
    write_draft_model(tmp_path / "wide", "small", quantize="none")
    found = []
    for name in ("pair", "wide"):
        with ondevice.load(tmp_path / name, engine="ort", threads=1) as model:
            found.append(logits_and_hidden_states(model)[0])
    logits, wide = found
    used = logits.shape[1]
    assert wide.shape[1] == 2 * used
    assert np.abs(wide[:, :used] - logits).max() < 2e-3  # a norm's epsilon counts 1.5 times as much
    assert wide[:, used:].max() < logits.max(axis=1).min() - 30


def test_int4_codes_are_the_pairs(tmp_path: Path, kernels: None) -> None:
    """Only the gates of per-layer embeddings and the epsilon of norms differ: texts part late, and seldom."""
    export(PAIR / "target", tmp_path / "pair", head_bits=4)
    write_bundle(tmp_path / "wide", "small", head_bits=4)
    lines = compare(tmp_path / "wide", tmp_path / "pair").splitlines()
    replies = [line.split("|")[1:4] for line in lines[2:-2]]
    assert len(replies) == 15
    equal = [int(tokens if same.strip() == "all" else same) for _, tokens, same in replies]
    assert sum(equal) > 0.6 * sum(int(tokens) for _, tokens, _ in replies)
    assert lines[-1].endswith("of 15 greedy replies are the pair's, token for token")
