"""What counts as a circle, and training that makes its tokens less likely."""

from pathlib import Path

import numpy as np
import pytest
import repetition
import target
import torch
from forward import places
from repetition import UnlikelihoodRun, circling
from schedule import Budget
from transformers import Gemma4ForCausalLM


def found(*pieces: list[int]) -> list[int]:
    """The marked places of the pieces put together."""
    return np.flatnonzero(circling(np.concatenate(pieces))).tolist()


def test_what_comes_a_third_time_circles_from_its_second_on() -> None:
    line = list(range(100, 112))
    assert found([1, 2, 3], line, line, line[:1], [4, 5]) == list(range(3 + 12, 3 + 25))
    assert found([1, 2, 3], line, line, [4, 5]) == []
    assert found([1, 2, 3], line, [7], line, [8], line, line[:6]) == []


def test_short_periods_may_go_on_for_a_while() -> None:
    assert found([1, 2], [9] * 9, [3]) == []
    assert found([1, 2], [9] * 10, [3]) == list(range(3, 12))
    assert found([1], [8, 9] * 8) == list(range(3, 17))


def test_longer_circles_are_left_alone() -> None:
    line = list(range(100, 101 + repetition.LONGEST_PERIOD))
    assert found(line * 4) == []


def test_circles_become_less_likely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repetition, "SHORT", 256)
    monkeypatch.setattr(target, "ROWS", 512)
    monkeypatch.setattr(UnlikelihoodRun, "step_tokens", 512)
    monkeypatch.setattr("torch.compile", lambda function, **_: function)
    random = np.random.default_rng(0)
    np.save(tmp_path / "train.npy", random.integers(20, 6000, 4000).astype(np.uint16))
    np.save(tmp_path / "raw.npy", np.tile(random.integers(20, 6000, 30), 100).astype(np.uint16))
    model = target.new_target()
    torch.save({"model": model.state_dict()}, tmp_path / "target.pt")
    run = UnlikelihoodRun(tmp_path, torch.device("cpu"), Budget(2048))
    assert isinstance(run.model, Gemma4ForCausalLM)
    ids, labels = run.own.batch(0, 2)
    run.places[256] = places(run.model, 256)
    with torch.no_grad():
        before = run.unlikelihood(ids, labels, 256)
    run.train()
    with torch.no_grad():
        after = run.unlikelihood(ids, labels, 256)
    assert 0 < after < before
    trained = target.trained_target(tmp_path).state_dict()  # what comes after it reads its weights
    assert all(torch.equal(weight, trained[name]) for name, weight in run.model.state_dict().items())
