"""Lines of the prompts file as requests: `{"prompt": ...}` with options, or OpenAI's batch form.

OpenAI's form, `{"custom_id", "method", "url", "body"}`, is also that of vLLM's `run-batch`:
https://platform.openai.com/docs/guides/batch
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from ondevice.cli.prompts import read_file
from ondevice.errors import OndeviceError, PromptError, UsageError, reason
from ondevice.machine import expanded
from ondevice.options import GenerationOptions

FILE_KINDS = ("image", "audio", "video")
"""Types of content parts whose field of the same name may be a path, in the own form."""

PROMPT_FIELDS = ("id", "prompt", "messages")
"""Fields of a line of the own form that are not options."""

COMMAND_ONLY = (
    "drafter",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "copies",
    "logits_processors",
    "on_prefill",
)
"""Options that a line cannot set: they change only the speed, or are not JSON."""

URLS = {"/v1/chat/completions": "messages", "/v1/completions": "prompt"}
"""Endpoints of OpenAI's form, with the field of the body that has the prompt."""

SAME_OPTIONS = (
    "temperature",
    "top_p",
    "seed",
    "stop",
    "presence_penalty",
    "frequency_penalty",
    "tools",
    "parallel_tool_calls",
    "response_format",
)
"""Fields of a body that are options of the same name."""

LENGTHS = ("max_completion_tokens", "max_tokens")
"""Fields of a body with the length of the reply; the first that is given counts."""

WITHOUT_EFFECT: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "stream": (False,),
    "tool_choice": ("auto",),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False,),
}
"""Fields of a body that are accepted only with the values that this command has anyway."""

IGNORED = ("model", "user", "metadata", "store", "service_tier", "safety_identifier")
"""Fields of a body that are accepted with any value and have no effect."""


@dataclass(frozen=True)
class Request:
    """A line of the prompts file.

    line : its number, from 1
    fingerprint : hash of bundle, prompt and options, written as `asked`; an answer with another one is not reused
    id : `id` or `custom_id` of the line, None without one
    prompt, options : arguments of `Model.stream`
    is_openai : whether it has OpenAI's form, which its answer then has too
    fault : why it cannot be answered, None if it can
    """

    line: int
    fingerprint: str
    id: str | int | None = None
    prompt: Any = ""
    options: dict[str, Any] = field(default_factory=dict)
    is_openai: bool = False
    fault: str | None = None


class RequestFile:
    """The prompts file, parsed line by line, so that it may be larger than memory."""

    def __init__(self, path: Path, common: Mapping[str, Any], model_identity: str, *, chat: bool = False) -> None:
        """
        Args:
            common: options of every line that does not set them itself.
            model_identity: identifies the bundle and those options of loading it that can change replies.
            chat: treat a prompt that is a text as a user's message.

        Raises:
            PromptError: the file cannot be read, or is a pipe or a device.
        """
        self.path = path
        self._common = dict(common)
        self._model_identity = model_identity
        self._chat = chat
        with self._open() as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise PromptError(f"{path} is not a regular file, but is read twice: write the prompts to a file first")
            self.count = sum(1 for line in file if line.strip())
            """Number of lines that are not blank."""

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
        """Parse a line. A mistake in it becomes the request's `fault`.

        Args:
            lines_of: line numbers by id, for finding duplicates; extended here.
        """
        name: str | int | None = None
        is_openai = False
        try:
            fields = _parse_object(content)
            is_openai = "body" in fields and "prompt" not in fields
            name = _parse_id(fields.get("custom_id" if is_openai else "id"))
            if name is not None and lines_of.setdefault(name, number) != number:
                raise UsageError(f"line {lines_of[name]} has the id {name!r} already")
            prompt, options = _parse_openai_form(fields) if is_openai else self._parse_own_form(fields)
            chosen = {**self._common, **options}
            GenerationOptions.of(chosen)
        except OndeviceError as error:
            fingerprint = self._fingerprint(content.decode("utf-8", "replace"), self._common)
            return Request(number, fingerprint, name, is_openai=is_openai, fault=str(error))
        return Request(number, self._fingerprint(prompt, chosen), name, prompt, chosen, is_openai)

    def _parse_own_form(self, fields: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Prompt and options of `{"prompt": ..., ...}`, or `messages` in its place."""
        given = [name for name in ("prompt", "messages") if name in fields]
        if len(given) != 1:
            raise PromptError("a line needs one of prompt and messages")
        options = {name: value for name, value in fields.items() if name not in PROMPT_FIELDS}
        for name in options:
            if name in COMMAND_ONLY:
                raise UsageError(f"{name} cannot be set by a line, only by the command")
        if isinstance(bias := options.get("logit_bias"), dict):
            options["logit_bias"] = _parse_token_biases(bias)
        prompt = fields[given[0]]
        if self._chat and isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        return _with_files(prompt), options

    def _fingerprint(self, prompt: Any, options: Mapping[str, Any]) -> str:
        """16 hexadecimal digits of the sha256 of everything that determines the answer."""
        relevant = {name: value for name, value in options.items() if name not in COMMAND_ONLY}
        parts = json.dumps([self._model_identity, prompt, relevant], sort_keys=True, default=_digest)
        return hashlib.sha256(parts.encode()).hexdigest()[:16]


def _with_files(prompt: Any) -> Any:
    """The prompt with the bytes of the pictures and sounds that its messages name by paths.

    They are part of the fingerprint, and go to other machines with the request. Paths are relative to the working
    directory. Anything malformed is left for the model to report.

    Raises:
        PromptError: a file that cannot be read.
    """
    for part in _parts(prompt):
        kind = part.get("type")
        if kind not in FILE_KINDS:
            continue
        if isinstance(part.get(kind), str):
            part[kind] = read_file(expanded(part[kind]))
        elif isinstance(part.get(kind), list):  # frames of a video
            part[kind] = [read_file(expanded(frame)) if isinstance(frame, str) else frame for frame in part[kind]]
    return prompt


def _parts(prompt: Any) -> Iterator[dict[str, Any]]:
    """The content parts of messages."""
    for message in prompt if isinstance(prompt, list) else []:
        content = message.get("content") if isinstance(message, dict) else None
        yield from (part for part in content if isinstance(part, dict)) if isinstance(content, list) else ()


def _digest(value: object) -> str:
    """A file's part of a fingerprint, in place of its bytes."""
    assert isinstance(value, bytes)
    return hashlib.sha256(value).hexdigest()


def _parse_openai_form(fields: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Prompt and options of `{"custom_id", "method", "url", "body"}`.

    Raises:
        PromptError: another endpoint, no prompt, or one that names files, which OpenAI's form has not.
        UsageError: an option that is not supported.
    """
    body = fields["body"]
    if not isinstance(body, Mapping):
        raise PromptError("body must be a JSON object")
    url = fields.get("url", "/v1/chat/completions" if "messages" in body else "/v1/completions")
    if not isinstance(url, str) or url not in URLS:
        raise PromptError(f"url must be one of {', '.join(URLS)}, not {url!r:.99}")
    if body.get(URLS[url]) is None:
        raise PromptError(f"body needs {URLS[url]}")
    if any(part.get("type") in FILE_KINDS for part in _parts(body[URLS[url]])):
        raise PromptError("body.messages: send pictures as image_url, with data: URIs, and sounds as input_audio")
    options: dict[str, Any] = {}
    for name, value in body.items():
        if value is None or name in (*IGNORED, *LENGTHS, URLS[url]):
            continue
        if name in SAME_OPTIONS:
            options[name] = value
        elif name == "logit_bias":
            options[name] = _parse_token_biases(value)
        elif value not in WITHOUT_EFFECT.get(name, ()):
            raise UsageError(f"body.{name} cannot be {value!r:.99} here")
    lengths = [body[name] for name in LENGTHS if body.get(name) is not None]
    if lengths:
        options["max_new_tokens"] = lengths[0]
    return body[URLS[url]], options


def _parse_token_biases(value: object) -> dict[int, Any]:
    """`logit_bias` with token ids as numbers, which are strings in JSON."""
    try:
        return {int(token): bias for token, bias in dict(value).items()}  # type: ignore[call-overload]
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError(f"logit_bias must map token ids to numbers, not {value!r:.99}") from error


def _parse_object(content: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise PromptError(f"not valid JSON: {reason(error)}") from error
    if not isinstance(fields, dict):
        raise PromptError('a line must be a JSON object, {"prompt": ...}')
    return fields


def _parse_id(value: object) -> str | int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, str | int)):
        raise UsageError(f"an id must be a string or a whole number, not {value!r:.99}")
    return value
