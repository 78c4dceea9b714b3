"""Damaged pictures, sounds and videos: each must be refused with one of our errors, or become soft tokens of finite
numbers. To read a header must take little memory and time, whatever it says.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from io import BytesIO

import numpy as np
import PIL.Image
import soundfile

from benchmarks.bundles.gemma4 import E2B_AUDIO as AUDIO
from benchmarks.bundles.gemma4 import E2B_VISION as VISION
from ondevice import machine
from ondevice.media.images import Picture
from ondevice.media.prompt import MAX_DECODED, Medium
from ondevice.media.sounds import Sound
from ondevice.media.videos import Frames
from ondevice.text.media_parts import Audio, Image, Video
from tests.fuzz import child
from tests.fuzz.mutations import change_bytes
from tests.media.pictures_made import noise, saved
from tests.media.sounds_made import tone, wav
from tests.media.test_limits import FORMATS, picture_file
from tests.media.test_videos import clip

LENGTH = 131_072
"""Tokens of the context: what is longer would be refused before it is decoded."""

SIZES = (0, 1, 2, 3, 4, 7, 8, 16, 24, 32, 64, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1)
"""Numbers in headers that are often limits."""

HEADER = 64
"""Bytes of a file that are changed more often than their share of it, at its beginning and at its end."""

HEADER_BYTES, HEADER_S = 64 << 20, 2.0
"""Most memory and processor time to read a header. A decoded picture has up to 200 MB, and these files take 1 ms."""


class Media:
    """Makes mutants of small files of every format that is read."""

    def __init__(self) -> None:
        stereo = np.stack([tone(0.2), -tone(0.2, 700)], axis=1)
        self._sounds = {
            f"WAV {bits} {extensible}": wav(stereo, rate, bits, extensible=extensible)
            for bits, rate in ((8, 8000), (16, 44_100), (24, 16_000), (32, 22_050), (320, 48_000), (640, 16_000))
            for extensible in (False, True)
        }
        for kind, subtype in (("FLAC", None), ("OGG", "VORBIS"), ("OGG", "OPUS"), ("MP3", None), ("AIFF", None)):
            file = BytesIO()
            soundfile.write(file, stereo, 16_000, subtype, format=kind)
            self._sounds[f"{kind} {subtype}"] = file.getvalue()
        picture, exif = PIL.Image.fromarray(noise(40, 60)), PIL.Image.Exif()
        exif[0x0112] = 6
        self._pictures = {kind: saved(picture, kind) for kind in ("PNG", "JPEG", "WEBP", "GIF")}
        self._pictures |= {f"{kind} turned": saved(picture, kind, exif=exif) for kind in ("PNG", "JPEG", "WEBP")}
        self._pictures |= {
            f"{kind} animated": saved(picture, kind, save_all=True, append_images=[picture.rotate(180)] * 2)
            for kind in ("PNG", "WEBP", "GIF")
        }
        self._pictures["PNG turned at its end"] = picture_file(FORMATS[1], 60, 40)
        self._pictures["WEBP lossless"] = saved(picture, "WEBP", lossless=True)
        self._pictures["JPEG progressive"] = saved(picture, "JPEG", progressive=True)
        self._videos = {"MP4": clip(3)}

    def try_one(self, rng: random.Random) -> tuple[str, str, list[str]]:
        """See `Mutants.try_one`."""
        files, read = rng.choices(
            ((self._sounds, _sound), (self._pictures, _picture), (self._videos, _video)), (0.5, 0.4, 0.1)
        )[0]
        name = rng.choice(list(files))
        content, said = rng.choice((_change_header, _change_header, change_bytes))(files[name], rng)
        outcome = child.run(lambda: _read(read, content))
        faults = [f"{outcome.kind}: {outcome.text}"] if outcome.is_fault else []
        return "media", f"{name}: {said}", faults


def _change_header(content: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Replace one to three numbers of two or four bytes."""
    data, said = bytearray(content), []
    for _ in range(rng.choice((1, 1, 2, 3))):
        at, width, number = rng.randrange(min(HEADER, len(data))), rng.choice((1, 2, 4)), rng.choice(SIZES)
        at = at if rng.random() < 0.8 else len(data) - 1 - at
        order = "big" if rng.random() < 0.2 else "little"
        data[at : at + width] = (number % 256**width).to_bytes(width, order)
        said.append(f"{width} bytes at {at}: {number}")
    return bytes(data), "; ".join(said)


def _sound(content: bytes) -> Medium:
    return Sound(Audio(content), AUDIO, "it")


def _picture(content: bytes) -> Medium:
    return Picture(Image(content), VISION, None, "it")


def _video(content: bytes) -> Medium:
    return Frames(Video(content), VISION, "it")


def _read(read_header: Callable[[bytes], Medium], content: bytes) -> None:
    machine.reset_peak_rss()
    memory, started = machine.peak_rss_bytes(), time.process_time()
    try:
        medium = read_header(content)
    finally:
        assert machine.peak_rss_bytes() - memory < HEADER_BYTES
        assert time.process_time() - started < HEADER_S
    if sum(medium.counts) >= LENGTH or medium.size > MAX_DECODED:
        return
    pieces = [medium.piece(index) for index in range(len(medium.counts))]
    if isinstance(medium, Picture):
        assert [piece.tokens for piece in pieces if piece is not None] == medium.counts
    if isinstance(medium, Sound):
        assert all(piece is not None and piece.tokens <= n for piece, n in zip(pieces, medium.counts, strict=True))
    for piece in pieces[:2]:
        for name, values in ({} if piece is None else piece.feeds()).items():
            assert np.isfinite(values).all(), name
