"""Limits of untrusted media: headers are read without decoding, one piece is decoded at a time, sums are limited."""

from __future__ import annotations

import struct
import subprocess
import sys
import threading
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageFile
import PIL.WebPImagePlugin
import pytest
import soundfile

from benchmarks.bundles.gemma4 import E2B_AUDIO as AUDIO
from benchmarks.bundles.gemma4 import E2B_VISION as VISION
from ondevice import Audio, Image, Model, PromptError
from ondevice.bundle import Bundle
from ondevice.media import images, prompt, sounds
from ondevice.media.images import Picture
from ondevice.media.prompt import MediaEncoder
from ondevice.media.sounds import Sound
from tests.media.pictures_made import noise, png, saved
from tests.media.sounds_made import riff, tone, wav

FORMATS = ("PNG", "PNG with its rotation at the end", "JPEG", "WEBP", "GIF")
TEXT = {"type": "text", "text": "the fox"}


def chunk(kind: bytes, content: bytes = b"") -> bytes:
    """A chunk of a PNG file."""
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def parted(file: bytes) -> tuple[bytes, bytes, bytes]:
    """A PNG file before its pixels, these, and its last chunk."""
    return file[:33], file[33:-12], file[-12:]


def picture_file(kind: str, width: int, height: int) -> bytes:
    """A file of one colour, to be shown turned if the format can say so."""
    picture = PIL.Image.new("RGB", (width, height), (200, 30, 60))
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    if kind == FORMATS[1]:
        head, pixels, end = parted(saved(picture))
        return head + pixels + chunk(b"eXIf", exif.tobytes().removeprefix(b"Exif\0\0")) + end
    return saved(picture, kind, **({} if kind == "GIF" else {"exif": exif}))


def sound_file(samples: Any, kind: str = "FLAC", subtype: str | None = None, rate: int = 16_000) -> bytes:
    file = BytesIO()
    with soundfile.SoundFile(file, "w", rate, 1, subtype, format=kind) as writer:
        for begin in range(0, len(samples), rate):
            writer.write(samples[begin : begin + rate])
    return file.getvalue()


def opened(content: bytes) -> Picture:
    return Picture(Image(content), VISION, None, "it")


def heard(source: Any, rate: int | None = None) -> Sound:
    return Sound(Audio(source, rate), AUDIO, "it")


def growth(code: str, *arguments: object) -> int:
    """By how many MB the peak memory of another process grows during `work()`, which `code` defines."""
    measured = f"""
import sys
from ondevice import machine
{code}
before = machine.peak_rss_bytes()
kept = work()
print(before >> 20, machine.peak_rss_bytes() - before >> 20)
"""
    command = [sys.executable, "-c", measured, *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    before, grown = map(int, ended.stdout.split())
    assert before > 0
    return grown


# Headers.


@pytest.mark.parametrize("kind", FORMATS)
def test_headers_of_pictures_are_read_without_decoding(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    content = picture_file(kind, 90, 40)
    for owner in (PIL.ImageFile.ImageFile, PIL.WebPImagePlugin.WebPImageFile):
        monkeypatch.setattr(owner, "load", lambda self: pytest.fail("decoded"))
    picture = opened(content)
    monkeypatch.undo()
    pixels = picture.piece(0)
    assert [pixels.tokens] == picture.counts
    assert picture.size == 90 * 40
    assert (pixels.values.shape[0] > pixels.values.shape[1]) == (kind != "GIF")


def test_headers_of_pictures_take_no_memory(tmp_path: Path) -> None:
    """Eight pictures of 20 million pixels of each format. Their pixels would take 640 MB."""
    for kind in FORMATS:
        (tmp_path / kind).write_bytes(picture_file(kind, 5000, 4000))
    code = """
from pathlib import Path
from benchmarks.bundles.gemma4 import E2B_VISION as VISION
from ondevice import Image
from ondevice.media.images import Picture
from tests.media.pictures_made import png
Picture(Image(png()), VISION, None, "it").piece(0)
def work():
    return [Picture(Image(path), VISION, None, "it") for path in Path(sys.argv[1]).iterdir() for _ in range(8)]
"""
    assert growth(code, tmp_path) < 60


@pytest.mark.parametrize(
    ("kind", "subtype"), [("FLAC", "PCM_16"), ("OGG", "VORBIS"), ("OGG", "OPUS"), ("MP3", None), ("AIFF", None)]
)
def test_headers_of_sounds_are_read_without_decoding(
    kind: str, subtype: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces are those of the whole sound, in whatever order they are asked for. A quiet tone shows a decoder that was
    moved: frames of MP3 use bits of those before them.
    """
    content = sound_file(tone(65.0), kind, subtype)
    read = soundfile.SoundFile.read
    monkeypatch.setattr(soundfile.SoundFile, "read", lambda *_, **__: pytest.fail("decoded"))
    sound = heard(content)
    monkeypatch.setattr(soundfile.SoundFile, "read", read)
    assert (sound.counts, sound.size) == ([750, 750, 125], 65 * 16_000)
    expected, _ = soundfile.read(BytesIO(content), dtype="float32")
    for index in (0, 1, 2, 0, 2, 1):
        piece = sound.piece(index).values
        np.testing.assert_allclose(piece, expected[480_000 * index :][:480_000], atol=1e-6, rtol=0)


def test_headers_of_sounds_take_no_memory(tmp_path: Path) -> None:
    """20 minutes of silence in 73 KB, opened and then decoded. In one piece they would take 77 MB, twice that before
    they are joined.
    """
    (tmp_path / "silence").write_bytes(sound_file(np.zeros(1200 * 16_000, np.int16)))
    code = """
from benchmarks.bundles.gemma4 import E2B_AUDIO as AUDIO
from ondevice import Audio
from ondevice.media.sounds import Sound
from tests.media.test_limits import sound_file
from tests.media.sounds_made import tone
Sound(Audio(sound_file(tone(30.0))), AUDIO, "it").piece(0)
def work():
    sound = Sound(Audio(sys.argv[1]), AUDIO, "it")
    assert len(sound.counts) == 40
    for index in range(40):
        sound.piece(index)
    return sound
"""
    assert growth(code, tmp_path / "silence") < 30


def test_sounds_that_have_less_than_they_say() -> None:
    file = sound_file(np.random.default_rng(0).normal(0, 0.1, 65 * 16_000).astype(np.float32), "MP3")
    sound = heard(file[: len(file) // 2])
    assert len(sound.counts) == 3
    tokens = [sound.piece(index).tokens for index in range(3)]
    assert tokens[0] == 750
    assert 0 < tokens[1] < 200
    assert tokens[2] == 0


def test_a_sound_that_does_not_say_its_length() -> None:
    file = bytearray(sound_file(tone(1.0)))
    file[21] &= 0xF0
    file[22:26] = bytes(4)
    with pytest.raises(PromptError, match="it does not say how long it is"):
        heard(bytes(file))


# Parts of files.


def test_pictures_of_too_many_parts() -> None:
    head, pixels, end = parted(png())
    jpeg, gif = (saved(PIL.Image.fromarray(noise(60, 80)), kind) for kind in ("JPEG", "GIF"))
    many = images.MAX_READS
    for content in (
        head + chunk(b"abCd") * many + pixels + end,
        head + pixels + chunk(b"abCd") * many + end,
        head + chunk(b"IDAT") * many + pixels + end,
        jpeg[:2] + b"\xff\xfe\0\2" * many + jpeg[2:],
        jpeg[:2] + b"\xff" * many + jpeg[2:],
        gif[:781] + b"!\xfe" + b"\1a" * many + b"\0" + gif[781:],
    ):
        with pytest.raises(PromptError, match=f"it is damaged.*more than {many} parts"):
            opened(content).piece(0)
    profile = chunk(b"iCCP", b"x\0\0" + zlib.compress(bytes(1000)))
    with pytest.raises(PromptError, match="more than 64 colour profiles"):
        opened(head + pixels + profile * 65 + end)
    opened(head + profile + pixels + end).piece(0)


def test_a_picture_of_many_parts_that_are_all_needed() -> None:
    """As large files have: chunks of 8 KB, 4,096 of which make a file of 32 MB."""
    file = png(20, 30)
    head, pixels, end = parted(file)
    assert pixels.count(b"IDAT") == 1
    data = zlib.compress(zlib.decompress(pixels[8:-4]), 0).ljust(4096, b"\0")
    split = head + b"".join(chunk(b"IDAT", bytes([byte])) for byte in data) + end
    np.testing.assert_array_equal(opened(split).piece(0).values, opened(file).piece(0).values)


def test_a_sound_of_too_many_chunks() -> None:
    header = wav(tone(0.5))[20:36]
    for count, fits in ((sounds.MAX_CHUNKS - 2, True), (sounds.MAX_CHUNKS, False)):
        file = riff([(b"junk", b"")] * count + [(b"fmt ", header), (b"data", bytes(4000))])
        if fits:
            assert heard(file).size == 2000
        else:
            with pytest.raises(PromptError, match="4096 other chunks"):
                heard(file)


def test_a_sound_of_too_many_pages() -> None:
    file = sound_file(tone(1.0), "OGG", "VORBIS")
    expected = heard(file).piece(0).values
    few, many = (b"OggS" * count for count in (sounds.MAX_FALSE_PAGES - 1, sounds.MAX_FALSE_PAGES))
    np.testing.assert_array_equal(heard(file + few).piece(0).values, expected)
    with pytest.raises(PromptError, match="64 beginnings of pages that are none"):
        heard(file + many)


def test_the_tag_of_a_sound_is_left_out(capfd: pytest.CaptureFixture[str]) -> None:
    """The library's reader writes a line for each of its damaged fields."""
    file, field = sound_file(tone(1.0), "MP3"), b"TXXX\0\0\0\2\0\0\0x"
    for flags, end in ((0, b""), (16, b"3DI\4\0\x10\0\0\4\x30")):
        tagged = b"ID3\4\0" + bytes([flags, 0, 0, 4, 48]) + field * 46 + bytes(8) + end + file
        np.testing.assert_array_equal(heard(tagged).piece(0).values, heard(file).piece(0).values)
    assert "extra frame" not in capfd.readouterr().err
    for cut in (3, 9, 10, 200):
        with pytest.raises(PromptError):
            heard(tagged[:cut])


# Sample rates.


@pytest.mark.parametrize("rate", [1000, 15_999, 44_100, 44_101, 191_999])
def test_any_rate_takes_the_same_time(rate: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpolating function, the dear part, is computed for a few places, not for each of up to 16,000."""
    computed = []
    windowed_sinc = sounds._windowed_sinc

    def counted(places: Any) -> Any:
        computed.append(places.size)
        return windowed_sinc(places)

    monkeypatch.setattr(sounds, "_windowed_sinc", counted)
    samples = np.random.default_rng(0).uniform(-1, 1, rate).astype(np.float32)
    found = sounds.converted(samples, rate, 0, 16_000)
    assert sum(computed) <= sounds.NODES * (2 * sounds.reach(192_000) + 1)
    scale, margin = sounds._scale(rate), sounds.reach(rate)
    chosen = np.random.default_rng(1).choice(16_000, 300)
    taps = (chosen * rate // 16_000)[:, None] + np.arange(2 * margin + 1)
    weights = scale * windowed_sinc(scale * (taps - margin - chosen[:, None] * rate / 16_000))
    expected = (np.pad(samples, margin + 1)[taps + 1] * weights).sum(axis=1)
    np.testing.assert_allclose(found[chosen], expected, atol=4e-6, rtol=0)


def test_pieces_of_a_converted_sound_join() -> None:
    samples = np.random.default_rng(0).uniform(-0.5, 0.5, round(61.5 * 44_100)).astype(np.float32)
    whole = sounds.converted(samples, 44_100, 0, sounds.converted_length(len(samples), 44_100))
    sound = heard(samples, 44_100)
    pieces = [sound.piece(index).values for index in range(len(sound.counts))]
    assert [len(piece) for piece in pieces] == [480_000, 480_000, 24_000]
    assert not sound._heard, "samples were kept after the last piece"
    np.testing.assert_allclose(np.concatenate(pieces), whole, atol=2e-6, rtol=0)


# Prompts.


@pytest.fixture(scope="module")
def encoder(chat_bundle: Path) -> MediaEncoder:
    return MediaEncoder(Bundle.open(chat_bundle), threads=1, cache_bytes=0, most_rows=512)


def placeholder(encoder: MediaEncoder, medium: Image | Audio) -> int:
    return next(kind.placeholder for kind in encoder._kinds if isinstance(medium, kind.parts))


@pytest.mark.parametrize("medium", [Image(png()), Audio(wav(tone(0.5)))])
def test_the_sum_of_a_prompt_is_limited_before_anything_is_decoded(
    encoder: MediaEncoder, medium: Image | Audio, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 60 * 80 if isinstance(medium, Image) else 8000
    monkeypatch.setattr(prompt, "MAX_DECODED", 3 * size)
    ids = [placeholder(encoder, medium)]
    assert len(encoder.insert(ids * 3, [medium] * 3, None, 4096)[1]) == 3
    for kind in (Picture, Sound):
        monkeypatch.setattr(kind, "piece", lambda self, index: pytest.fail("decoded"))
    message = f"the first 4 pictures and sounds have {4 * size:,} pixels and samples in sum: {3 * size:,} are possible"
    for function in (encoder.insert, encoder.counted):
        with pytest.raises(PromptError, match=message):
            function(ids * 5, [medium] * 5, None, 4096)


def test_a_prompt_takes_the_memory_of_one_picture(chat_bundle: Path, tmp_path: Path) -> None:
    """Eight pictures whose pixels take 640 MB, one at a time; then 200 small ones that become 350 MB of pixels."""
    (tmp_path / "large.png").write_bytes(picture_file(FORMATS[1], 5000, 4000))
    code = """
from benchmarks.bundles.gemma4 import E2B_VISION as VISION
from ondevice import Image
from ondevice.bundle import Bundle
from ondevice.media.prompt import MediaEncoder
from tests.media.pictures_made import png
media = MediaEncoder(Bundle.open(sys.argv[1]), threads=1, cache_bytes=0, most_rows=512)
media._vision = VISION  # E2B's, whose pictures are larger than those of the tiny tower
token = media._kinds[0].placeholder
media.insert([token], [Image(png())], None, 4096)
def work():
    large = media.insert([token] * 8, [Image(sys.argv[2])] * 8, 70, 4096)
    return large, media.insert([token] * 200, [Image(png(1, 1))] * 200, 280, 1 << 17)
"""
    assert growth(code, chat_bundle, tmp_path / "large.png") < 260


def test_one_medium_is_decoded_at_a_time(encoder: MediaEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of prompts that several threads read."""
    running, most = [0], []
    piece = Picture.piece

    def watched(self: Picture, index: int) -> Any:
        running[0] += 1
        most.append(running[0])
        made = piece(self, index)
        running[0] -= 1
        return made

    monkeypatch.setattr(Picture, "piece", watched)
    ids = [placeholder(encoder, Image(b""))] * 6
    pictures = [[Image(png(200 + place, 300 + number)) for place in range(6)] for number in range(4)]
    threads = [threading.Thread(target=encoder.insert, args=(ids, each, None, 4096)) for each in pictures]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(most) == 24
    assert set(most) == {1}


@pytest.mark.parametrize("medium", [Image(png()), Audio(wav(tone(0.5)))])
def test_a_file_is_decoded_for_its_first_prompt_only(
    encoder: MediaEncoder, medium: Image | Audio, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every turn of a chat has the media of all earlier ones. After `forget`, a file is decoded again."""
    decoded: list[object] = []
    for kind in (Picture, Sound):

        def watched(self: Any, index: int, piece: Any = kind.piece) -> Any:
            decoded.append(self)
            return piece(self, index)

        monkeypatch.setattr(kind, "piece", watched)
    ids = [placeholder(encoder, medium)]
    encoder.forget()  # other tests have the same files
    first, _ = encoder.insert(ids, [medium], None, 4096)
    again, _ = encoder.insert(ids, [medium], None, 4096)
    assert (again, len(decoded)) == (first, 1)
    encoder.forget()
    assert encoder.insert(ids, [medium], None, 4096)[0] == first
    assert len(decoded) == 2


def test_a_known_picture_of_another_number_of_tokens_is_another(encoder: MediaEncoder) -> None:
    file = png(400, 600)
    ids = [placeholder(encoder, Image(file))]
    made = [encoder.insert(ids, [Image(file, tokens)], None, 4096)[0] for tokens in (70, 280, 70)]
    assert made[0] == made[2]
    assert len(made[1]) > len(made[0])
    chosen: Any = np.int64(70)
    assert encoder.insert(ids, [Image(file)], chosen, 4096)[0] == made[0]


@pytest.mark.needs("onnxruntime")
def test_an_array_may_change_after_the_call(chat_model: Model) -> None:
    """Files are decoded again when they are encoded, arrays are not: their prompt is that of the pixels that were."""
    array = noise(50, 50)
    options: dict[str, Any] = {"max_new_tokens": 4, "temperature": 0.0}
    chat_model.forget()
    with chat_model.stream([{"role": "user", "content": [Image(array), TEXT]}], **options) as generation:
        array[:] = 0
        changed = [token for step in generation for token in step.token_ids]
    chat_model.forget()
    reply = chat_model.generate([{"role": "user", "content": [Image(noise(50, 50)), TEXT]}], **options)
    assert changed == list(reply.token_ids)
