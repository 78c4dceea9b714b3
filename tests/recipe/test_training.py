"""Forward, optimiser and schedule against transformers and torch; a run that is resumed, and one begun from a pair."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drafters import draft_model
from pair import target
from pair.attention import causal_masks
from pair.checkpoint import earlier, keep_start, save_drafter, save_target
from pair.drafter import first_drafter, new_drafter
from pair.forward import head_gradients, hidden_states, places
from text.tokenizer import VOCABULARY
from torch import nn
from torch.nn import functional
from training.muon import Muon
from training.run import Run, spent_budget
from training.schedule import DECAY, Budget
from transformers import Gemma4ForCausalLM

LENGTH = 512  # twice the window


@pytest.fixture(scope="module", params=["target", "draft model"])
def model(request: pytest.FixtureRequest) -> Gemma4ForCausalLM:
    config = target.target_config()
    return target.new_model(config if request.param == "target" else draft_model.draft_config(config))


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(16, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def test_the_lean_forward_is_the_models(model: Gemma4ForCausalLM, ids: torch.Tensor) -> None:
    masks = causal_masks(LENGTH, model.config.sliding_window, torch.device("cpu"))
    with torch.no_grad():
        wanted = model.model(input_ids=ids, attention_mask=masks, use_cache=False).last_hidden_state
        reference = model.model(input_ids=ids, use_cache=False).last_hidden_state
        lean = hidden_states(model, ids, places(model, LENGTH))
    torch.testing.assert_close(wanted, reference, atol=1e-4, rtol=1e-4)
    assert (lean - wanted).abs().mean() < 0.01 * wanted.abs().mean()  # bfloat16 products


def test_the_heads_gradients_are_autograds(model: Gemma4ForCausalLM) -> None:
    hidden = torch.randn(1024, model.config.hidden_size, generator=torch.Generator().manual_seed(2))
    labels = torch.randint(0, VOCABULARY, (1024,), generator=torch.Generator().manual_seed(3))
    head = model.lm_head.weight.detach().clone().requires_grad_()
    rows = hidden.clone().requires_grad_()
    wanted = functional.cross_entropy(target.softcapped(rows @ head.T, 30.0), labels)
    wanted.backward()
    loss, to_hidden, to_head = head_gradients(hidden, head.detach(), labels, 30.0)
    torch.testing.assert_close(loss, wanted.detach(), rtol=1e-3, atol=1e-3)
    for found, gradient in ((to_hidden, rows.grad), (to_head, head.grad)):
        assert gradient is not None
        assert (found - gradient).norm() < 0.02 * gradient.norm()


def test_muon_is_torchs() -> None:
    torch.manual_seed(0)
    own = [nn.Parameter(torch.randn(shape)) for shape in ((32, 64), (64, 32), (32, 64), (48, 48))]
    torchs = [nn.Parameter(weight.detach().clone()) for weight in own]
    options: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.05, "momentum": 0.95}
    pair = Muon(own, **options), torch.optim.Muon(torchs, **options, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        for weight, other in zip(own, torchs, strict=True):
            weight.grad = torch.randn_like(weight)
            other.grad = weight.grad.clone()
        for optimiser in pair:
            optimiser.step()
    for weight, other in zip(own, torchs, strict=True):
        torch.testing.assert_close(weight, other, atol=2e-3, rtol=0)  # bfloat16; the rate is 0.01


def test_the_rate_rises_stays_and_falls() -> None:
    budget = Budget(100_000_000)
    rates = []
    for tokens in (500_000, 49_500_000, 25_000_000, 20_000_000, 5_000_000):
        budget.spend(tokens, 1.0)
        rates.append(budget.rate)
    assert rates == pytest.approx([0.5, 1.0, 1.0, 1 - 0.8**0.5, 0.0], abs=1e-3)
    assert budget.progress == 1


def test_finishing_begins_the_decay_at_once() -> None:
    budget = Budget(100_000_000, spent_tokens=30_000_000)
    budget.finish()
    assert budget.tokens == pytest.approx(30_000_000 / (1 - DECAY), abs=1)
    assert budget.rate == pytest.approx(1.0, abs=0.01)
    budget.spend(5_000_000, 1.0)
    total = budget.tokens
    budget.finish()
    assert budget.tokens == total
    assert 0 < budget.rate < 0.5


class TinyRun(Run):
    """Learns a constant."""

    step_tokens = 10

    def __init__(self, file: Path, budget: Budget) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Sequential(nn.Linear(4, 4)), file, budget)

    def accumulate(self) -> float:
        inputs = torch.from_numpy(np.random.default_rng(self.step).normal(size=(8, 4)).astype(np.float32))
        loss = (self.model(inputs) - 1).square().mean()
        loss.backward()
        return loss.item()


def test_a_resumed_run_is_the_run_in_one_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.run.SAVE_SECONDS", -1)  # after every step
    whole = TinyRun(tmp_path / "whole.pt", Budget(400))
    whole.train()
    broken = TinyRun(tmp_path / "broken.pt", Budget(400))
    broken.update()
    broken.budget.spend(broken.step_tokens, 0.0)
    broken.save()
    resumed = TinyRun(tmp_path / "broken.pt", spent_budget(tmp_path / "broken.pt", 400))
    resumed.train()
    for weight, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(weight, other)
    assert spent_budget(tmp_path / "broken.pt", 400).progress == 1


def test_training_goes_on_from_a_pair(tmp_path: Path) -> None:
    pair, work = tmp_path / "pair", tmp_path / "work"
    work.mkdir()
    kept = target.new_target()
    nn.init.constant_(kept.model.norm.weight, 1.5)
    drafter = new_drafter(kept)
    nn.init.constant_(drafter.model.norm.weight, 2.5)
    save_drafter(drafter, pair / "drafter")
    save_target(kept, pair / "target")
    (pair / "target" / "tokenizer.json").write_text("{}")
    spent = {"target": {"tokens": 3_000_000, "core_hours": 2.0}, "drafter": {"tokens": 10, "core_hours": 0.5}}
    (pair / "figures.json").write_text(json.dumps({"training": spent}))
    np.save(work / "train.npy", np.arange(40_000, dtype=np.uint16) % VOCABULARY)
    fresh = target.target_run(work, torch.device("cpu"), Budget(1000))
    assert earlier(work, "target") == {"tokens": 0, "core_hours": 0}

    keep_start(pair, work)
    (pair / "figures.json").write_text("{}")
    keep_start(pair, work)
    assert earlier(work, "target") == spent["target"]
    assert earlier(work, "drafter") == spent["drafter"]
    assert (work / "tokenizer.json").read_text() == "{}"
    run = target.target_run(work, torch.device("cpu"), Budget(1000))
    assert isinstance(run.model, Gemma4ForCausalLM)
    for name, weight in run.model.state_dict().items():
        assert torch.equal(weight, kept.state_dict()[name].float()), name
    assert torch.equal(first_drafter(work, run.model).model.norm.weight, torch.full((128,), 2.5))
    orders = [[int(some.blocks[target.SHORT][0].block(index)[0]) for index in range(8)] for some in (fresh, run)]
    assert orders[0] != orders[1]
