"""Text that the engine writes for a drafter to learn from."""

from pathlib import Path

import numpy as np
import owntext
import pytest
import torch
from dataset import Blocks
from transformers import Gemma4ForCausalLM

from tests.tiny_models import VOCAB


def test_the_engine_continues_prompts_of_the_stream(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owntext, "ROWS", 6)
    stream = np.random.default_rng(0).integers(4, VOCAB, 2000).astype(np.uint16)
    np.save(pair / "train.npy", stream)
    target = Gemma4ForCausalLM.from_pretrained(pair / "target", dtype=torch.float32)
    owntext.write_own_text(target, pair, pair / "own.npy", 1, torch.device("cpu"))
    written = np.load(pair / "own.npy")
    assert written.dtype == np.uint16
    assert written.max() < VOCAB
    text = written.tobytes()
    ids, _ = Blocks(stream, owntext.PROMPT, seed=2).batch(0, 6)
    places = [text.find(row.numpy().astype(np.uint16).tobytes()) // 2 for row in ids]
    assert places == sorted(places)
    assert places[0] == 0
    assert min(np.diff([*places, len(written)])) > owntext.PROMPT

    (pair / "train.npy").unlink()
    owntext.write_own_text(target, pair, pair / "own.npy", 1, torch.device("cpu"))  # it is there
