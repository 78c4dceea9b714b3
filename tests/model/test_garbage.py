"""The garbage collector closes an abandoned generation at whatever line of another generation it happens to run."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ondevice
from ondevice.generate import prefix_cache
from ondevice.generate.batch import Batch
from ondevice.generate.costs import CostsFile, Curve
from ondevice.generation import Generation


@pytest.fixture
def collecting_by_hand() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def abandoned(model: ondevice.Model) -> weakref.ref[Generation]:
    """A generation that has begun, in a cycle that nothing refers to."""
    generation: Any = model.stream("def g(", max_new_tokens=50)
    next(generation)
    generation.cycle = generation
    return weakref.ref(generation)


@pytest.mark.usefixtures("collecting_by_hand")
@pytest.mark.parametrize(
    ("owner", "name"),
    [(prefix_cache, "common_length"), (Curve, "measured"), (Batch, "__len__")],
    ids=["prefix cache", "costs", "scheduler"],
)
def test_a_generation_may_be_collected_anywhere(
    reference_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    """Also where a thread holds a lock that the generation's end needs."""
    model = ondevice.load(reference_bundle, threads=1)
    model._scheduler._costs_file = CostsFile(tmp_path, ["test"])
    for prompt in ("import os", "def f("):
        model.generate(prompt, max_new_tokens=20)
    left = abandoned(model)
    real = getattr(owner, name)

    def collect(*arguments: Any) -> Any:
        gc.collect()
        return real(*arguments)

    monkeypatch.setattr(owner, name, collect)

    def work() -> None:
        model.generate("def f(", max_new_tokens=20)
        model.close()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(timeout=300)
    assert not thread.is_alive()
    assert left() is None
