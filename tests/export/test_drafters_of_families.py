"""Drafters for targets other than Gemma 4: float32 graphs against transformers, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache, PreTrainedModel

import ondevice
from ondevice.bundle import Bundle
from ondevice.engines.ort import OrtEngine
from ondevice.engines.protocol import Rows, TokenTree
from ondevice.errors import CheckpointError
from ondevice_export import export
from ondevice_export.families import mtp as mtp_layers
from tests.fixtures import tiny_families
from tests.fixtures.mtp_layers import TorchLayer, random_layer
from tests.fixtures.tiny_drafters import DRAFTERS, save_drafter
from tests.fixtures.tiny_families import VOCAB, WINDOW, save_family
from tests.text.tokenizers_made import byte_level

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


MTP = "qwen3.5-mtp"
"""The target with an MTP layer in its checkpoint."""


class MtpOracle:
    """A target and its MTP layer in torch, after a prompt."""

    def __init__(self, target: PreTrainedModel, layer: TorchLayer, prompt: list[int]) -> None:
        self._target, self._layer, self._tokens = target, layer, prompt[1:]
        streams: list[torch.Tensor] = []
        hook = target.model.layers[-1].register_forward_hook(lambda _module, _inputs, out: streams.append(out[0]))
        with torch.no_grad():
            target(torch.tensor([prompt]))
        hook.remove()
        self.hidden = streams[0].view(len(prompt), -1)
        """[n, H], before the final norm."""

    @torch.no_grad()
    def step(self, token: int) -> np.ndarray:
        """The logits of a step, float32[V]; the last row of `hidden` is then the next one."""
        self._tokens = [*self._tokens, token]
        behind = self._layer.behind(self._target, self._tokens, self.hidden)[-1:]
        self.hidden = torch.cat([self.hidden, behind])
        return self._target.lm_head(self._layer.norm(behind[0])).numpy()


def exported(directory: Path, listed: int | None = None, monkeypatch: pytest.MonkeyPatch | None = None) -> Bundle:
    """A float32 bundle of the target below a directory, whose drafter scores `listed` tokens and those added."""
    if listed is not None and monkeypatch is not None:
        monkeypatch.setattr(mtp_layers, "LISTED", listed)
    return Bundle.open(export(directory / "model", directory / "bundle", quantize="none"))


@pytest.mark.parametrize(
    ("name", "listed"), [(MTP, None), (MTP, 90), ("qwen3.5-moe-mtp", None), ("qwen3-next-mtp", 90)]
)
def test_float32_steps_of_an_mtp_layer_equal_torch(
    name: str, listed: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five steps of a round after chunks of a prompt, of which the last is verified in part, twice."""
    target = save_family(tmp_path / "model", name)
    engine = OrtEngine(exported(tmp_path, listed, monkeypatch), threads=1)
    session = engine.open_session()
    prompt, token, hidden = PROMPT, 17, np.zeros(0, np.float32)
    for chunk in (PROMPT[:20], PROMPT[20:]):
        [outputs] = engine.forward([Rows(session, TokenTree.chain(chunk), [len(chunk) - 1])])
        session.commit(range(len(chunk)))
        hidden = outputs.hidden[0].copy()
    for _ in range(2):
        oracle, drafted = MtpOracle(target, random_layer(target), prompt), [token]
        for depth in range(5):
            np.testing.assert_allclose(hidden, oracle.hidden[-1].numpy(), atol=1e-4)
            expected, found = oracle.step(drafted[-1]), session.draft_step(drafted[-1], hidden, depth)
            assert found.candidates.tolist() == list(range(listed or VOCAB))
            np.testing.assert_allclose(found.logits, expected[found.candidates], atol=1e-4)
            drafted, hidden = [*drafted, int(expected.argmax())], found.hidden.copy()
        [outputs] = engine.forward([Rows(session, TokenTree.chain(drafted), range(len(drafted)))])
        session.commit(range(3))
        prompt, token, hidden = prompt + drafted[:3], 11, outputs.hidden[2].copy()
    engine.close()


def test_an_mtp_layer_of_a_model_without_convolutions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: None
) -> None:
    """Its projected hidden states have the only cache of their kind."""
    kind, own = tiny_families.FAMILIES[MTP]
    changed = {**own, "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
    monkeypatch.setitem(tiny_families.FAMILIES, MTP, (kind, changed))
    target = save_family(tmp_path / "model", MTP)
    engine = OrtEngine(exported(tmp_path), threads=1)
    session, oracle = engine.open_session(), MtpOracle(target, random_layer(target), PROMPT)
    engine.forward([Rows(session, TokenTree.chain(PROMPT), [])])
    session.commit(range(len(PROMPT)))
    found = session.draft_step(17, oracle.hidden[-1].numpy())
    np.testing.assert_allclose(found.logits, oracle.step(17)[found.candidates], atol=1e-4)
    engine.close()
    with ondevice.load(export(tmp_path / "model", tmp_path / "int8", quantize="int8"), engine="simd") as model:
        how: dict[str, Any] = {
            "max_new_tokens": 30,
            "temperature": 1.0,
            "seed": 3,
            "logit_bias": {7: 90, 9: 90},
        }
        plain = model.generate(PROMPT, drafter="none", **how)
        drafted = model.generate(PROMPT, drafter="mtp", **how)
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.num_accepted_tokens > 0


def test_experts_of_an_mtp_layer_may_be_tensors_of_their_own(tmp_path: Path) -> None:
    """As many published checkpoints have them: three matrices for each expert."""
    save_family(tmp_path / "model", "qwen3.5-moe-mtp")
    whole = export(tmp_path / "model", tmp_path / "whole", quantize="int8")
    weights = tmp_path / "model" / "model.safetensors"
    tensors, experts = load_file(weights), "mtp.layers.0.mlp.experts."
    gate_up, down = (tensors.pop(f"{experts}{name}_proj") for name in ("gate_up", "down"))
    for number, (both, own) in enumerate(zip(gate_up, down, strict=True)):
        for name, values in (("gate", both.chunk(2)[0]), ("up", both.chunk(2)[1]), ("down", own)):
            tensors[f"{experts}{number}.{name}_proj.weight"] = values.clone()
    save_file(tensors, weights, metadata={"format": "pt"})
    apart = export(tmp_path / "model", tmp_path / "apart", quantize="int8")
    for name in ("drafter.onnx", "drafter.onnx.data", "target.onnx.data"):
        assert (whole / name).read_bytes() == (apart / name).read_bytes()


def test_without_a_drafter_nothing_of_an_mtp_layer_is_written(tmp_path: Path) -> None:
    save_family(tmp_path / "model", MTP)
    bundle = Bundle.open(export(tmp_path / "model", tmp_path / "bundle", drafter="none"))
    assert (bundle.manifest.target.mtp, bundle.manifest.drafter) == (None, None)
    assert "mtp" not in (bundle.path / "bundle.json").read_text()


@pytest.mark.parametrize("change", [{"mtp_num_hidden_layers": 2}, {"mtp_use_dedicated_embeddings": True}])
def test_mtp_layers_of_other_forms_are_left_out_with_a_note(change: dict[str, object], tmp_path: Path) -> None:
    save_family(tmp_path / "model", MTP)
    config, notes = tmp_path / "model" / "config.json", list[str]()
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    bundle = Bundle.open(export(tmp_path / "model", tmp_path / "bundle", note=notes.append))
    assert bundle.manifest.drafter is None
    assert any("its MTP layers are left out" in note for note in notes)


def test_a_calibrated_export_leaves_an_mtp_layer_as_it_is(tmp_path: Path, kernels: None) -> None:
    """No text is run through it: its matrices are those of an export without a calibration, the model's are not."""
    save_family(tmp_path / "model", MTP)
    (tmp_path / "model" / "tokenizer.json").write_text(byte_level()._backend.to_str(), "utf-8")
    (tmp_path / "text").write_text("A text that the model reads for its calibration. " * 40, "utf-8")
    plain, calibrated = (
        Bundle.open(export(tmp_path / "model", tmp_path / name, quantize="int4", calibrate=text))
        for name, text in (("plain", None), ("calibrated", str(tmp_path / "text")))
    )
    assert plain.manifest.drafter == calibrated.manifest.drafter is not None

    def differ(name: str) -> bool:
        found = []
        for bundle in (plain, calibrated):
            table = bundle.manifest.tensors["target.onnx"].tensors[name]
            with (bundle.path / "target.onnx.data").open("rb") as file:
                file.seek(table.offset)
                found.append(file.read(table.bytes))
        return found[0] != found[1]

    assert not any(differ(f"mtp.{name}.weight") for name in ("hidden_projection", "self_attn.k_proj"))
    assert differ("layers.0.mlp.down_proj.weight")


def test_an_incomplete_mtp_layer_is_named(tmp_path: Path) -> None:
    save_family(tmp_path / "model", MTP)
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    del tensors["mtp.layers.0.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"mtp\.layers\.0\.mlp\.up_proj\.weight is missing"):
        export(tmp_path / "model", tmp_path / "bundle")
    assert Bundle.open(export(tmp_path / "model", tmp_path / "bundle", drafter="none")).manifest.drafter is None


@pytest.mark.parametrize("measured", [0.4, None])
def test_the_acceptance_of_a_drafter_is_what_its_configuration_names(measured: float | None, tmp_path: Path) -> None:
    save_family(tmp_path / "model", "smollm2")
    save_drafter(tmp_path / "drafter", "smollm2", tmp_path / "model")
    config = tmp_path / "drafter" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"acceptance": measured}))
    drafter = Bundle.open(export(tmp_path / "model", tmp_path / "bundle")).manifest.drafter
    assert drafter is not None
    assert drafter.acceptance == measured
