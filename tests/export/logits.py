"""Logits of a text, by transformers and by a bundle of the same weights."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import torch

from ondevice.arrays import Float32Array
from ondevice.bundle import Bundle
from ondevice.engines.choice import EngineName, open_engine
from ondevice.engines.protocol import Rows, TokenTree


def logits_of_both(model: Any, bundle: Bundle, engine: EngineName) -> tuple[Float32Array, Float32Array]:
    """The logits [40, vocabulary] of transformers' model, and those of the bundle."""
    ids = list(range(5, 45))
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].numpy()
    with closing(open_engine(engine, bundle, 1)) as opened:
        rows = Rows(opened.open_session(), TokenTree.chain(ids), range(len(ids)))
        return expected, opened.forward([rows])[0].logits.copy()
