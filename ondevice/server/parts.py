"""Content blocks of Anthropic's and the Responses API, as parts of a chat completion's message.

Pictures come with a request, as base64. No address is opened, and no file of this machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ondevice.errors import PromptError
from ondevice.server.requests import Fields
from ondevice.text.media_parts import picture_of_url

Part = dict[str, Any]

MEDIA_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")
"""Anthropic's names of formats. A picture is read as what its bytes are."""


def text_part(block: Fields) -> Part:
    """The part of a block with a `text`."""
    return {"type": "text", "text": block.text("text") or ""}


def anthropic_picture(block: Fields) -> Part:
    """The part of a block `image`.

    Raises:
        RequestError: it holds no picture in base64.
    """
    block.required("source")
    source = block.inner("source")
    if source.kind(("base64", "url", "file")) != "base64":
        raise source.unsupported("type", "no address is opened, and no file is stored: send the picture as base64")
    media_type = source.choice("media_type", MEDIA_TYPES) or MEDIA_TYPES[0]
    source.required("data")
    return _picture(source, "data", f"data:{media_type};base64,{source.text('data')}")


def responses_picture(block: Fields) -> Part:
    """The part of a block `input_image`.

    Raises:
        RequestError: it holds no picture in a `data:` URI.
    """
    if "file_id" in block:
        raise block.unsupported("file_id", "no file is stored: send the picture as image_url, with a data: URI")
    block.required("image_url")
    return _picture(block, "image_url", block.text("image_url"), block.text("detail"))


def content_of(parts: Iterable[Part], separator: str = "") -> str | list[Part]:
    """The content of a message: texts that follow each other are joined, and a message of text only is a string."""
    made: list[Part] = []
    for part in parts:
        if made and made[-1]["type"] == part["type"] == "text":
            made[-1] = {"type": "text", "text": f"{made[-1]['text']}{separator}{part['text']}"}
        else:
            made.append(part)
    if not made:
        return ""
    return str(made[0]["text"]) if [part["type"] for part in made] == ["text"] else made


def after_results(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with the pictures of tool results at the beginning of the user's message that follows.

    Gemma's templates write only the text of a result. Where no user's message follows, the pictures are one.
    """
    made: list[dict[str, Any]] = []
    shown: list[Part] = []
    for message in messages:
        role, content = message["role"], message["content"]
        if role == "tool" and not isinstance(content, str):
            shown += [part for part in content if part["type"] != "text"]
            texts = content_of((part for part in content if part["type"] == "text"), "\n")
            made.append({**message, "content": texts})
            continue
        if shown and role == "user":
            said = [{"type": "text", "text": content}] if isinstance(content, str) else content
            made.append({**message, "content": [*shown, *said]})
            shown = []
            continue
        if shown and role != "tool":
            made.append({"role": "user", "content": shown})
            shown = []
        made.append(message)
    return [*made, {"role": "user", "content": shown}] if shown else made


def _picture(fields: Fields, name: str, url: str | None, detail: str | None = None) -> Part:
    try:
        return {"type": "image", "image": picture_of_url(url, detail, "the request")}
    except PromptError as error:
        raise fields.unsupported(name, str(error)) from error
