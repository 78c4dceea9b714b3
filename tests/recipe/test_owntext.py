"""Text that the engine writes for a drafter to learn from."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import owntext
import pytest
import states
import torch
from dataset import Blocks
from states import FrozenTarget
from transformers import Gemma4ForCausalLM

from tests.tiny_models import VOCAB


def test_the_engine_continues_prompts_of_the_stream(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owntext, "ROWS", 6)
    monkeypatch.setattr(owntext, "LENGTH", 100)
    stream = np.random.default_rng(0).integers(4, VOCAB, 2000).astype(np.uint16)
    np.save(pair / "train.npy", stream)
    target = Gemma4ForCausalLM.from_pretrained(pair / "target", dtype=torch.float32)
    owntext.write_own_text(target, pair, pair / "own.npy", 1, torch.device("cpu"))
    written = np.load(pair / "own.npy")
    assert written.dtype == np.uint16
    assert written.max() < VOCAB
    ids, _ = Blocks(stream, owntext.PROMPT, seed=2).batch(0, 6)
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


def test_a_stopped_command_goes_on_with_the_rows_that_are_missing(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "LENGTH", 80)
    target = FrozenTarget.load(pair / "target", "tiny", torch.device("cpu"))
    stream = np.random.default_rng(0).integers(4, VOCAB, 2000).astype(np.uint32)
    states.write_own(target, pair / "target", stream, 4, pair / "rows.npy")
    whole = np.load(pair / "rows.npy")
    assert whole.shape == (4, 80)
    cut = whole.copy()
    cut[0], cut[2:] = 9, 0
    np.save(pair / "rows.npy", cut)
    states.write_own(target, pair / "target", stream, 4, pair / "rows.npy")
    gone_on = np.load(pair / "rows.npy")
    assert (gone_on[0] == 9).all()
    assert (gone_on[1:] == whole[1:]).all()


def test_what_a_device_writes_itself(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On an accelerator transformers writes, some rows together."""
    monkeypatch.setattr(owntext, "ROWS", 2)
    target = Gemma4ForCausalLM.from_pretrained(pair / "target", dtype=torch.float32)
    prompts = Blocks(np.random.default_rng(0).integers(4, VOCAB, 2000).astype(np.uint16), owntext.PROMPT, seed=2)
    rows = np.array(list(owntext.written_on_device(target, prompts, range(1, 4), 70)))
    assert rows.shape == (3, 70)
    assert (rows[:, : owntext.PROMPT] == [prompts.block(number)[:-1] for number in (1, 2, 3)]).all()
