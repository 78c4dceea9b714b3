"""Sounds from files and arrays to spectrograms, and those that are refused."""

from __future__ import annotations

import struct
import sys
import warnings
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.bundles.gemma4 import E2B_AUDIO as AUDIO
from ondevice.bundle_format.audio import MAX_SAMPLES, RATE
from ondevice.errors import MissingDependencyError, OndeviceError, PromptError
from ondevice.media import sounds
from ondevice.media.sounds import Samples, Sound, converted, converted_length, mel_filters, mel_spectrogram
from ondevice.text.media_parts import Audio
from tests.media.sounds_made import riff, tone, wav

HALF = tone(0.5)


def pieces(source: Any, rate: int | None = None) -> list[Samples]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sound = Sound(Audio(source, rate), AUDIO, "it")
        made = [sound.piece(index) for index in range(len(sound.counts))]
    assert [piece.tokens for piece in made] == list(sound.counts)
    for piece in made:
        assert piece.values.dtype == np.float32
        assert np.isfinite(spectrogram(piece)).all()
    return made


def spectrogram(piece: Samples) -> Any:
    (frames,) = piece.feeds().values()
    return frames


def heard(source: Any, rate: int | None = None) -> np.ndarray:
    (piece,) = pieces(source, rate)
    return piece.values


def refused(source: Any, rate: int | None = None, error: type[OndeviceError] = PromptError) -> str:
    with pytest.raises(error) as caught:
        pieces(source, rate)
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 200
    return message


# Files.


@pytest.mark.parametrize("extensible", [False, True])
@pytest.mark.parametrize(("bits", "step"), [(8, 2**-7), (16, 2**-15), (24, 2**-23), (32, 2**-23), (320, 0), (640, 0)])
def test_every_encoding(bits: int, step: float, extensible: bool) -> None:
    both = np.stack([HALF, -0.5 * HALF], axis=1)
    found = heard(wav(both, bits=bits, extensible=extensible))
    np.testing.assert_allclose(found, both.mean(axis=1), atol=step + 1e-7)
    np.testing.assert_allclose(heard(wav(HALF, bits=bits, extensible=extensible)), HALF, atol=step + 1e-7)


def test_full_scale() -> None:
    for bits in (8, 16, 24, 32):
        low = heard(wav(np.full(200, -1.0), bits=bits))
        np.testing.assert_array_equal(low, -1.0)
        np.testing.assert_array_equal(heard(wav(np.zeros(200), bits=bits)), 0.0)


def test_arrays_equal_files(tmp_path: Path) -> None:
    whole = np.rint(HALF * 32768).astype(np.int16)
    expected = heard(wav(HALF))
    path = tmp_path / "a sound.wav"
    path.write_bytes(wav(HALF))
    given: list[tuple[Any, Any]] = [
        (whole, RATE),
        (whole[:, None], np.int64(RATE)),
        (whole.astype(">i2"), RATE),
        (whole.astype(np.float64) / 32768, RATE),
        (np.stack([whole, whole], axis=1), RATE),
        (bytearray(wav(HALF)), None),
        (memoryview(wav(HALF)), None),
        (path, None),
        (str(path), None),
    ]
    for source, rate in given:
        np.testing.assert_array_equal(heard(source, rate), expected)


def test_files_that_were_cut_or_streamed() -> None:
    """Whole samples that are there are heard, whatever size the header names."""
    file = wav(np.stack([HALF, HALF], axis=1))
    place = file.index(b"data") + 4
    for size in (b"\xff" * 4, bytes(4)):
        np.testing.assert_array_equal(heard(file[:place] + size + file[place + 4 :]), heard(file))
    np.testing.assert_array_equal(heard(file[:-7]), heard(file)[:-2])
    more = file + b"LIST\x04\0\0\0abcd"
    np.testing.assert_array_equal(heard(more), heard(file))


@pytest.mark.parametrize("seconds", [0.0, 0.01])
def test_sounds_without_a_frame(seconds: float) -> None:
    assert "too short: " in refused(tone(seconds), RATE)
    assert "too short: " in refused(riff([(b"fmt ", wav(HALF)[20:36]), (b"data", b"")]))


@pytest.mark.parametrize(
    ("samples", "lengths", "tokens"),
    [
        (161, [161], [1]),
        (RATE, [RATE], [25]),
        (MAX_SAMPLES, [MAX_SAMPLES], [750]),
        (MAX_SAMPLES + 160, [MAX_SAMPLES], [750]),  # what is left is shorter than a frame
        (MAX_SAMPLES + 161, [MAX_SAMPLES, 161], [750, 1]),
        (2 * MAX_SAMPLES + 16_000, [MAX_SAMPLES, MAX_SAMPLES, 16_000], [750, 750, 25]),
    ],
)
def test_long_sounds_become_several(samples: int, lengths: list[int], tokens: list[int]) -> None:
    sound = tone(samples / RATE)
    made = pieces(sound, RATE)
    assert [len(piece.values) for piece in made] == lengths
    assert [piece.tokens for piece in made] == tokens
    np.testing.assert_array_equal(np.concatenate([piece.values for piece in made]), sound[: sum(lengths)])


DAMAGED = {
    "nothing": b"",
    "no sound": b"RIFF....AVI ....",
    "no chunks": b"RIFF\0\0\0\0WAVE",
    "samples first": riff([(b"data", bytes(4000)), (b"fmt ", wav(HALF)[20:36])]),
    "half a header": riff([(b"fmt ", wav(HALF)[20:30]), (b"data", bytes(4000))]),
    "compressed": wav(HALF)[:20] + struct.pack("<H", 2) + wav(HALF)[22:],
    "12 bits": wav(HALF)[:34] + struct.pack("<H", 12) + wav(HALF)[36:],
    "other block": wav(HALF)[:32] + struct.pack("<H", 3) + wav(HALF)[34:],
    "no channel": wav(HALF)[:22] + struct.pack("<H", 0) + wav(HALF)[24:],
    "33 channels": wav(np.zeros((2000, 33))),
    "0 Hz": wav(HALF, 0),
    "999 Hz": wav(HALF, 999),
    "192001 Hz": wav(HALF, 192_001),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files(name: str) -> None:
    assert refused(DAMAGED[name]).startswith("it ")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38, 32768.0])
@pytest.mark.parametrize("channels", [1, 2])
def test_samples_that_are_no_sound(value: float, channels: int) -> None:
    for bits, number in ((320, value), (640, value), (640, value * 1e200)):
        samples = np.tile(HALF[:, None].astype(np.float64), (1, channels))
        samples[7] = number
        assert "NaN, infinite or far beyond" in refused(wav(samples, 44_100, bits))
    assert pieces(np.full(2000, 1.5, np.float32), RATE)  # a loud mix


def test_wrong_arguments(tmp_path: Path) -> None:
    assert "whose sample rate must be given" in refused(HALF)
    assert "whose sample rate must be given" in refused(HALF, True)
    assert "1000 to 192000 are possible" in refused(HALF, 10**30)
    assert "a file names its own" in refused(wav(HALF), RATE)
    assert "is a list" in refused([0.0] * 4000, RATE)
    assert "is a NoneType" in refused(None)
    assert "array int32[3000]" in refused(np.zeros(3000, np.int32), RATE)
    assert "array complex64[3000]" in refused(np.zeros(3000, np.complex64), RATE)
    assert "array float32[2, 2, 2]" in refused(np.zeros((2, 2, 2), np.float32), RATE)
    assert "0 channels" in refused(np.zeros((3000, 0), np.float32), RATE)
    assert "too short" in refused(np.zeros((0, 2), np.float32), RATE)
    assert "No such file" in refused(tmp_path / "none.wav")
    assert "cannot be read" in refused(tmp_path)
    assert "cannot be read" in refused("a\0b")


def test_limits_hold_before_anything_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    for source in (sounds.WavFile, sounds.OtherFile):
        monkeypatch.setattr(source, "blocks", lambda self: pytest.fail("decoded"))
    monkeypatch.setattr(sounds, "MAX_SECONDS", 1)
    assert "longer than" in refused(wav(tone(1.01)))
    for kind, subtype, _ in FORMATS:
        assert "longer than" in refused(packed(tone(1.5), RATE, kind, subtype))
    monkeypatch.setattr(sounds, "MAX_BYTES", 1000)
    assert "more than 0 MB" in refused(wav(HALF))


# Other formats.


def packed(samples: np.ndarray, rate: int, kind: str, subtype: str | None = None) -> bytes:
    import soundfile

    file = BytesIO()
    soundfile.write(file, samples, rate, format=kind, subtype=subtype)
    return file.getvalue()


FORMATS = [
    ("FLAC", "PCM_24", 1e-6),
    ("AIFF", "PCM_16", 1e-4),
    ("OGG", "VORBIS", 0.05),
    ("OGG", "OPUS", 0.05),
    ("MP3", "MPEG_LAYER_III", 0.05),
]


@pytest.mark.parametrize(("kind", "subtype", "error"), FORMATS)
def test_formats_of_soundfile(kind: str, subtype: str, error: float) -> None:
    both = np.stack([HALF, 0.5 * HALF], axis=1)
    found = heard(packed(both, RATE, kind, subtype))
    assert len(found) >= len(HALF)
    difference = np.abs(found[: len(HALF)] - both.mean(axis=1))
    assert np.sqrt((difference**2).mean()) < error


def test_damaged_files_of_soundfile() -> None:
    file = packed(tone(1.0), RATE, "FLAC")
    assert "damaged" in refused(file[:30])
    assert "damaged" in refused(b"fLaC" + bytes(3000))
    assert "damaged" in refused(b"OggS" + bytes(3000))


def test_without_soundfile(monkeypatch: pytest.MonkeyPatch) -> None:
    file = packed(HALF, RATE, "FLAC")
    monkeypatch.setitem(sys.modules, "soundfile", None)
    assert "soundfile: pip install" in refused(file, error=MissingDependencyError)
    assert pieces(wav(HALF))
    assert "is not a sound file: WAV, and with soundfile FLAC" in refused(
        b"\x1aE\xdf\xa3" + bytes(1000)
    )  # a browser's WebM


# Sample rates.


def whole(samples: np.ndarray, rate: int) -> np.ndarray:
    """A sound, converted in one piece."""
    return converted(samples, rate, 0, converted_length(len(samples), rate))


@pytest.mark.parametrize("rate", [1000, 8000, 11_025, 15_999, 22_050, 44_100, 48_000, 96_000, 191_999])
def test_other_rates(rate: int) -> None:
    """A tone of another rate is the same tone, and what 16 kHz cannot hold is gone."""
    hertz = min(1000, rate // 4)
    time = np.arange(rate) / rate
    found = whole(np.sin(2 * np.pi * hertz * time).astype(np.float32), rate)
    expected = np.sin(2 * np.pi * hertz * np.arange(RATE) / RATE)
    assert len(found) == converted_length(rate, rate) == RATE
    np.testing.assert_allclose(found[800:-800], expected[800:-800], atol=1e-4)
    if rate > 2 * 8050:
        high = whole(np.sin(2 * np.pi * 8050 * time).astype(np.float32), rate)
        assert np.abs(high[800:-800]).max() < 2e-4


def test_the_models_own_rate_stays_as_it_is() -> None:
    assert np.shares_memory(whole(HALF, RATE), HALF)
    np.testing.assert_array_equal(whole(HALF, RATE), HALF)


def test_lengths_after_conversion() -> None:
    for rate in (1000, 1001, 44_100, 192_000):
        for frames in (0, 1, 2, 17, 441, 5000):
            assert len(whole(np.ones(frames, np.float32), rate)) == converted_length(frames, rate)


# The spectrogram.


@pytest.mark.needs("oracle")
@pytest.mark.parametrize("samples", [161, 320, 321, 322, 480, 481, 12_345, RATE, RATE + 1, MAX_SAMPLES])
def test_spectrograms_are_those_of_transformers(samples: int) -> None:
    from transformers import Gemma4AudioFeatureExtractor

    extractor = Gemma4AudioFeatureExtractor()
    sound = np.random.default_rng(samples).normal(0, 0.2, samples).astype(np.float32)
    for each in (sound, np.zeros(samples, np.float32), tone(samples / RATE)):
        expected = extractor([each], return_tensors="np")
        known = expected["input_features_mask"][0]
        assert known.dtype == bool
        (piece,) = pieces(each, RATE)
        features = expected["input_features"][0][known]
        np.testing.assert_allclose(spectrogram(piece), features, atol=2e-6, rtol=0)
        assert piece.tokens == -(-int(known.sum()) // 4)


@pytest.mark.needs("oracle")
@pytest.mark.parametrize("bins", [16, 128])
def test_filters_are_those_of_transformers(bins: int) -> None:
    from transformers import Gemma4AudioFeatureExtractor

    expected = Gemma4AudioFeatureExtractor(feature_size=bins).mel_filters
    np.testing.assert_allclose(mel_filters(bins), expected, atol=1e-12)


def test_silence_is_finite() -> None:
    np.testing.assert_allclose(mel_spectrogram(np.zeros(RATE, np.float32), 128), np.log(0.001), atol=1e-6)


def test_digests() -> None:
    first, same, other = (pieces(each, RATE)[0].digest() for each in (HALF, HALF.copy(), HALF[:-1]))
    assert first == same != other
