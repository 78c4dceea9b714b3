"""Opens and decodes sounds, and makes the mel spectrograms that the audio tower reads.

WAV files are read here, a few other formats by `soundfile`, where it is installed (the extra `[audio]`). Files are
untrusted: the header is read first, and what is too long is refused before it is decoded, or as soon as that many
samples were decoded, where a header may be wrong about it. Channels are averaged, and other sample rates than 16 kHz
are converted. A sound of more than 30 seconds becomes several, none of which is longer.
"""

from __future__ import annotations

import hashlib
import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from os import PathLike
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from ondevice.arrays import Float32Array, Float64Array
from ondevice.bundle_format import graph_io
from ondevice.bundle_format.audio import FFT, FRAME, HOP, MOST_SAMPLES, RATE, AudioEntry, audio_tokens
from ondevice.errors import MissingDependencyError, PromptError
from ondevice.text.media_parts import MOST_BYTES, Audio, file_content

LEAST_RATE, MOST_RATE = 1000, 192_000
"""Sample rates that can be converted, in Hz."""

MOST_SECONDS = 3600
MOST_FRAMES = 1 << 26
"""Most samples of a channel: they are in memory at once."""
MOST_CHANNELS = 32

MOST_VALUE = 100.0
"""Largest sample. Full scale is 1, which mixing may exceed a little, and numbers of another scale by far."""

MEL_FLOOR = 0.001
"""Added to the bands before their logarithm is taken."""

_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
"""Formats of a WAV file; the last one has its format in a longer header."""

_WIDTHS = {_PCM: (8, 16, 24, 32), _FLOAT: (32, 64)}
"""Bits of a sample, by format."""

_SOUNDFILE = re.compile(rb"fLaC|OggS|ID3|\xff[\xe2-\xff]|FORM....AIF[FC]", re.DOTALL)
"""How the files begin that soundfile reads here: FLAC, Ogg (Vorbis, Opus), MP3, AIFF. It knows many more, whose readers
are hardly ever used, and files are untrusted.
"""


@dataclass(frozen=True)
class Samples:
    """At most 30 seconds of a sound.

    values : float32[N] in [-1, 1], at RATE
    audio : the tower that they are for
    """

    values: Float32Array
    audio: AudioEntry

    @property
    def tokens(self) -> int:
        """The number of soft tokens."""
        return audio_tokens(self.audio, len(self.values))

    def digest(self) -> bytes:
        """Identifies the soft tokens: equal samples have equal ones."""
        return hashlib.sha256(b"audio" + self.values.tobytes()).digest()

    def feeds(self) -> Mapping[str, NDArray[Any]]:
        """The inputs of the tower's graph; see `graph_io`."""
        if self.audio.layers:
            return {graph_io.SOUND: mel_spectrogram(self.values, self.audio.mel_bins)}
        frames = np.zeros((self.tokens, self.audio.output_size), np.float32)
        frames.reshape(-1)[: len(self.values)] = self.values
        return {graph_io.SOUND: frames}


@dataclass(frozen=True)
class _Sound:
    """A sound before it is decoded: `values()` are the samples, [n, channels]."""

    rate: int
    frames: int
    content: NDArray[Any] | WavFile

    def values(self) -> NDArray[Any]:
        return self.content if isinstance(self.content, np.ndarray) else self.content.values()


class Sound:
    """A sound whose header was read and whose length was checked; `pieces` decodes it.

    Attributes:
        counts: the number of soft tokens of each piece.
    """

    def __init__(self, audio: Audio, entry: AudioEntry, name: str) -> None:
        """
        Args:
            audio: the sound.
            entry: the tower that it is for.
            name: what errors call it.

        Raises:
            PromptError: it cannot be read, is of another format, or is too short or too long.
            MissingDependencyError: it is no WAV file, and soundfile is not installed.
        """
        self._name, self._entry = name, entry
        self._sound = self._open(audio)
        length = converted_length(self._sound.frames, self._sound.rate)
        lengths = [min(MOST_SAMPLES, length - begin) for begin in range(0, length, MOST_SAMPLES)]
        self.counts = [count for size in lengths if (count := audio_tokens(entry, size))]
        if not self.counts:
            raise PromptError(
                f"{name} is too short: {self._sound.frames} samples at {self._sound.rate} Hz, and 10 ms are not enough"
            )

    def pieces(self) -> list[Samples]:
        """Decode it.

        Raises:
            PromptError: it has samples that are no numbers, or beyond MOST_VALUE.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            values = as_float(self._sound.values()).mean(axis=1)
            if not (np.abs(values) <= MOST_VALUE).all():
                raise PromptError(f"{self._name} has samples that are NaN, infinite or far beyond -1 to 1")
        heard = converted(values, self._sound.rate)
        begins = range(0, MOST_SAMPLES * len(self.counts), MOST_SAMPLES)
        return [Samples(heard[begin : begin + MOST_SAMPLES], self._entry) for begin in begins]

    def _open(self, audio: Audio) -> _Sound:
        source = audio.source
        if isinstance(source, np.ndarray):
            return self._of_array(source, audio.rate)
        if not isinstance(source, str | PathLike | bytes | bytearray | memoryview):
            raise PromptError(
                f"{self._name} is a {type(source).__name__}: pass a path, the bytes of a file, or an array of samples"
            )
        if audio.rate is not None:
            raise PromptError(f"{self._name} has a rate, which is for arrays: a file names its own")
        content = file_content(source, self._name, MOST_BYTES)
        if content[:4] == b"RIFF" and content[8:12] == b"WAVE":
            try:
                wav = WavFile(content)
            except ValueError as error:
                raise PromptError(f"{self._name} is a WAV file that cannot be read: {error}") from error
            self._check(wav.rate, wav.frames, wav.channels)
            return _Sound(wav.rate, wav.frames, wav)
        if not _SOUNDFILE.match(content):
            raise PromptError(f"{self._name} is no sound: WAV, and with soundfile FLAC, Ogg, MP3 and AIFF can be read")
        return self._of_soundfile(content)

    def _of_array(self, array: NDArray[Any], rate: int | None) -> _Sound:
        good = array.ndim in (1, 2) and (any(np.issubdtype(array.dtype, each) for each in (np.int16, np.floating)))
        if not good:
            raise PromptError(
                f"{self._name} is an array {array.dtype}{list(array.shape)}: use float32[samples] or int16[samples]"
            )
        if not isinstance(rate, int | np.integer) or isinstance(rate, bool):
            raise PromptError(f"{self._name} is an array, whose sample rate must be given: Audio(samples, rate=16000)")
        samples = array[:, None] if array.ndim == 1 else array
        self._check(int(rate), *samples.shape)
        return _Sound(int(rate), len(samples), samples)

    def _of_soundfile(self, content: bytes) -> _Sound:
        try:
            import soundfile
        except (ImportError, OSError) as error:  # OSError: its library is missing
            raise MissingDependencyError("soundfile", "audio", what="a sound that is no WAV file") from error
        try:
            with soundfile.SoundFile(BytesIO(content)) as file:
                rate, blocks, frames = file.samplerate, list[NDArray[Any]](), 0
                self._check(rate, frames, file.channels)
                # The length in a header may be an estimate, and silence takes no bytes: only what is decoded counts.
                while len(block := file.read(rate, dtype="float32", always_2d=True)):
                    frames += len(block)
                    self._check(rate, frames, file.channels)
                    blocks.append(block.mean(axis=1, keepdims=True))
        except soundfile.SoundFileError as error:
            raise PromptError(f"{self._name} is damaged, or no sound that soundfile reads") from error
        return _Sound(rate, frames, np.concatenate([np.zeros((0, 1), np.float32), *blocks]))

    def _check(self, rate: int, frames: int, channels: int) -> None:
        if not LEAST_RATE <= rate <= MOST_RATE:
            raise PromptError(f"{self._name} has {rate} samples per second: {LEAST_RATE} to {MOST_RATE} are possible")
        if not 1 <= channels <= MOST_CHANNELS:
            raise PromptError(f"{self._name} has {channels} channels: 1 to {MOST_CHANNELS} are possible")
        if frames > MOST_SECONDS * rate:
            raise PromptError(f"{self._name} is longer than {MOST_SECONDS // 60} minutes")
        if frames > MOST_FRAMES:
            raise PromptError(f"{self._name} has more than {MOST_FRAMES >> 20} million samples")


class WavFile:
    """A WAV file: PCM of 8, 16, 24 or 32 bits, or floats of 32 or 64.

    rate : samples per second
    frames : samples of each channel; of a file that was cut, those that are there
    """

    def __init__(self, content: bytes) -> None:
        """Read the header. Raises ValueError where it is damaged, or names another encoding."""
        self._content = content
        header, self._data = self._chunks()
        if len(header) < 16:
            raise ValueError("its header is too short")
        kind, self.channels, self.rate, _, block, bits = struct.unpack("<HHIIHH", header[:16])
        if kind == _EXTENSIBLE and len(header) >= 26:
            (kind,) = struct.unpack("<H", header[24:26])
        if bits not in _WIDTHS.get(kind, ()):
            raise ValueError(f"format {kind} with {bits} bits is neither PCM nor float")
        if not self.channels or block != self.channels * bits // 8:
            raise ValueError(f"{self.channels} channels of {bits} bits do not take {block} bytes")
        self._type, self._bits = kind, bits
        self.frames = len(self._data) // block

    def values(self) -> NDArray[Any]:
        """The samples, [frames, channels], of an integer type or floats."""
        data = self._data[: self.frames * self.channels * self._bits // 8]
        if self._type == _FLOAT:
            values: NDArray[Any] = np.frombuffer(data, f"<f{self._bits // 8}")
        elif self._bits == 8:
            values = np.frombuffer(data, np.uint8).astype(np.int16) - 128 << 8  # the only unsigned width
        elif self._bits == 24:
            wide = np.zeros((len(data) // 3, 4), np.uint8)
            wide[:, 1:] = np.frombuffer(data, np.uint8).reshape(-1, 3)
            values = wide.view("<i4")[:, 0]
        else:
            values = np.frombuffer(data, f"<i{self._bits // 8}")
        return values.reshape(self.frames, self.channels)

    def _chunks(self) -> tuple[bytes, memoryview]:
        """The content of the chunks `fmt ` and `data`."""
        header, place, content = None, 12, memoryview(self._content)
        while place + 8 <= len(content):
            name, size = bytes(content[place : place + 4]), int.from_bytes(content[place + 4 : place + 8], "little")
            body = content[place + 8 : place + 8 + size]  # streams name no size or the largest: what is there counts
            if name == b"fmt ":
                header = bytes(body[:40])
            elif name == b"data":
                if header is None:
                    break
                return header, body
            place += 8 + size + size % 2
        raise ValueError("it has no samples, or no header before them")


def as_float(values: NDArray[Any]) -> Float32Array:
    """Samples as float32 in [-1, 1]."""
    if np.issubdtype(values.dtype, np.floating):
        return values.astype(np.float32)
    return values.astype(np.float32) * np.float32(1 / (1 << (8 * values.dtype.itemsize - 1)))


# Sample rates.

ZEROS = 32
"""Zero crossings of the interpolating function on each side."""

CUTOFF = 0.92
"""Highest frequency that is kept, as a share of half the lower rate."""

KAISER = 8.0
"""Shape of the window: what is beyond half the lower rate is damped by 80 dB."""

PHASES = 256
"""Phases whose weights are computed at once."""


def converted_length(frames: int, rate: int) -> int:
    """The number of samples after the conversion to RATE."""
    return -(-frames * RATE // rate)


def converted(samples: Float32Array, rate: int) -> Float32Array:
    """The samples at RATE, by a windowed sinc, phase by phase; at RATE already, they stay as they are."""
    if rate == RATE or not len(samples):
        return samples
    common = math.gcd(rate, RATE)
    phases, step = RATE // common, rate // common
    scale = CUTOFF * min(1.0, RATE / rate)
    reach = math.ceil(ZEROS / scale)
    padded = np.concatenate([np.zeros(reach, np.float32), samples, np.zeros(reach + step + 1, np.float32)])
    windows = sliding_window_view(padded, 2 * reach + 1)
    out = np.empty(converted_length(len(samples), rate), np.float32)
    taps = np.arange(-reach, reach + 1)
    for first in range(0, min(phases, len(out)), PHASES):
        numbers = np.arange(first, min(first + PHASES, phases, len(out)))
        begins, beyond = np.divmod(numbers * step, phases)
        weights = scale * _windowed_sinc(scale * (taps - beyond[:, None] / phases)).astype(np.float32)
        for phase, begin, row in zip(numbers, begins, weights, strict=True):
            outputs = out[phase::phases]
            outputs[:] = windows[begin::step][: len(outputs)] @ row
    return out


def _windowed_sinc(places: Float64Array) -> Float64Array:
    """The interpolating function, ZEROS wide on each side of 0."""
    window = np.i0(KAISER * np.sqrt(np.clip(1 - (places / ZEROS) ** 2, 0, None))) / np.i0(KAISER)
    made: Float64Array = np.sinc(places) * window
    return made


# The spectrogram.


def mel_spectrogram(samples: Float32Array, bins: int) -> Float32Array:
    """Logarithms of the energies in `bins` bands, float32[F, bins] (Gemma4AudioFeatureExtractor).

    A frame is 20 ms long and begins 10 ms after the one before it; half a frame of silence goes before the sound.
    """
    padded = np.concatenate([np.zeros(FRAME // 2, np.float32), samples])
    # One sample more than a frame, as in the reference: it decides whether the last frame counts.
    frames = sliding_window_view(padded, FRAME + 1)[::HOP, :FRAME]
    window = (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(FRAME) / FRAME)).astype(np.float32)
    magnitudes = np.abs(np.fft.rfft(frames * window, n=FFT, axis=-1))
    return np.log(magnitudes @ mel_filters(bins) + MEL_FLOOR).astype(np.float32)


@cache
def mel_filters(bins: int) -> Float64Array:
    """The weight of each frequency in each band, float64[FFT / 2 + 1, bins].

    Bands are triangles between points at equal distances on the mel scale, 2595 * log10(1 + f / 700), from 0 to 8 kHz.
    The lowest band lies between two frequencies: its weights are all 0.
    """
    frequencies = np.linspace(0, RATE // 2, FFT // 2 + 1)
    corners = 700 * (10 ** (np.linspace(0, 2595 * np.log10(1 + RATE / 2 / 700), bins + 2) / 2595) - 1)
    rising = (frequencies[:, None] - corners[:-2]) / np.diff(corners)[:-1]
    falling = (corners[2:] - frequencies[:, None]) / np.diff(corners)[1:]
    filters: Float64Array = np.maximum(0, np.minimum(rising, falling))
    return filters
