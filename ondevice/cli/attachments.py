"""Files of pictures and sounds: what goes with a message of `ondevice chat`, and lines that name nothing else."""

from __future__ import annotations

import base64
import shlex
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from ondevice.errors import PromptError, UsageError
from ondevice.machine import expanded
from ondevice.text.media_parts import MOST_BYTES

KINDS = {
    **dict.fromkeys((".png", ".jpg", ".jpeg", ".webp", ".gif"), "image"),
    **dict.fromkeys((".wav", ".mp3", ".flac", ".ogg"), "audio"),
}
"""The kind of a dropped file, by its suffix."""


class Attachment(NamedTuple):
    """A picture or a sound that goes with the next message.

    name : of its file
    part : content part of OpenAI's form, with the file's bytes
    tokens : of the prompt that it takes
    """

    name: str
    part: dict[str, Any]
    tokens: int


def content_part(kind: str, path: Path) -> dict[str, Any]:
    """The content part of a file, in OpenAI's form.

    Args:
        kind: `image` or `audio`.
        path: the file.

    Raises:
        PromptError: it cannot be read, or is too large.
    """
    data, suffix = base64.b64encode(read_file(path)).decode(), path.suffix.lower().removeprefix(".")
    if kind == "audio":
        return {"type": "input_audio", "input_audio": {"data": data, "format": suffix or "wav"}}
    media_type = "jpeg" if suffix == "jpg" else suffix or "png"
    return {"type": "image_url", "image_url": {"url": f"data:image/{media_type};base64,{data}"}}


def read_file(path: Path) -> bytes:
    """The bytes of a picture or a sound.

    Raises:
        PromptError: the file cannot be read, or is too large; a device or a pipe, which may never end.
    """
    try:
        kind, content = path.stat().st_mode, b""
        ends = stat.S_ISREG(kind) or stat.S_ISDIR(kind)  # opening a directory fails
        if ends:
            with path.open("rb") as file:
                content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise PromptError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:  # a NUL in the path
        raise PromptError(f"cannot read {str(path)!r}: {error}") from error
    if not ends:
        raise PromptError(f"cannot read {path}: it is a device or a pipe, not a file")
    if len(content) > MOST_BYTES:
        raise PromptError(f"{path} has more than {MOST_BYTES >> 20} MB")
    return content


def dropped_files(line: str) -> list[Path]:
    """The pictures and sounds that a line names, and nothing else: as terminals type files that are dropped on them."""
    found = named_files(line)
    return found if all(path.suffix.lower() in KINDS for path in found) else []


def named_files(text: str) -> list[Path]:
    """Existing files that a text consists of; none if it has other words.

    Terminals quote spaces, escape them, leave them as they are, or write `file:` URIs.
    """
    try:
        words = shlex.split(text)
    except ValueError:  # an apostrophe
        words = []
    for candidates in ([text], [text.strip("\"'")], words):
        if found := _existing(candidates):
            return found
    return []


def _existing(names: Sequence[str]) -> list[Path]:
    """The files of these names; none if one of them does not exist."""
    found = []
    for name in names:
        try:
            address = urlsplit(name)
            path = Path(unquote(address.path)) if address.scheme == "file" else expanded(name)
            if not path.is_file():
                return []
        except (OSError, ValueError, UsageError):  # too long for a name, a NUL, brackets, no such user
            return []
        found.append(path)
    return found
