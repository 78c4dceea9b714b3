"""Escapes control tokens in untrusted text: marked before a template is rendered, and encoded as plain characters.

Untrusted are the messages of users and tools, the names and arguments of calls (a model repeats text that it read), the
declarations of tools (they come from servers) and all other variables that an application passes to the template. A
system message is the application's own. Text of the model keeps its control tokens, because templates look for them to
drop old thoughts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any

from ondevice.text.tokenizer import Tokenizer

OPENING, CLOSING = "\ue000", "\ue001"
"""Private-use characters around a control token in untrusted text, while the template is rendered."""

UNTRUSTED = ("user", "tool")
"""Roles whose messages neither the application nor the model writes."""


class UntrustedText:
    """Marks control tokens in untrusted text, and encodes the text that a template makes of it.

    The beginning of a control token at the end of a text is marked too: the template may append the rest of it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        specials = tokenizer.special_texts
        written = "|".join(map(re.escape, specials)) or "(?!)"
        begun = {text[:length] for text in specials for length in range(1, len(text))}
        beginnings = "|".join(map(re.escape, sorted(begun, key=len, reverse=True))) or "(?!)"
        self._control = re.compile(rf"(?P<whole>{written})|(?:{beginnings})(?=\s*\Z)")
        # One group: every second piece is a marked control token, or None where the template separated its marks.
        self._marked = re.compile(f"{OPENING}({written}){CLOSING}|[{OPENING}{CLOSING}]")

    def marked(
        self, messages: list[dict[str, Any]], variables: dict[str, Any]
    ) -> tuple[list[dict[str, Any]], dict[str, Any]] | None:
        """Messages and variables with marks, for the template; None if there is nothing to mark."""
        texts = chain(_texts(variables), *(_texts(_untrusted(message)) for message in messages))
        if not any(map(self._control.search, texts)):
            return None
        return [{**message, **self._mark(_untrusted(message))} for message in messages], self._mark(variables)

    def encode(self, text: str) -> list[int]:
        """Token ids of the text that a template made of marked messages."""
        ids: list[int] = []
        for position, piece in enumerate(self._marked.split(text)):
            if piece:
                ids += self._tokenizer.encode(piece, add_special_tokens=False, parse_special=position % 2 == 0)
        return ids

    def _mark(self, value: Any) -> Any:
        return _each(value, self._mark_text)

    def _mark_text(self, text: str) -> str:
        text = text.replace(OPENING, "").replace(CLOSING, "")
        return self._control.sub(lambda found: (OPENING if found["whole"] else "") + found[0] + CLOSING, text)


def _untrusted(message: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a message that are untrusted."""
    role = message["role"]
    if role in UNTRUSTED:
        return {name: value for name, value in message.items() if name != "role"}
    if role == "assistant":
        return {name: value for name, value in message.items() if name not in ("role", "content")}
    return {}


def _texts(value: Any) -> Iterator[str]:
    """All strings in a value, including keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def _each(value: Any, change: Callable[[str], str]) -> Any:
    """The value with every string in it changed, including keys."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_each(key, change): _each(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [_each(item, change) for item in value]
    return value
