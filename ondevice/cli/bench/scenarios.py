"""Scenarios: kinds of text with a few prompts each, which ship with the package."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ondevice.text.codec import Prompt

PROMPTS = Path(__file__).parent / "prompts"
SEPARATOR = "\n=====\n"
"""Stands between the prompts of a file."""

FILES = {
    "code completion": "completion.txt",
    "code editing": "editing.txt",
    "summary": "summary.txt",
    "question": "question.txt",
    "chat": "chat.txt",
    "translation": "translation.txt",
    "extraction": "extraction.txt",
}
RAW = frozenset({"code completion", "code editing"})
"""Scenarios whose prompts are continued as they are, as for an editor; with a chat template, the others are a user's
message."""


class Scenario(NamedTuple):
    """A kind of text, with its prompts."""

    name: str
    prompts: tuple[Prompt, ...]


def load_scenarios(limit: int | None, *, as_chat: bool) -> list[Scenario]:
    """Read all scenarios.

    Args:
        limit: number of prompts of each; None takes all.
        as_chat: whether the bundle has a chat template.
    """
    return [Scenario(name, _prompts(name, as_chat)[:limit]) for name in FILES]


def _prompts(name: str, as_chat: bool) -> tuple[Prompt, ...]:
    texts = (PROMPTS / FILES[name]).read_text("utf-8").split(SEPARATOR)
    if name in RAW:
        return tuple(text.rstrip("\n") for text in texts)
    if as_chat:
        return tuple([{"role": "user", "content": text.strip()}] for text in texts)
    return tuple(text.strip() + "\n\n" for text in texts)
