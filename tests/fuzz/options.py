"""Random options of `ondevice.load` and of generation, with values of every type and size."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import numpy as np

import ondevice
from ondevice.options import GenerationOptions
from tests.fuzz import child
from tests.fuzz.bundles import ENGINES, IDS, Engine
from tests.fuzz.mutations import HOSTILE

VALUES: tuple[Any, ...] = (
    *HOSTILE, b"x", (), {1}, object(), print, lambda *words: None, lambda *words: 1 / 0, lambda first, second: second,
    np.float32(0.5), np.int64(3), np.zeros(3), "auto", "none", "mtp", "ngram", "constant", "heuristic", ["a", "b"],
    [lambda first, second: second], [lambda first, second: first[:-1]], [lambda first, second: first * np.nan], 0.7, 40,
)  # fmt: skip

LOADING = (
    "threads",
    "context_length",
    "max_sequences",
    "cache_bytes",
    "kv_cache",
    "attention",
    "attention_keys",
    "attention_width",
    "engine",
    "on_prepare",
)
GENERATING = tuple(field.name for field in dataclasses.fields(GenerationOptions))
PROMPTS: tuple[Any, ...] = (
    IDS, "def f(x):", [{"role": "user", "content": "hi"}], "", [], None, 5, [5.0], [[]], [True], [-1],
    [10**9], "\ud800", {}, b"x",
    [{"role": "user"}], [{"role": ["user"], "content": "x"}], [{"role": "user", "content": None}], "a" * 10**7,
)  # fmt: skip


class Calls:
    def __init__(self, bundle: Path) -> None:
        self._bundle = bundle

    def try_one(self, rng: random.Random) -> tuple[str, str, list[str]]:
        """See `Mutants.try_one`."""
        engine: Engine = rng.choice(ENGINES)
        loading: dict[str, Any] = {"engine": engine, "threads": 1, "context_length": 64}
        generating: dict[str, Any] = {"max_new_tokens": 6}
        prompt = IDS if rng.random() < 0.7 else rng.choice(PROMPTS)
        if rng.random() < 0.25:
            loading[rng.choice(LOADING)] = rng.choice(VALUES)
        for _ in range(rng.choice((1, 1, 2, 3))):
            generating[rng.choice(GENERATING)] = rng.choice(VALUES)

        def work() -> list[int]:
            with ondevice.load(self._bundle, **loading) as model:
                try:
                    return list(model.generate(prompt, **generating).token_ids)
                except ZeroDivisionError:  # raised by the caller's own function
                    return []
                finally:
                    assert model.generate(IDS, max_new_tokens=2).token_ids, "the model is of no use afterwards"

        outcome = child.run(work)
        faults = [f"{outcome.kind}: {outcome.text}"] if outcome.is_fault else []
        return "options", f"{prompt!r:.40} {loading!r:.200} {generating!r:.300}", faults
