"""The command that trains a draft model: stopped, gone on with, and exported beside its target."""

import json
import sys
from pathlib import Path

import pytest
import train_draft_model
from drafters import draft_model, states
from pair import target
from training import workers

import ondevice
from ondevice_export import export


@pytest.mark.usefixtures("one_writer")
def test_the_command_trains_goes_on_and_drafts(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (states, train_draft_model):
        monkeypatch.setattr(module, "LENGTH", 80)
    monkeypatch.setattr(train_draft_model, "HELD_OUT", 2)
    monkeypatch.setattr(draft_model, "SHORT", 256)
    monkeypatch.setattr(target, "ROWS", 512)
    monkeypatch.setattr(target.NextTokenRun, "step_tokens", 512)
    monkeypatch.setattr(train_draft_model, "launch", lambda work, count, store_file, *given: work(*given))
    monkeypatch.setattr("torch.compile", lambda function, **_: function)
    assert workers.count() == 1

    def train(tokens: int, blocks: int = 14) -> dict[str, float]:
        places = {"--target": "target", "--text": "text.txt", "--work": "work", "--out": "draft"}
        given = [word for option, name in places.items() for word in (option, str(pair / name))]
        given += ["--blocks", str(blocks), "--tokens", str(tokens), "--device", "cpu"]
        monkeypatch.setattr(sys, "argv", ["train_draft_model.py", *given])
        train_draft_model.main()
        figures: dict[str, float] = json.loads((pair / "draft" / "figures.json").read_text())
        return figures

    assert train(1000)["tokens"] == 1024
    with pytest.raises(SystemExit, match="was begun with --blocks 14, not 20: name another --work"):
        train(2000, blocks=20)
    figures = train(2000)
    assert figures["tokens"] == 2048
    assert 0 <= figures["agreement"] <= 1
    assert f"{figures['parameters'] / 1e6:.2f} M" in (pair / "draft" / "README.md").read_text()
    bundles = [export(pair / name, pair / f"{name}-bundle", drafter="none") for name in ("target", "draft")]
    with ondevice.load(bundles[0], drafter=bundles[1], threads=1) as model:
        plain = model.generate([5, 6, 7], max_new_tokens=20, temperature=0.0, drafter="none")
        drafted = model.generate(
            [5, 6, 7], max_new_tokens=20, temperature=0.0, num_assistant_tokens_schedule="constant"
        )
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.drafted > 0
