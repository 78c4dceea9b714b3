"""The towers without layers of 12B, and its pictures and sounds from files to logits, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ondevice
from ondevice import Audio, Image, PromptError
from ondevice.bundle import Bundle
from ondevice.bundle_format import graph_io
from ondevice.media.images import Pixels
from ondevice.media.prompt import MediaEncoder
from ondevice.media.sounds import Samples
from tests.fixtures.tiny_models import AUDIO, BEGIN, BLOCKWISE, END, IMAGE, PATCH, POOL, SEEING
from tests.media.pictures_made import noise, png
from tests.media.sounds_made import tone, wav
from tests.media.towers import audio_tower, encoded, reference_model, vision_tower

pytestmark = pytest.mark.needs("oracle", "onnxruntime")

SIDE = PATCH * POOL
PICTURE = Pixels(noise(5 * SIDE, 3 * SIDE), SIDE, 1)


@pytest.fixture(scope="module")
def model(checkpoints: dict[str, Path]) -> Any:
    return reference_model(checkpoints["seeing-12b"], "seeing-12b")


def test_pictures(seeing: dict[tuple[str, str], Bundle], model: Any) -> None:
    import torch

    rows = encoded(vision_tower(seeing["seeing-12b", "none"]), PICTURE)
    patches, column, row = (PICTURE.feeds()[name] for name in (graph_io.PATCHES, graph_io.COLUMN, graph_io.ROW))
    with torch.no_grad():
        (expected,) = model.model.get_image_features(
            torch.tensor(patches)[None], torch.tensor(np.stack([column, row], -1))[None]
        ).pooler_output
    np.testing.assert_allclose(rows, expected.numpy(), atol=1e-4, rtol=0)
    assert rows.shape == (15, 64)


@pytest.mark.parametrize("count", [1, 63, 64, 1000])
def test_sounds(seeing: dict[tuple[str, str], Bundle], model: Any, count: int) -> None:
    """An embedder with 64 samples a row, where the published model has 640."""
    import torch

    bundle = seeing["seeing-12b", "none"]
    assert bundle.manifest.audio is not None
    piece = Samples(tone(1.0)[100 : 100 + count], bundle.manifest.audio)
    rows = encoded(audio_tower(bundle), piece)
    frames = np.zeros((-(-count // 64), 64), np.float32)
    frames.reshape(-1)[:count] = piece.values
    with torch.no_grad():
        mask = torch.ones(1, len(frames), dtype=torch.bool)
        expected = model.model.get_audio_features(torch.tensor(frames)[None], mask).pooler_output
    np.testing.assert_allclose(rows, expected.numpy().reshape(rows.shape), atol=1e-4, rtol=0)


@pytest.mark.parametrize("engine", ["ort", "simd"])
def test_a_reply_to_a_picture_and_a_sound(seeing: dict[tuple[str, str], Bundle], engine: Any) -> None:
    """Drafts change no token, and the placeholders stand where the parts were."""
    prompt = [
        {"role": "user", "content": [Image(png(50, 50)), {"type": "text", "text": "a b"}, Audio(wav(tone(0.05)))]}
    ]
    with ondevice.load(seeing["seeing-12b", "int8"].path, engine=engine, threads=1) as made:
        ids = made.encode(prompt, image_tokens=70)
        assert [token for token in dict.fromkeys(ids) if token in (BEGIN, IMAGE, END, AUDIO)] == [
            BEGIN, IMAGE, END, AUDIO
        ]  # fmt: skip
        assert ids.count(AUDIO) == 13
        replies = []
        for drafter in ("none", "mtp", "ngram", "auto"):
            made.forget()
            replies.append(made.generate(prompt, max_new_tokens=20, image_tokens=70, drafter=drafter).token_ids)
        assert len(set(replies)) == 1


@pytest.mark.parametrize("family", SEEING)
def test_a_picture_that_no_forward_holds_is_refused(seeing: dict[tuple[str, str], Bundle], family: str) -> None:
    media = MediaEncoder(seeing[family, "int8"], threads=1, cache_bytes=0, most_rows=60)
    if family in BLOCKWISE:
        with pytest.raises(PromptError, match="picture 1 takes 64 tokens, which this model reads at once"):
            media.insert([IMAGE], [Image(png(24, 24), 70)], None, 1000)
    else:
        assert len(media.insert([IMAGE], [Image(png(24, 24), 70)], None, 1000)[0]) == 66
