"""Pictures, sounds and videos in messages: parts that hold one are taken out before a chat template is rendered.

A picture is an `Image`, `{"type": "image", "image": ...}`, or OpenAI's `{"type": "image_url", "image_url": {"url":
"data:image/png;base64,..."}}`. A sound is an `Audio`, `{"type": "audio", "audio": ...}`, or OpenAI's `{"type":
"input_audio", "input_audio": {"data": base64, "format": "wav"}}`. A video is a `Video` or `{"type": "video", "video":
...}`. The template sees `{"type": "image"}` or `{"type": "audio"}`, and writes a placeholder. For a video it sees a
picture: many tokenizers lack the token `<|video|>`, and the templates treat both alike.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from ondevice.errors import PromptError, reason, shown

PLACEHOLDERS: tuple[dict[str, str], ...] = ({"type": "image"}, {"type": "audio"})
"""The stand-ins of a picture, a video and a sound in the messages that a chat template sees."""

MAX_BYTES = 1 << 25
"""Largest file of a picture or sound, in bytes."""

PIECE = 1 << 20
"""Characters of base64 that are decoded at a time."""

LINE_BREAKS = "\r\n"
"""Characters between the lines of base64."""

DETAILS = {"auto": None, "low": 70, "high": 560, "original": 1120}
"""Soft tokens at most for OpenAI's `detail`; None takes the model's own number."""


@dataclass(frozen=True)
class Image:
    """A picture, a part of a message's content: `[Image("photo.jpg"), {"type": "text", "text": "What is this?"}]`.

    source : a path (str or `PathLike`), the bytes of a file, a `PIL.Image.Image`, or a numpy array uint8[height, width]
        (gray), [height, width, 3] (RGB) or [height, width, 4] (RGBA)
    tokens : the most tokens of the prompt that it may take: 70, 140, 280, 560 or 1120. More show more detail and take
        longer. None takes the generation's `image_tokens`
    """

    source: Any
    tokens: int | None = None


@dataclass(frozen=True)
class Audio:
    """A sound, a part of a message's content: `[Audio("question.wav")]`.

    source : a path (str or `PathLike`) or the bytes of a file, or samples: a numpy array of one dimension, or [samples,
        channels], of a float type in [-1, 1] or int16
    rate : samples per second of an array; not for files, which name theirs
    """

    source: Any
    rate: int | None = None


@dataclass(frozen=True)
class Video:
    """A video, a part of a message's content: `[Video("clip.mp4")]`. The model sees 32 of its frames at most.

    source : a path (str or `PathLike`), the bytes of a file, or the frames, a list of what `Image` takes
    fps : frames per second of a list, None for 24; a file names its own
    """

    source: Any
    fps: float | None = None


Media = Image | Audio | Video


def take_media(messages: Sequence[Any]) -> tuple[Sequence[Any], list[Media]]:
    """Messages with placeholders instead of pictures and sounds, and these in the order of their places.

    Messages with neither are returned as they are. Anything malformed is left for `plain_messages` to report.

    Raises:
        PromptError: a part of one of the types that holds no picture or sound.
    """
    found: list[Media] = []
    made = []
    for number, message in enumerate(messages, 1):
        if not media_in(message):
            made.append(message)
            continue
        content = []
        for part in message["content"]:
            if is_medium(part):
                found.append(_medium(part, f"message {number}"))
                content.append(dict(PLACEHOLDERS[isinstance(found[-1], Audio)]))
            else:
                content.append(part)
        made.append({**message, "content": content})
    return (made, found) if found else (messages, [])


def media_in(message: Any) -> list[Any]:
    """The parts of a message's content that are pictures or sounds, or should be."""
    content = message.get("content") if isinstance(message, Mapping) else None
    return [part for part in content if is_medium(part)] if isinstance(content, list | tuple) else []


def picture_of_url(url: object, detail: object, place: str) -> Image:
    """The picture of a `data:` URI; no other address is opened.

    Args:
        url: `data:image/...;base64,...`.
        detail: one of DETAILS, or None.
        place: what an error calls it.

    Raises:
        PromptError: another address, invalid base64, more than MAX_BYTES, or an unknown detail.
    """
    if detail is not None and not (isinstance(detail, str) and detail in DETAILS):
        raise PromptError(f"{place} has a picture with the detail {shown(detail, 60)}: use one of {', '.join(DETAILS)}")
    if not isinstance(url, str) or not url.startswith("data:"):
        raise PromptError(f"{place} has a picture that is not a data: URI, and no address is opened: send its bytes")
    comma = url.find(",")
    if not url[: max(comma, 0)].endswith(";base64"):
        raise PromptError(f"{place} has a picture whose data: URI is not base64: data:image/png;base64,...")
    content = bytes_of_base64(url, f"{place} has a picture", comma + 1)
    return Image(content, None if detail is None else DETAILS[detail])


def bytes_of_base64(data: object, subject: str, start: int = 0) -> bytes:
    """The file that a request holds as base64, in lines or in one, with or without the padding at its end.

    Ollama takes line breaks, which `base64 FILE` writes, and llama.cpp takes a missing padding. Spaces are refused:
    they come of a `+` in a form. It is decoded in pieces, between which other threads run: 48 MB take 170 ms.

    Args:
        data: the text.
        subject: how an error begins.
        start: where the base64 begins in the text.

    Raises:
        PromptError: it is no base64, or more than MAX_BYTES.
    """
    if not isinstance(data, str):
        raise PromptError(f"{subject} whose base64 is not a string")
    line_breaks = sum(data.count(each, start) for each in LINE_BREAKS)
    if len(data) - start - line_breaks > 4 * (MAX_BYTES // 3 + 1):
        raise PromptError(f"{subject} of more than {MAX_BYTES >> 20} MB")
    end = data.find("=", start)
    end = len(data) if end < 0 else end
    padding = _joined(data[end:])
    decoded, left = [], ""
    try:
        if len(padding) > 2:
            raise ValueError("padding before its end")
        for begin in range(start, end, PIECE):
            piece = left + _joined(data[begin : min(begin + PIECE, end)])
            whole = len(piece) // 4 * 4
            decoded.append(base64.b64decode(piece[:whole], validate=True))
            left = piece[whole:]
        decoded.append(base64.b64decode(left + (padding or "=" * (-len(left) % 4)), validate=True))
    except (binascii.Error, ValueError) as error:
        raise PromptError(f"{subject} whose base64 is damaged ({error})") from error
    return b"".join(decoded)


def _joined(lines: str) -> str:
    """A text without its line breaks."""
    for each in LINE_BREAKS:
        lines = lines.replace(each, "")
    return lines


def is_medium(part: Any) -> bool:
    """Whether a part of a message's content is a picture, a sound or a video, or should be."""
    return isinstance(part, Media) or (_type(part) in _READERS)


def file_content(source: str | PathLike[str] | bytes | bytearray | memoryview, name: str, most: int) -> bytes:
    """The bytes of a file, given by its path or as they are; at most `most` of them.

    Raises:
        PromptError: the file cannot be read, or is larger; the message begins with `name`.
    """
    if isinstance(source, str | PathLike):
        path = Path(source)
        try:
            with path.open("rb") as file:
                source = file.read(most + 1)
        except OSError as error:
            raise PromptError(f"{name} cannot be read: {unreadable(path, error.strerror)}") from error
        except ValueError as error:  # a NUL in the path
            raise PromptError(f"{name} cannot be read: {reason(error)}") from error
    content = bytes(source)
    if len(content) > most:
        raise PromptError(f"{name} has more than {most >> 20} MB")
    return content


def unreadable(path: Path, why: str | None) -> str:
    """A path and why it cannot be read; the path may have been an address, whose slashes `Path` has joined."""
    is_address = path.parts[:1] in {("http:",), ("https:",)}
    return f"{path}: {why}{' (no address is opened: download the file)' if is_address else ''}"


def _type(part: Any) -> str | None:
    kind = part.get("type") if isinstance(part, Mapping) else None
    return kind if isinstance(kind, str) else None


def _medium(part: Any, place: str) -> Media:
    return part if isinstance(part, Media) else _READERS[part["type"]](part, place)


def _image(part: Mapping[str, Any], place: str) -> Image:
    source = part.get("image")
    if source is None:
        raise PromptError(f"{place} has a part of the type image without a field 'image'")
    return source if isinstance(source, Image) else Image(source)


def _image_url(part: Mapping[str, Any], place: str) -> Image:
    address = part.get("image_url")
    if not isinstance(address, Mapping):
        address = {"url": address}
    return picture_of_url(address.get("url"), address.get("detail"), place)


def _audio(part: Mapping[str, Any], place: str) -> Audio:
    source = part.get("audio")
    if source is None:
        raise PromptError(f"{place} has a part of the type audio without a field 'audio'")
    return source if isinstance(source, Audio) else Audio(source, part.get("rate"))


def _input_audio(part: Mapping[str, Any], place: str) -> Audio:
    # Its `format` is not needed: the file itself says what it is.
    given = part.get("input_audio")
    data = given.get("data") if isinstance(given, Mapping) else None
    return Audio(bytes_of_base64(data, f"{place} has a sound"))


def _video(part: Mapping[str, Any], place: str) -> Video:
    source = part.get("video")
    if source is None:
        raise PromptError(f"{place} has a part of the type video without a field 'video'")
    return source if isinstance(source, Video) else Video(source, part.get("fps"))


_READERS: dict[object, Callable[[Mapping[str, Any], str], Media]] = {
    "image": _image,
    "image_url": _image_url,
    "audio": _audio,
    "input_audio": _input_audio,
    "video": _video,
}
"""The content parts that hold a picture or a sound, by type."""
