"""Pictures in messages: content parts that hold one are taken out before a chat template is rendered.

A picture is a part of a message's content: an `Image`, `{"type": "image", "image": ...}`, or OpenAI's
`{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}`. The template sees `{"type": "image"}`.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ondevice.errors import PromptError

PLACEHOLDER = {"type": "image"}
"""What a chat template sees of a picture."""

MOST_BYTES = 1 << 25
"""Largest file of a picture, in bytes."""

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


def take_pictures(messages: Sequence[Any]) -> tuple[Sequence[Any], list[Image]]:
    """Messages with placeholders instead of pictures, and the pictures in the order of their places.

    Messages without pictures are returned as they are. Anything malformed is left for `plain_messages` to report.

    Raises:
        PromptError: a part of the type image or image_url that holds no picture.
    """
    pictures: list[Image] = []
    made = []
    for number, message in enumerate(messages, 1):
        if parts := pictures_in(message):
            pictures += [_picture(part, f"message {number}") for part in parts]
            content = [dict(PLACEHOLDER) if _is_picture(part) else part for part in message["content"]]
            made.append({**message, "content": content})
        else:
            made.append(message)
    return (made, pictures) if pictures else (messages, [])


def pictures_in(message: Any) -> list[Any]:
    """The parts of a message's content that are pictures, or should be."""
    content = message.get("content") if isinstance(message, Mapping) else None
    return [part for part in content if _is_picture(part)] if isinstance(content, list | tuple) else []


def picture_of_url(url: object, detail: object, place: str) -> Image:
    """The picture of a `data:` URI; no other address is opened.

    Args:
        url: `data:image/...;base64,...`.
        detail: one of DETAILS, or None.
        place: what an error calls it.

    Raises:
        PromptError: another address, invalid base64, more than MOST_BYTES, or an unknown detail.
    """
    if detail is not None and not (isinstance(detail, str) and detail in DETAILS):
        raise PromptError(f"{place} has a picture with the detail {detail!r:.60}: use one of {', '.join(DETAILS)}")
    if not isinstance(url, str) or not url.startswith("data:"):
        raise PromptError(f"{place} has a picture that is no data: URI, and no address is opened: send its bytes")
    head, comma, data = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise PromptError(f"{place} has a picture whose data: URI is not base64: data:image/png;base64,...")
    if len(data) > 4 * (MOST_BYTES // 3 + 1):
        raise PromptError(f"{place} has a picture of more than {MOST_BYTES >> 20} MB")
    try:
        source = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise PromptError(f"{place} has a picture whose base64 is damaged ({error})") from error
    return Image(source, None if detail is None else DETAILS[detail])


def _is_picture(part: Any) -> bool:
    return isinstance(part, Image) or (isinstance(part, Mapping) and part.get("type") in ("image", "image_url"))


def _picture(part: Any, place: str) -> Image:
    if isinstance(part, Image):
        return part
    if part["type"] == "image":
        source = part.get("image")
        if source is None:
            raise PromptError(f"{place} has a part of the type image without a field 'image'")
        return source if isinstance(source, Image) else Image(source)
    address = part.get("image_url")
    if not isinstance(address, Mapping):
        address = {"url": address}
    return picture_of_url(address.get("url"), address.get("detail"), place)
