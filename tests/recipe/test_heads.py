"""Heads: what they compute, what they are taught from, and a command that is stopped and goes on."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import train_heads
from drafters import states
from drafters.frozen_target import FrozenTarget
from drafters.heads import Heads, Shape

from ondevice.bundle import Bundle
from ondevice_export import export
from ondevice_export.checkpoint.heads import weights_sha256
from ondevice_export.checkpoint.models import open_target
from ondevice_export.checkpoint.source import locate
from tests.fixtures.tiny_models import VOCAB


def test_the_exporter_knows_the_same_weights(pair: Path) -> None:
    target = FrozenTarget.load(pair / "target", "tiny", torch.device("cpu"))
    with open_target(locate(str(pair / "target")), lambda line: None) as opened:
        assert weights_sha256(opened) == target.weights_sha256()


def test_untrained_heads_say_what_the_target_says(pair: Path) -> None:
    """Medusa's start: the state itself; so the first step of training is no worse than repeating the next token."""
    target = FrozenTarget.load(pair / "target", "tiny", torch.device("cpu"))
    shape = Shape(64, 3, 128, 2)
    heads = Heads(["medusa", "exit"], shape, target.decoder.norm.weight, target.projection, ordering=None, count=0)
    x = torch.randn(5, 64)
    torch.testing.assert_close(heads.heads["medusa"](x), x.expand(3, 5, 64))
    torch.testing.assert_close(heads.heads["exit"](x)[0], target.decoder.norm(x), rtol=1e-4, atol=1e-4)


def test_states_are_those_of_the_target(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "LENGTH", 32)
    target = FrozenTarget.load(pair / "target", "tiny", torch.device("cpu"))
    assert target.exit_layer == 2
    tokens = np.random.default_rng(1).integers(4, VOCAB, (9, 32)).astype(np.uint32)
    states.write_states(target, tokens, target.exit_layer, pair / "states.npy")
    kept = np.load(pair / "states.npy")
    with torch.no_grad():
        outputs = target.model(torch.from_numpy(tokens[8:].astype(np.int64)), output_hidden_states=True)
    assert target.cap is not None
    logits = target.cap * torch.tanh(torch.from_numpy(kept[0, 8].astype(np.float32)) @ target.projection.T / target.cap)
    torch.testing.assert_close(logits, outputs.logits[0], atol=0.05, rtol=0.01)
    lower = outputs.hidden_states[3][0]  # [0] is the embedding
    lower = lower * torch.rsqrt(lower.pow(2).mean(-1, keepdim=True))
    torch.testing.assert_close(torch.from_numpy(kept[1, 8].astype(np.float32)), lower, atol=0.01, rtol=0.01)


@pytest.mark.usefixtures("one_writer")
def test_the_command_trains_goes_on_and_exports(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (states, train_heads):
        monkeypatch.setattr(module, "LENGTH", 96)
    monkeypatch.setattr(train_heads.HeadsRun, "step_tokens", 4 * 96)
    monkeypatch.setattr("torch.compile", lambda function, **_: function)

    def train(tokens: int, *more: object) -> dict[str, object]:
        words = [
            "--target",
            pair / "target",
            "--text",
            pair / "text.txt",
            "--work",
            pair / "work",
            "--out",
            pair / "heads",
        ]
        words += ["--blocks", 24, "--tokens", tokens, "--offsets", 2, "--device", "cpu", *more]
        monkeypatch.setattr(sys, "argv", ["train_heads.py", *map(str, words)])
        train_heads.main()
        return json.loads((pair / "heads" / "figures.json").read_text())

    assert train(1000)["training"]["tokens"] == 1152  # type: ignore[index]
    assert train(2000)["training"]["tokens"] == 2304  # type: ignore[index]
    with pytest.raises(SystemExit, match="was begun with --exit-layer 2, not 1: name another --work"):
        train(3000, "--exit-layer", 1)
    assert "one ResBlock for each of 2 tokens" in (pair / "heads" / "README.md").read_text()
    bundle = Bundle.open(export(pair / "target", pair / "bundle"))
    assert {heads.kind: heads.offsets for heads in bundle.manifest.heads} == {"medusa": 2, "blockwise": 2, "exit": 1}
