"""Text that the engine writes for a drafter to learn from."""

from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pair import owntext
from text.dataset import TokenBlocks
from transformers import Gemma4ForCausalLM

from tests.fixtures.tiny_models import VOCAB


def test_the_engine_continues_prompts_of_the_stream(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owntext, "ROWS", 6)
    monkeypatch.setattr(owntext, "LENGTH", 100)
    monkeypatch.setattr(owntext, "ProcessPoolExecutor", partial(ProcessPoolExecutor, 1))
    stream = np.random.default_rng(0).integers(4, VOCAB, 2000).astype(np.uint16)
    np.save(pair / "train.npy", stream)
    target = Gemma4ForCausalLM.from_pretrained(pair / "target", dtype=torch.float32)
    owntext.write_own_text(target, pair, pair / "own.npy", 1, torch.device("cpu"))
    written = np.load(pair / "own.npy")
    assert written.dtype == np.uint16
    assert written.max() < VOCAB
    ids, _ = TokenBlocks(stream, owntext.PROMPT, seed=2).batch(0, 6)
    assert (written.reshape(6, owntext.LENGTH)[:, : owntext.PROMPT] == ids.numpy()).all()

    (pair / "train.npy").unlink()
    owntext.write_own_text(target, pair, pair / "own.npy", 1, torch.device("cpu"))  # it is there


def test_where_a_text_ends_another_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terse:
        """Ends each reply after two tokens."""

        def generate(self, ids: list[int], max_new_tokens: int, **options: object) -> SimpleNamespace:
            return SimpleNamespace(token_ids=[len(ids), 1][:max_new_tokens])

    monkeypatch.setattr(owntext, "writers", [Terse()])
    assert owntext.write(9, 0, [5, 6, 7, 8]) == [5, 6, 7, 8, 4, 1, 6, 1, 8]
