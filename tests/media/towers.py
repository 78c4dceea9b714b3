"""The towers of a bundle, and the models of transformers that they are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ondevice import Reply
from ondevice.arrays import Float32Array
from ondevice.bundle import Bundle
from ondevice.bundle_format.interfaces import audio_interface, vision_interface
from ondevice.media.tower import MediaPiece, Tower


def vision_tower(bundle: Bundle) -> Tower:
    vision = bundle.manifest.vision
    assert vision is not None
    return Tower(bundle, vision.graph, vision_interface(vision, bundle.manifest.target), 1)


def audio_tower(bundle: Bundle) -> Tower:
    audio = bundle.manifest.audio
    assert audio is not None
    return Tower(bundle, audio.graph, audio_interface(audio, bundle.manifest.target), 1)


def reference_model(directory: Path, family: str, text_attention: str = "eager") -> Any:
    """The model of transformers for the target of a directory with a pair.

    Args:
        directory: the directory.
        family: that of the pair.
        text_attention: of the language model: `eager`, with masks as floats (see `test_blocks`), or `sdpa`, which does
            not keep all scores in memory.
    """
    import torch
    import transformers

    torch.set_num_threads(1)
    kind = "Gemma4Unified" if family == "seeing-12b" else "Gemma4"
    model = getattr(transformers, f"{kind}ForConditionalGeneration")
    attention = {"": "eager", "text_config": text_attention}
    return model.from_pretrained(directory / "target", attn_implementation=attention).eval()


def assert_greedy(reply: Reply, logits: Any, placeholders: Sequence[int]) -> None:
    """A reply is the likeliest token of each row of the reference's logits, but for placeholders, and its five largest
    log probabilities are the row's.
    """
    expected = logits.log_softmax(-1).numpy()
    best = np.where(np.isin(np.arange(expected.shape[1]), placeholders), -np.inf, expected).argmax(-1)
    assert reply.token_ids == tuple(best.tolist())
    for row, each in zip(expected, reply.logprobs, strict=True):
        np.testing.assert_allclose([value for _, value in each.top], np.sort(row)[:-6:-1], atol=1e-4, rtol=0)


def encoded(tower: Tower, piece: MediaPiece) -> Float32Array:
    rows = tower.encode(piece)
    assert rows is not None
    return rows
