"""Drafters for targets other than Gemma 4: float32 graphs against transformers, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import DynamicCache, PreTrainedModel

from ondevice.bundle import Bundle
from ondevice.engines.ort import OrtEngine
from ondevice.engines.protocol import Rows, TokenTree
from ondevice_export import export
from tests.fixtures.tiny_drafters import DRAFTERS, save_drafter
from tests.fixtures.tiny_families import VOCAB, WINDOW, save_family

PROMPT = np.random.default_rng(0).integers(0, VOCAB, 2 * WINDOW + 5).tolist()


class Oracle:
    """A target and its drafter in torch, after a prompt."""

    def __init__(self, target: PreTrainedModel, drafter: PreTrainedModel, path: Path, prompt: list[int]) -> None:
        self._target, self._drafter, self._length = target, drafter, len(prompt)
        self._tokens = load_file(path / "model.safetensors").get("masked_embedding.head_tokens")
        kinds = getattr(target.config, "layer_types", None) or ["full_attention"] * target.config.num_hidden_layers
        cache = DynamicCache(config=target.config if "conv" in kinds else None)
        with torch.no_grad():
            outputs = target(torch.tensor([prompt]), past_key_values=cache, use_cache=True, output_hidden_states=True)
        self.hidden = outputs.hidden_states[-1][:, -1:]
        self._shared = {
            kind: (layer.keys, layer.values) for kind, layer in zip(kinds, cache.layers, strict=True) if kind != "conv"
        }  # the last layer of each kind
        self._shared.setdefault("sliding_attention", self._shared["full_attention"])

    @torch.no_grad()
    def step(self, token: int) -> np.ndarray:
        """The logits of a step, float32[V]; `hidden` is then the next one. Tokens that are not scored have the least
        logit - 1.
        """
        embedded = self._target.get_input_embeddings()(torch.tensor([[token]]))
        outputs = self._drafter(
            inputs_embeds=torch.cat([embedded, self.hidden], dim=-1),
            position_ids=torch.tensor([[self._length]]),
            shared_kv_states=self._shared,
        )
        self.hidden = outputs.last_hidden_state
        if self._tokens is None:
            return outputs.logits[0, 0].numpy()
        scored = self._target.lm_head.weight[self._tokens.long()] @ self.hidden[0, 0]
        every = torch.full((VOCAB,), scored.min().item() - 1)
        every[self._tokens.long()] = scored
        return every.numpy()


@pytest.mark.parametrize("name", DRAFTERS)
def test_float32_steps_equal_transformers(name: str, tmp_path: Path) -> None:
    """Four steps of a round, past the window: candidates, their logits, and the next hidden state."""
    target = save_family(tmp_path / "model", name)
    drafter = save_drafter(tmp_path / "drafter", name, tmp_path / "model")
    oracle = Oracle(target, drafter, tmp_path / "drafter", PROMPT)
    engine = OrtEngine(Bundle.open(export(tmp_path / "model", tmp_path / "bundle", quantize="none")), threads=1)
    session = engine.open_session()
    [outputs] = engine.forward([Rows(session, TokenTree.chain(PROMPT), [len(PROMPT) - 1])])
    session.commit(range(len(PROMPT)))
    token, hidden = 17, outputs.hidden[0].copy()
    np.testing.assert_allclose(hidden, oracle.hidden[0, 0].numpy(), atol=1e-4)
    for _ in range(4):
        expected, found = oracle.step(token), session.draft_step(token, hidden)
        rest = np.delete(expected, found.candidates)
        assert len(set(found.candidates.tolist())) == len(found.candidates) == VOCAB - len(rest)
        np.testing.assert_allclose(found.logits, expected[found.candidates], atol=1e-4)
        np.testing.assert_allclose(rest, np.full_like(rest, found.logits.min() - 1), atol=1e-4)
        np.testing.assert_allclose(found.hidden, oracle.hidden[0, 0].numpy(), atol=1e-4)
        token, hidden = int(expected.argmax()), found.hidden.copy()
    engine.close()


@pytest.mark.parametrize("measured", [0.4, None])
def test_the_acceptance_of_a_drafter_is_what_its_configuration_names(measured: float | None, tmp_path: Path) -> None:
    save_family(tmp_path / "model", "smollm2")
    save_drafter(tmp_path / "drafter", "smollm2", tmp_path / "model")
    config = tmp_path / "drafter" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"acceptance": measured}))
    drafter = Bundle.open(export(tmp_path / "model", tmp_path / "bundle")).manifest.drafter
    assert drafter is not None
    assert drafter.acceptance == measured
