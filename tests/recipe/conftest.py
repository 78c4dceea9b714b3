"""The recipe's files import each other from `models/recipe`, as the directory of a script allows."""

import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.fixtures.tiny_models import VOCAB, save_drafter, save_target

torch.set_num_threads(1)  # the models are too small to share

sys.path.insert(0, str(Path(__file__).parents[2] / "models" / "recipe"))


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """A directory with a tiny target, a tokenizer of words beside it, a drafter, and a text of such words."""
    save_target(tmp_path / "target", "e2b")
    save_drafter(tmp_path / "drafter", "e2b")
    words = {f"w{number}": number for number in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, "w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "target" / "tokenizer.json"))
    random = np.random.default_rng(0).integers(4, VOCAB, 4000)
    (tmp_path / "text.txt").write_text(" ".join(f"w{number}" for number in random))
    return tmp_path


@pytest.fixture
def one_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine writes texts in this process: `test_owntext.py` starts others, which all import torch."""
    owntext = import_module("pair.owntext")
    monkeypatch.setattr(owntext, "writers", [])
    monkeypatch.setattr(owntext, "ProcessPoolExecutor", lambda mp_context, **given: ThreadPoolExecutor(1, **given))
