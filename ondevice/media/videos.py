"""Videos as pictures with times: some frames, evenly spaced, each of which takes at most 70 tokens.

Frames come from a list of pictures, or from a file, which PyAV decodes (the extra `[video]`). As in transformers, the
time of a frame follows from its index and the frames per second.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from os import PathLike
from pathlib import Path
from typing import Any

from ondevice.bundle_format.vision import VisionEntry
from ondevice.errors import MissingDependencyError, PromptError, reason
from ondevice.media.images import MAX_PIXELS, Picture, Pixels, check_size, resized
from ondevice.text.media_parts import MAX_BYTES, Image, Video, unreadable

MAX_FRAMES = 32
"""Frames that the model sees of a video."""

FRAME_TOKENS = 70

USUAL_RATE = 24.0
"""Frames per second where nothing says it."""

MIN_RATE, MAX_RATE = 1e-6, 1e6
"""Frames per second that a list can have: the times of its frames are numbers of a few digits."""


class Frames:
    """A video whose frames were chosen; `piece` decodes one. The first of a file decodes all, and keeps them resized.

    Attributes:
        counts: the number of soft tokens of each frame, by the header of a file. A damaged one may have frames of
            another size, or fewer frames than packets.
        size: the number of pixels of the chosen frames.
        file_bytes: None: no frame is decoded again.
        labels: the text before each frame, its time as minutes and seconds.
    """

    file_bytes = None

    def __init__(self, video: Video, vision: VisionEntry, name: str) -> None:
        """
        Args:
            video: the file, of which the header is read and the packets are counted, or the list of pictures.
            vision: the tower that it is for.
            name: what errors call it.

        Raises:
            PromptError: it cannot be read, or has no frame.
            MissingDependencyError: Pillow is not installed, or PyAV for a file.
        """
        self._vision, self._name, self._source = vision, name, video.source
        self._pieces: list[Pixels | None] = []
        if isinstance(self._source, str | PathLike | bytes | bytearray | memoryview):
            self._pictures = list[Picture]()
            self._chosen, rate = self._read_header()
        elif isinstance(self._source, Sequence) and self._source:
            rate = _checked_rate(video.fps, name)
            self._chosen = evenly(len(self._source))
            self._pictures = [self._picture(self._source[index], n) for n, index in enumerate(self._chosen, 1)]
            self.counts = [count for picture in self._pictures for count in picture.counts]
            self.size = sum(picture.size for picture in self._pictures)
        else:
            raise PromptError(
                f"{name} is {video.source!r:.60}: pass a path, the bytes of a file, or a list of pictures"
            )
        times = [index / rate for index in self._chosen]
        self.labels = [f"{' ' if number else ''}{clock(time)} " for number, time in enumerate(times)]

    def piece(self, index: int) -> Pixels | None:
        """A chosen frame, decoded and resized; None if a damaged file lacks it.

        Raises:
            PromptError: it is damaged.
        """
        if self._pictures:
            return self._pictures[index].piece(0)
        if not self._pieces:
            with self._opened() as stream:
                found = dict(self._decoded(stream))
            self._pieces = [found.get(each) for each in self._chosen]
        return self._pieces[index]

    def identity(self) -> bytes | None:
        """See `Medium`. None for a path: the file is not read as a whole, and may change."""
        if isinstance(self._source, bytes):
            return hashlib.sha256(self._source).digest() + b"video"
        identities = [picture.identity() for picture in self._pictures]
        if not identities or None in identities:
            return None
        return hashlib.sha256(b"".join(filter(None, identities))).digest() + b"list"

    def _picture(self, source: Any, number: int) -> Picture:
        image = source if isinstance(source, Image) else Image(source)
        return Picture(Image(image.source, FRAME_TOKENS), self._vision, None, f"frame {number} of {self._name}")

    def _read_header(self) -> tuple[list[int], float]:
        """Which frames of a file are chosen, and the frames per second. Sets `counts` and `size`."""
        with self._opened() as stream:
            width, height = stream.codec_context.width, stream.codec_context.height
            rate = float(stream.average_rate or USUAL_RATE)
            # An edit list discards packets: they are decoded for the frames after a cut, and show none themselves.
            packets = stream.container.demux(stream)
            chosen = evenly(sum(packet.size > 0 and not packet.is_discard for packet in packets))
        if not chosen:
            raise PromptError(f"{self._name} has no frame")
        check_size(width, height, self._name)
        tall, wide = resized(height, width, FRAME_TOKENS, self._vision, self._name)
        self.counts = [tall * wide // self._vision.side**2] * len(chosen)
        self.size = width * height * len(chosen)
        return chosen, rate

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        """The first stream of a file's pictures. Bytes are read from memory, and a path must be that of a file, not an
        address. FFmpeg's formats of playlists and sessions would open further files and sockets: none are opened.
        """
        try:
            import av
        except ImportError as error:
            raise MissingDependencyError("av", "video", what="a video file") from error
        source: Any = self._source
        protocols = "file"
        if isinstance(source, str | PathLike):
            path = Path(source)
            if not path.is_file():
                raise PromptError(f"{self._name} cannot be read: {unreadable(path, 'no such file')}")
            source = str(path.absolute())
        elif len(source) > MAX_BYTES:
            raise PromptError(f"{self._name} has more than {MAX_BYTES >> 20} MB: pass its path")
        else:
            source, protocols = BytesIO(source), "none"
        try:
            with av.open(source, container_options={"protocol_whitelist": protocols}) as container:
                if not container.streams.video:
                    raise ValueError("it has no pictures")
                stream = container.streams.video[0]
                if stream.codec_context is None:
                    raise ValueError("it has an encoding without a decoder")
                stream.codec_context.options = {"max_pixels": str(MAX_PIXELS)}  # of a frame, whatever the header says
                yield stream
        except (av.FFmpegError, OSError, ValueError) as error:
            raise PromptError(f"{self._name} is damaged, or no video that PyAV reads ({reason(error)})") from error

    def _decoded(self, stream: Any) -> Iterator[tuple[int, Pixels]]:
        """The chosen ones of a file's frames, resized at once: whole ones would take much memory."""
        wanted, last = set(self._chosen), self._chosen[-1]
        for index, frame in enumerate(stream.container.decode(stream)):
            if index in wanted:
                picture = frame.to_image()
                if turned := frame.rotation:
                    picture = picture.rotate(turned, expand=True)
                yield index, self._picture(picture, index + 1).piece(0)
            if index == last:
                return


def evenly(total: int) -> list[int]:
    """Indices of MAX_FRAMES of `total` frames, or of all if there are fewer."""
    count = min(total, MAX_FRAMES)
    return [index * total // count for index in range(count)]


def clock(seconds: float) -> str:
    """Minutes and seconds, such as 01:05."""
    return f"{int(seconds) // 60:02d}:{int(seconds) % 60:02d}"


def _checked_rate(rate: float | None, name: str) -> float:
    if rate is None:
        return USUAL_RATE
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not MIN_RATE <= rate <= MAX_RATE:
        raise PromptError(
            f"{name} has {rate!r:.60} frames per second: use a positive number, from {MIN_RATE:g} to {MAX_RATE:g}"
        )
    return float(rate)
