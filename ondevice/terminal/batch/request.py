"""A line of a file of prompts, as what it asks of the model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from ondevice.errors import OndeviceError, PromptError, UsageError, reason
from ondevice.options import GenerationOptions
from ondevice.terminal.batch import openai_form

OWN = ("id", "prompt", "messages")
"""Fields of a line that are no options."""

COMMAND_ONLY = (
    "drafter",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "copies",
    "logits_processors",
    "on_prefill",
)
"""Options that no line may choose: they change how fast an answer comes and never what it is, or are no JSON."""


@dataclass(frozen=True)
class Request:
    """
    line : its number in the file, from 1
    asked : identifies bundle, prompt and options, so that an answer is never taken for that to another question
    id : what the line calls itself, None where it does not
    fault : why it cannot be answered
    """

    line: int
    asked: str
    id: str | int | None = None
    prompt: Any = ""
    options: dict[str, Any] = field(default_factory=dict)
    is_openai: bool = False
    fault: str | None = None


class RequestFile:
    """Reads requests line by line, so that a file may be larger than memory."""

    def __init__(self, path: Path, common: Mapping[str, Any], about: str, *, chat: bool = False) -> None:
        """
        Args:
            common: options of every line that does not say otherwise.
            about: identifies the bundle, and how it is run as far as that changes answers.
            chat: a plain text is a user's message.

        Raises:
            PromptError: the file cannot be read.
        """
        self.path = path
        self._common = dict(common)
        self._about = about
        self._chat = chat
        with self._open() as file:
            self.count = sum(1 for line in file if line.strip())
        """Lines that ask something."""

    def __iter__(self) -> Iterator[Request]:
        lines_of: dict[str | int, int] = {}
        with self._open() as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield self._request(number, line, lines_of)

    def _open(self) -> BinaryIO:
        try:
            return self.path.open("rb")
        except OSError as error:
            raise PromptError(f"cannot read {self.path}: {error.strerror}") from error

    def _request(self, number: int, content: bytes, lines_of: dict[str | int, int]) -> Request:
        name: str | int | None = None
        is_openai = False
        try:
            fields = _object(content)
            is_openai = openai_form.fits(fields)
            name = _name(fields.get("custom_id" if is_openai else "id"))
            if name is not None and lines_of.setdefault(name, number) != number:
                raise UsageError(f"line {lines_of[name]} has the id {name!r} already")
            prompt, options = openai_form.read(fields) if is_openai else self._own_form(fields)
            chosen = {**self._common, **options}
            GenerationOptions.of(chosen)
        except OndeviceError as error:
            asked = self._identify(content.decode("utf-8", "replace"), self._common)
            return Request(number, asked, name, is_openai=is_openai, fault=str(error))
        return Request(number, self._identify(prompt, chosen), name, prompt, chosen, is_openai)

    def _own_form(self, fields: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Prompt and options of `{"prompt": ..., ...}`, or `messages` in its place."""
        given = [name for name in ("prompt", "messages") if name in fields]
        if len(given) != 1:
            raise PromptError("a line needs one of prompt and messages")
        options = {name: value for name, value in fields.items() if name not in OWN}
        for name in options:
            if name in COMMAND_ONLY:
                raise UsageError(f"{name} cannot be chosen by a line")
        if isinstance(bias := options.get("logit_bias"), dict):
            options["logit_bias"] = openai_form.token_biases(bias)
        prompt = fields[given[0]]
        if self._chat and isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        return prompt, options

    def _identify(self, prompt: Any, options: Mapping[str, Any]) -> str:
        told = {name: value for name, value in options.items() if name not in COMMAND_ONLY}
        parts = json.dumps([self._about, prompt, told], sort_keys=True)
        return hashlib.sha256(parts.encode()).hexdigest()[:16]


def _object(content: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise PromptError(f"not valid JSON: {reason(error)}") from error
    if not isinstance(fields, dict):
        raise PromptError('a line is a JSON object, {"prompt": ...}')
    return fields


def _name(value: object) -> str | int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, str | int)):
        raise UsageError(f"an id is a string or a whole number, not {value!r:.99}")
    return value
