"""Opens and decodes sounds, and makes the mel spectrograms that the audio tower reads.

WAV files are read here, a few other formats by `soundfile`, where it is installed (the extra `[audio]`). Files are
untrusted: the header is read first, and what is too long is refused before it is decoded; more samples than a header
says are not decoded. Channels are averaged, and other sample rates than 16 kHz are converted. A sound of more than 30
seconds becomes several pieces, none of which is longer, and each of which is decoded by itself.
"""

from __future__ import annotations

import hashlib
import math
import re
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from itertools import islice
from os import PathLike
from typing import Any, Protocol

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from ondevice.arrays import Float32Array, Float64Array
from ondevice.bundle_format import graph_io
from ondevice.bundle_format.audio import FFT, FRAME, HOP, MAX_SAMPLES, RATE, AudioEntry, audio_tokens
from ondevice.errors import MissingDependencyError, PromptError
from ondevice.text.media_parts import MAX_BYTES, Audio, file_content

MIN_RATE, MAX_RATE = 1000, 192_000
"""Sample rates that can be converted, in Hz."""

MAX_SECONDS = 3600
MAX_CHANNELS = 32

UNKNOWN = (1 << 63) - 1
"""Samples of a file that does not say its length, such as FLAC from a pipe."""

MAX_CHUNKS = 1 << 12
"""Most chunks of a WAV file before its samples."""

MAX_VALUE = 100.0
"""Largest sample. Full scale is 1, which mixing may exceed a little, and numbers of another scale by far."""

MEL_FLOOR = 0.001
"""Added to the bands before their logarithm is taken."""

_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
"""Formats of a WAV file; the last one has its format in a longer header."""

_WIDTHS = {_PCM: (8, 16, 24, 32), _FLOAT: (32, 64)}
"""Bits of a sample, by format."""

_SOUNDFILE = re.compile(rb"fLaC|OggS|\xff[\xe2-\xff]|FORM....AIF[FC]", re.DOTALL)
"""How the files begin that soundfile reads here: FLAC, Ogg (Vorbis, Opus), MP3, AIFF. It knows many more, whose readers
are hardly ever used, and files are untrusted.
"""

_NO_PAGE, MAX_FALSE_PAGES = re.compile(rb"OggS(?!\0)"), 64
"""Beginnings of Ogg pages that are none, and the most of them: the library takes 5 us to find that out for each."""


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

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.values.nbytes

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


class SoundSource(Protocol):
    """A sound whose header was read.

    rate : samples per second
    frames : samples of each channel, as its header says: there may be fewer
    channels : their number
    """

    rate: int
    frames: int
    channels: int

    @property
    def file(self) -> bytes | None:
        """The content of the file; None for an array."""
        ...

    def blocks(self) -> Iterator[NDArray[Any]]:
        """The samples, in arrays [n, channels] of a second at most."""
        ...


class Sound:
    """A sound whose header was read and whose length was checked; `piece` decodes a part of it.

    Attributes:
        counts: the number of soft tokens of each piece. A file may have fewer samples than its header says; the pieces
            of those that are missing have no token, or fewer.
        size: the number of its samples, of all channels.
        file_bytes: see `Medium`.
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
        self._source = source = self._open(audio)
        self._check()
        self._forget()
        self.size = source.frames * source.channels
        self.file_bytes = None if source.file is None else len(source.file)
        length = converted_length(source.frames, source.rate)
        lengths = [min(MAX_SAMPLES, length - begin) for begin in range(0, length, MAX_SAMPLES)]
        self.counts = [count for size in lengths if (count := audio_tokens(entry, size))]
        if not self.counts:
            raise PromptError(
                f"{name} is too short: {source.frames} samples at {source.rate} Hz, and 10 ms are not enough"
            )

    def piece(self, index: int) -> Samples:
        """Decode 30 seconds of it, and what the conversion needs before and after them.

        Pieces are decoded in their order: an earlier one than the last begins at the first again, since no decoder
        finds a place of an MP3 file exactly. Nothing is kept after the last.

        Raises:
            PromptError: it is damaged, or has samples that are no numbers, or beyond MAX_VALUE.
        """
        rate, length = self._source.rate, MAX_SAMPLES // RATE * self._source.rate
        begin, margin = index * length, 0 if rate == RATE else reach(rate)
        before = min(margin, begin)
        values = self._values(begin - before, min(begin + length + margin, self._source.frames))
        if index == len(self.counts) - 1:
            self._forget()
        found = min(length, max(len(values) - before, 0))
        return Samples(converted(values, rate, before, converted_length(found, rate)), self._entry)

    def identity(self) -> bytes | None:
        """See `Medium`."""
        return None if self._source.file is None else hashlib.sha256(self._source.file).digest()

    def _values(self, begin: int, end: int) -> Float32Array:
        """The means of the channels, float32[n]: all from `begin` to `end` that the file has."""
        if begin < self._first:
            self._forget()
        while self._first + sum(map(len, self._heard)) < end and (block := next(self._blocks, None)) is not None:
            with np.errstate(over="ignore", invalid="ignore"):
                self._heard.append(as_float(block).mean(axis=1))
                if not (np.abs(self._heard[-1]) <= MAX_VALUE).all():
                    raise PromptError(f"{self._name} has samples that are NaN, infinite or far beyond -1 to 1")
            while self._heard and self._first + len(self._heard[0]) <= begin:
                self._first += len(self._heard.pop(0))
        return np.concatenate([np.zeros(0, np.float32), *self._heard])[begin - self._first : end - self._first]

    def _forget(self) -> None:
        """Begin at the first block again."""
        self._blocks, self._first = self._source.blocks(), 0
        self._heard: list[Float32Array] = []
        """Blocks that were decoded last, from the sample `_first` on."""

    def _open(self, audio: Audio) -> SoundSource:
        source = audio.source
        if isinstance(source, np.ndarray):
            return self._of_array(source, audio.rate)
        if not isinstance(source, str | PathLike | bytes | bytearray | memoryview):
            raise PromptError(
                f"{self._name} is a {type(source).__name__}: pass a path, the bytes of a file, or an array of samples"
            )
        if audio.rate is not None:
            raise PromptError(f"{self._name} has a rate, which is for arrays: a file names its own")
        content = _without_tag(file_content(source, self._name, MAX_BYTES))
        if content[:4] == b"RIFF" and content[8:12] == b"WAVE":
            try:
                return WavFile(content)
            except ValueError as error:
                raise PromptError(f"{self._name} is a WAV file that cannot be read: {error}") from error
        if not _SOUNDFILE.match(content):
            raise PromptError(
                f"{self._name} is not a sound file: WAV, and with soundfile FLAC, Ogg, MP3 and AIFF can be read"
            )
        if (
            content[:4] == b"OggS"
            and sum(1 for _ in islice(_NO_PAGE.finditer(content), MAX_FALSE_PAGES)) == MAX_FALSE_PAGES
        ):
            raise PromptError(f"{self._name} is damaged: it has {MAX_FALSE_PAGES} beginnings of pages that are none")
        return OtherFile(content, self._name)

    def _of_array(self, array: NDArray[Any], rate: int | None) -> SoundSource:
        good = array.ndim in (1, 2) and (any(np.issubdtype(array.dtype, each) for each in (np.int16, np.floating)))
        if not good:
            raise PromptError(
                f"{self._name} is an array {array.dtype}{list(array.shape)}: use float32[samples] or int16[samples]"
            )
        if not isinstance(rate, int | np.integer) or isinstance(rate, bool):
            raise PromptError(f"{self._name} is an array, whose sample rate must be given: Audio(samples, rate=16000)")
        return ArrayOfSamples(array[:, None] if array.ndim == 1 else array, int(rate))

    def _check(self) -> None:
        rate, frames, channels = self._source.rate, self._source.frames, self._source.channels
        if not MIN_RATE <= rate <= MAX_RATE:
            raise PromptError(f"{self._name} has {rate} samples per second: {MIN_RATE} to {MAX_RATE} are possible")
        if not 1 <= channels <= MAX_CHANNELS:
            raise PromptError(f"{self._name} has {channels} channels: 1 to {MAX_CHANNELS} are possible")
        if frames == UNKNOWN:
            raise PromptError(f"{self._name} does not say how long it is: convert it to WAV")
        if frames > MAX_SECONDS * rate:
            raise PromptError(f"{self._name} is longer than {MAX_SECONDS // 60} minutes: cut it")


class ArrayOfSamples:
    """A `SoundSource` of samples in memory, [frames, channels]."""

    file: bytes | None = None

    def __init__(self, samples: NDArray[Any], rate: int) -> None:
        self._samples, self.rate, (self.frames, self.channels) = samples, rate, samples.shape

    def blocks(self) -> Iterator[NDArray[Any]]:
        for first in range(0, self.frames, self.rate):
            yield self._samples[first : first + self.rate]


class OtherFile:
    """A `SoundSource` of a file that soundfile reads, its header without decoding."""

    def __init__(self, content: bytes, name: str) -> None:
        """
        Raises:
            PromptError: it is damaged.
            MissingDependencyError: soundfile is not installed.
        """
        self.file, self._name = content, name
        with self._opened() as file:
            self.rate, self.frames, self.channels = int(file.samplerate), int(file.frames), int(file.channels)

    def blocks(self) -> Iterator[NDArray[Any]]:
        with self._opened() as file:
            file.seekable = lambda: False  # it would seek after each read, and miss the place in an MP3 file by a frame
            while len(block := file.read(self.rate, dtype="float32", always_2d=True)):
                yield block

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        try:
            import soundfile
        except (ImportError, OSError) as error:  # OSError: its library is missing
            raise MissingDependencyError("soundfile", "audio", what="a sound that is no WAV file") from error
        try:
            with soundfile.SoundFile(BytesIO(self.file)) as file:
                yield file
        except soundfile.SoundFileError as error:
            raise PromptError(f"{self._name} is damaged, or no sound that soundfile reads") from error


class WavFile:
    """A `SoundSource` of a WAV file: PCM of 8, 16, 24 or 32 bits, or floats of 32 or 64. `frames` are those that are
    there, also in a file that was cut.
    """

    def __init__(self, content: bytes) -> None:
        """Read the header. Raises ValueError where it is damaged, or names another encoding."""
        self.file = content
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
        self._type, self._bits, self._block = kind, bits, block
        self.frames = len(self._data) // block

    def blocks(self) -> Iterator[NDArray[Any]]:
        for first in range(0, self.frames, self.rate):
            yield self._values(self._data[first * self._block : min(first + self.rate, self.frames) * self._block])

    def _values(self, data: memoryview) -> NDArray[Any]:
        """The samples, [n, channels], of an integer type or floats."""
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
        return values.reshape(-1, self.channels)

    def _chunks(self) -> tuple[bytes, memoryview]:
        """The content of the chunks `fmt ` and `data`."""
        header, place, content = None, 12, memoryview(self.file)
        for _ in range(MAX_CHUNKS):
            if place + 8 > len(content):
                break
            name, size = bytes(content[place : place + 4]), int.from_bytes(content[place + 4 : place + 8], "little")
            body = content[place + 8 : place + 8 + size]
            if name == b"fmt ":
                header = bytes(body[:40])
            elif name == b"data":
                if header is None:
                    break
                # Streams name the size 0 or the largest: what is there counts.
                return header, body or content[place + 8 :]
            place += 8 + size + size % 2
        raise ValueError(f"it has no samples, no header before them, or {MAX_CHUNKS} other chunks")


def _without_tag(content: bytes) -> bytes:
    """A file without the ID3 tag that an MP3 file may begin with. It may have millions of damaged fields, for each of
    which the library would write a line to the standard error.
    """
    if content[:3] != b"ID3" or len(content) < 10:
        return content
    size = sum((byte & 127) << shift for byte, shift in zip(content[6:10], (21, 14, 7, 0), strict=True))
    return content[10 + size + 10 * (content[5] >> 4 & 1) :]


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

NODES = 8
"""Places between two samples for which weights are computed; a polynomial interpolates between these. The largest
difference from weights that are computed for each place was 2e-6 of full scale, in noise.
"""

BLOCK, ROWS = 1 << 11, 32
"""Samples that are computed at once, and rows of each of the matrix products for them: OpenBLAS computes so small ones
in the calling thread, and larger ones in threads that wait for each other where the cores are busy.
"""


def reach(rate: int) -> int:
    """The samples on each side that a converted one depends on."""
    return math.ceil(ZEROS / _scale(rate))


def converted_length(frames: int, rate: int) -> int:
    """The number of samples after the conversion to RATE."""
    return -(-frames * RATE // rate)


def converted(samples: Float32Array, rate: int, begin: int, count: int) -> Float32Array:
    """`count` samples at RATE, the first at the place of `samples[begin]`, by a windowed sinc.

    Beyond both ends of `samples` is silence. The time is linear in the length for every rate: the weights of a place
    between two samples are not computed for each place, of which a rate such as 44,101 Hz has 16,000, but interpolated.
    """
    if rate == RATE or not count:
        return samples[begin : begin + count]
    margin, taps = reach(rate), 2 * reach(rate) + 1
    padded = np.zeros((count - 1) * rate // RATE + taps, np.float32)
    heard = samples[max(begin - margin, 0) :][: len(padded) - max(margin - begin, 0)]
    padded[max(margin - begin, 0) :][: len(heard)] = heard
    windows = sliding_window_view(padded, taps)

    nodes = (1 - np.cos(np.pi * (np.arange(NODES) + 0.5) / NODES)) / 2  # Chebyshev's, from 0 to 1
    scale, distances = _scale(rate), np.arange(taps) - margin - nodes[:, None]
    weights = scale * _windowed_sinc(scale * distances).astype(np.float32)
    polynomials = np.linalg.inv(_chebyshev(nodes))
    out = np.empty(count, np.float32)
    for first in range(0, count, BLOCK):
        numbers = np.arange(first, min(first + BLOCK, count))
        begins, beyond = np.divmod(np.resize(numbers, (-(-len(numbers) // ROWS), ROWS)) * rate, RATE)
        shares = _chebyshev(beyond / RATE) @ polynomials
        out[numbers] = (windows[begins] @ weights.T * shares).sum(axis=-1).reshape(-1)[: len(numbers)]
    return out


def _scale(rate: int) -> float:
    return CUTOFF * min(1.0, RATE / rate)


def _chebyshev(places: Float64Array) -> Float64Array:
    """Chebyshev's polynomials at places from 0 to 1, float64[..., NODES]."""
    return np.polynomial.chebyshev.chebvander(2 * places - 1, NODES - 1).astype(np.float64)


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
