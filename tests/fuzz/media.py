"""Damaged pictures and sounds: each must be refused with one of our errors, or become soft tokens of finite numbers."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from io import BytesIO

import numpy as np
import PIL.Image
import soundfile

from benchmarks.e2b_shape import AUDIO, VISION
from ondevice.media.images import Picture
from ondevice.media.prompt import MOST_DECODED
from ondevice.media.sounds import Sound
from ondevice.media.tower import Piece
from ondevice.text.media_parts import Audio, Image
from tests.fuzz import child
from tests.fuzz.mutations import change_bytes
from tests.media.pictures_made import noise, saved
from tests.media.sounds_made import tone, wav

LENGTH = 131_072
"""Tokens of the context: what is longer would be refused before it is decoded."""

SIZES = (0, 1, 2, 3, 4, 7, 8, 16, 24, 32, 64, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1)
"""Numbers in headers that are often limits."""

HEADER = 64
"""Bytes of a file that are changed more often than their share of it."""


class Media:
    """Makes mutants of small files of every format that is read."""

    def __init__(self) -> None:
        stereo = np.stack([tone(0.2), -tone(0.2, 700)], axis=1)
        self._sounds = {
            f"WAV {bits} {extensible}": wav(stereo, rate, bits, extensible=extensible)
            for bits, rate in ((8, 8000), (16, 44_100), (24, 16_000), (32, 22_050), (320, 48_000), (640, 16_000))
            for extensible in (False, True)
        }
        for kind in ("FLAC", "OGG", "MP3", "AIFF"):
            file = BytesIO()
            soundfile.write(file, stereo, 16_000, format=kind)
            self._sounds[kind] = file.getvalue()
        picture = PIL.Image.fromarray(noise(40, 60))
        self._pictures = {kind: saved(picture, kind) for kind in ("PNG", "JPEG", "WEBP", "GIF")}

    def try_one(self, rng: random.Random) -> tuple[str, str, list[str]]:
        """See `Mutants.try_one`."""
        is_sound = rng.random() < 0.7
        files = self._sounds if is_sound else self._pictures
        name = rng.choice(list(files))
        content, said = rng.choice((_change_header, _change_header, change_bytes))(files[name], rng)
        read: Callable[[bytes], None] = _hear if is_sound else _see
        outcome = child.run(lambda: read(content))
        faults = [f"{outcome.kind}: {outcome.text}"] if outcome.is_fault else []
        return "media", f"{name}: {said}", faults


def _change_header(content: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Replace one to three numbers of two or four bytes."""
    data, said = bytearray(content), []
    for _ in range(rng.choice((1, 1, 2, 3))):
        at, width, number = rng.randrange(min(HEADER, len(data))), rng.choice((1, 2, 4)), rng.choice(SIZES)
        order = "big" if rng.random() < 0.2 else "little"
        data[at : at + width] = (number % 256**width).to_bytes(width, order)
        said.append(f"{width} bytes at {at}: {number}")
    return bytes(data), "; ".join(said)


def _hear(content: bytes) -> None:
    sound = Sound(Audio(content), AUDIO, "it")
    if sum(sound.counts) < LENGTH and sound.size <= MOST_DECODED:
        pieces = [sound.piece(index) for index in range(len(sound.counts))]
        _check(pieces)
        assert all(piece.tokens <= count for piece, count in zip(pieces, sound.counts, strict=True))


def _see(content: bytes) -> None:
    picture = Picture(Image(content), VISION, None, "it")
    piece = picture.piece(0)
    assert [piece.tokens] == picture.counts
    _check([piece])


def _check(pieces: Sequence[Piece]) -> None:
    """The inputs of the tower must be finite."""
    for piece in pieces[:2]:
        for name, values in piece.feeds().items():
            assert np.isfinite(values).all(), name
