"""The command that trains a draft model: stopped, gone on with, and exported beside its target."""

import json
import sys
from pathlib import Path

import draft_model
import pytest
import states
import target
import train_draft_model
import workers
from tokenizers import Tokenizer, models, pre_tokenizers

import ondevice
from ondevice_export import export
from tests.tiny_models import VOCAB, save_target


def test_the_command_trains_goes_on_and_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_target(tmp_path / "target", "e2b")
    words = {f"w{number}": number for number in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, "w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "target" / "tokenizer.json"))
    (tmp_path / "text.txt").write_text(" ".join(f"w{4 + number % 300}" for number in range(2000)))
    for module in (states, train_draft_model):
        monkeypatch.setattr(module, "LENGTH", 80)
    monkeypatch.setattr(train_draft_model, "HELD_OUT", 2)
    monkeypatch.setattr(draft_model, "SHORT", 256)
    monkeypatch.setattr(target, "ROWS", 512)
    monkeypatch.setattr(target.NextTokenRun, "step_tokens", 512)
    monkeypatch.setattr(train_draft_model, "launch", lambda work, count, meeting, *given: work(*given))
    monkeypatch.setattr("torch.compile", lambda function, **_: function)
    assert workers.count() == 1

    def train(tokens: int) -> dict[str, float]:
        places = {"--target": "target", "--text": "text.txt", "--work": "work", "--out": "draft"}
        given = [word for option, name in places.items() for word in (option, str(tmp_path / name))]
        given += ["--blocks", "14", "--tokens", str(tokens), "--device", "cpu"]
        monkeypatch.setattr(sys, "argv", ["train_draft_model.py", *given])
        train_draft_model.main()
        figures: dict[str, float] = json.loads((tmp_path / "draft" / "figures.json").read_text())
        return figures

    assert train(1000)["tokens"] == 1024
    figures = train(2000)
    assert figures["tokens"] == 2048
    assert 0 <= figures["agreement"] <= 1
    assert f"{figures['parameters'] / 1e6:.2f} M" in (tmp_path / "draft" / "README.md").read_text()
    bundles = [export(tmp_path / name, tmp_path / f"{name}-bundle", drafter="none") for name in ("target", "draft")]
    with ondevice.load(bundles[0], drafter=bundles[1], threads=1) as model:
        plain = model.generate([5, 6, 7], max_new_tokens=20, temperature=0.0, drafter="none")
        drafted = model.generate(
            [5, 6, 7], max_new_tokens=20, temperature=0.0, num_assistant_tokens_schedule="constant"
        )
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.drafted > 0
