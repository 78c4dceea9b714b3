"""Kinds of text that people let a model write, each with a few prompts that ship with the package."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ondevice.text.prompt import Prompt

PROMPTS = Path(__file__).parent / "prompts"
SEPARATOR = "\n=====\n"

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
"""Continued as they are, as an editor asks for it; the others are a user's message where there is a chat template."""


@dataclass(frozen=True)
class Scenario:
    name: str
    prompts: tuple[Prompt, ...]


def load_scenarios(limit: int | None, *, as_chat: bool) -> list[Scenario]:
    """All scenarios.

    Args:
        limit: only the first so many prompts of each.
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
