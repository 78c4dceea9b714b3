"""Videos as pictures with times: some frames, evenly spaced, each of which takes at most 70 tokens.

Frames come from a list of pictures, or from a file, which PyAV decodes (the extra `[video]`). As in transformers, the
time of a frame follows from its index and the frames per second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from io import BytesIO
from os import PathLike
from pathlib import Path
from typing import Any

from ondevice.bundle_format.vision import VisionEntry
from ondevice.errors import MissingDependencyError, PromptError, reason
from ondevice.media.images import Picture, Pixels
from ondevice.text.media_parts import MOST_BYTES, Image, Video

MOST_FRAMES = 32
"""Frames that the model sees of a video."""

FRAME_TOKENS = 70

USUAL_RATE = 24.0
"""Frames per second where nothing says it."""


class Frames:
    """A video whose frames were chosen.

    Attributes:
        counts: the number of soft tokens of each frame.
        labels: the text before each frame, its time as minutes and seconds.
    """

    def __init__(self, video: Video, vision: VisionEntry, name: str) -> None:
        """
        Args:
            video: a file is decoded now, pictures of a list are decoded by `pieces`.
            vision: the tower that it is for.
            name: what errors call it.

        Raises:
            PromptError: it cannot be read, or has no frame.
            MissingDependencyError: Pillow is not installed, or PyAV for a file.
        """
        self._vision, self._name = vision, name
        source = video.source
        if isinstance(source, str | PathLike | bytes | bytearray | memoryview):
            self._pieces, times = self._read(source)
            self.counts = [piece.tokens for piece in self._pieces]
        elif isinstance(source, Sequence) and source:
            rate = _checked_rate(video.fps, name)
            chosen = evenly(len(source))
            self._pictures = [self._picture(source[index], number) for number, index in enumerate(chosen, 1)]
            self._pieces = []
            self.counts = [count for picture in self._pictures for count in picture.counts]
            times = [index / rate for index in chosen]
        else:
            raise PromptError(f"{name} is {source!r:.60}: pass a path, the bytes of a file, or a list of pictures")
        self.labels = [f"{' ' if number else ''}{clock(time)} " for number, time in enumerate(times)]

    def pieces(self) -> Sequence[Pixels]:
        """The frames, decoded and resized.

        Raises:
            PromptError: one is damaged.
        """
        return self._pieces or [piece for picture in self._pictures for piece in picture.pieces()]

    def _picture(self, source: Any, number: int) -> Picture:
        image = source if isinstance(source, Image) else Image(source)
        return Picture(Image(image.source, FRAME_TOKENS), self._vision, None, f"frame {number} of {self._name}")

    def _read(self, source: Any) -> tuple[list[Pixels], list[float]]:
        """The chosen frames of a file, and their times in seconds."""
        try:
            import av
        except ImportError as error:
            raise MissingDependencyError("av", "video", what="a video file") from error
        try:
            with self._opened(av.open, source) as container:
                total = sum(packet.size > 0 for packet in container.demux(container.streams.video[0]))
            with self._opened(av.open, source) as container:
                stream = container.streams.video[0]
                rate = float(stream.average_rate or USUAL_RATE)
                found = list(self._decoded(container.decode(stream), evenly(total)))
        except (av.FFmpegError, IndexError, OSError, ValueError) as error:
            raise PromptError(f"{self._name} is damaged, or no video that PyAV reads ({reason(error)})") from error
        if not found:
            raise PromptError(f"{self._name} has no frame")
        return [pixels for _, pixels in found], [index / rate for index, _ in found]

    def _opened(self, open_file: Callable[[Any], Any], source: Any) -> Any:
        """A container. Bytes are read from memory, and a path must be that of a file, not an address."""
        if isinstance(source, bytes | bytearray | memoryview):
            if len(source) > MOST_BYTES:
                raise PromptError(f"{self._name} has more than {MOST_BYTES >> 20} MB")
            return open_file(BytesIO(source))
        path = Path(source)
        if not path.is_file():
            raise PromptError(f"{self._name} cannot be read: {path}: no such file")
        return open_file(str(path.absolute()))

    def _decoded(self, frames: Iterator[Any], chosen: Sequence[int]) -> Iterator[tuple[int, Pixels]]:
        """The chosen ones of a file's frames, resized at once: whole ones would take much memory."""
        wanted = iter(chosen)
        next_one = next(wanted, None)
        for index, frame in enumerate(frames):
            if next_one is None:
                return
            if index == next_one:
                picture = frame.to_image()
                if turned := frame.rotation:
                    picture = picture.rotate(turned, expand=True)
                [pixels] = self._picture(picture, index + 1).pieces()
                yield index, pixels
                next_one = next(wanted, None)


def evenly(total: int) -> list[int]:
    """Indices of MOST_FRAMES of `total` frames, or of all if there are fewer."""
    count = min(total, MOST_FRAMES)
    return [index * total // count for index in range(count)]


def clock(seconds: float) -> str:
    """Minutes and seconds, such as 01:05."""
    return f"{int(seconds) // 60:02d}:{int(seconds) % 60:02d}"


def _checked_rate(rate: float | None, name: str) -> float:
    if rate is None:
        return USUAL_RATE
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate < float("inf"):
        raise PromptError(f"{name} has {rate!r:.60} frames per second: use a positive number")
    return float(rate)
