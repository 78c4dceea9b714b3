"""Answering one request, the JSON line that is written for it, and the file of these lines.

A line has no times and nothing about drafts, so that two runs write the same answer to a prompt.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from ondevice.cli.batch.requests import Request
from ondevice.cli.terminal.reply_view import content
from ondevice.errors import OndeviceError, UsageError
from ondevice.files import lock
from ondevice.generation import Reply, Step

if TYPE_CHECKING:
    from ondevice.generation import Generation
    from ondevice.model import Model

ANSWER_START = b'{"line": '
"""The first bytes of every answer. A file whose lines begin otherwise was not written by this command."""


def answer(
    model: Model,
    request: Request,
    on_start: Callable[[Generation], None] = lambda generation: None,
    on_step: Callable[[Step], None] = lambda step: None,
) -> Answer | None:
    """Run a request on a model.

    Args:
        on_start: called with the generation before it computes anything.
        on_step: called with every step.

    Returns:
        The answer, which may be an error; None if the generation was cancelled.
    """
    if request.fault is not None:
        return refusal(request, request.fault)
    steps: list[Step] = []
    try:
        with model.stream(request.prompt, **request.options) as generation:
            on_start(generation)
            for step in generation:
                on_step(step)
                steps.append(step)
        reply = Reply.of(steps, generation.stats)
    except OndeviceError as error:
        return refusal(request, str(error))
    return None if reply.finish_reason == "cancelled" else _with_reply(request, reply, model.manifest.name)


class Answer(NamedTuple):
    """A line of the answers file.

    fields : its JSON object; `line` and `asked` identify the request, the rest is in the request's form
    new_tokens : number of tokens of the reply
    """

    fields: dict[str, Any]
    new_tokens: int = 0


def refusal(request: Request, message: str) -> Answer:
    """The answer to a request that cannot be answered."""
    if request.is_openai:
        error = {"code": "invalid_request", "message": message}
        return Answer({**_identity(request), "custom_id": request.id, "response": None, "error": error})
    return Answer({**_identity(request), "id": request.id, "error": message})


def _with_reply(request: Request, reply: Reply, model: str) -> Answer:
    """The answer with a reply. Ids of tool calls, which are random elsewhere, are numbered: two runs are equal."""
    calls = tuple(replace(call, id=f"call_{request.line}_{number}") for number, call in enumerate(reply.tool_calls, 1))
    reply = replace(reply, tool_calls=calls)
    if request.is_openai:
        rest = _openai_response(request, reply, model)
    else:
        rest = {"id": request.id, **content(reply), "usage": _usage(reply)}
    return Answer({**_identity(request), **rest}, reply.stats.new_tokens)


def _identity(request: Request) -> dict[str, Any]:
    return {"line": request.line, "asked": request.fingerprint}


def _openai_response(request: Request, reply: Reply, model: str) -> dict[str, Any]:
    """A line of OpenAI's batch output, with the time 0, so that two runs are equal."""
    is_chat = isinstance(request.prompt, list) and isinstance(request.prompt[0], dict)
    text: dict[str, Any] = {"message": reply.message} if is_chat else {"text": reply.text}
    finish = "length" if reply.finish_reason == "context" else reply.finish_reason
    body = {
        "id": f"batch-{request.line}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": 0,
        "model": model,
        "choices": [{"index": 0, **text, "logprobs": None, "finish_reason": finish}],
        "usage": _usage(reply),
    }
    return {"custom_id": request.id, "response": {"status_code": 200, "body": body}, "error": None}


def _usage(reply: Reply) -> dict[str, int]:
    """Numbers of tokens. Cached prompt tokens are not counted apart: their number depends on what ran before."""
    read, new = reply.stats.prompt_tokens, reply.stats.new_tokens
    return {"prompt_tokens": read, "completion_tokens": new, "total_tokens": read + new}


class AnswerFile:
    """The answers file, one JSON object per line, in the order of completion.

    Each answer is written at once. If a kill cuts off the last line, it is removed when the file is opened again and
    its request is answered again, so that no answer is lost or written twice. A device or a pipe is only written: it
    has no answers to continue from.
    """

    def __init__(self, path: Path) -> None:
        """Open the file and read the answers that it has.

        Raises:
            OSError: it cannot be written.
            UsageError: another process writes to it, or it was not written by this command.
        """
        self.path = path
        self.errors = 0
        """Number of answers that are errors."""
        self._fingerprints: dict[int, str] = {}
        """By line: the fingerprint of the request that was answered."""
        keeps = path.is_file() or not path.exists()
        self._file: BinaryIO = path.open("a+b" if keeps else "ab", buffering=0)
        try:
            if keeps:
                self._lock()
                self._read_answers()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._file.close()

    def __len__(self) -> int:
        """Number of answers, errors included."""
        return len(self._fingerprints)

    def has(self, request: Request) -> bool:
        """Whether the request of a line is answered.

        Raises:
            UsageError: the line is answered, but with another prompt, options or bundle.
        """
        known = self._fingerprints.get(request.line)
        if known not in (None, request.fingerprint):
            raise UsageError(
                f"{self.path} answers another question than line {request.line} asks: the prompts, the options or the "
                "bundle changed. Name another file with --out"
            )
        return known is not None

    def write(self, answer: Answer) -> None:
        """Append an answer."""
        line = json.dumps(answer.fields, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
        try:
            while line:  # one system call, unless the disk is full
                line = line[self._file.write(line) :]
        except OSError as error:
            error.filename = str(self.path)
            raise
        self._count(answer.fields)

    def _count(self, fields: dict[str, Any]) -> None:
        self._fingerprints[fields["line"]] = fields["asked"]
        self.errors += fields.get("error") is not None

    def _lock(self) -> None:
        """Keep other processes from appending while this one lives, where there are locks."""
        if lock(self._file.fileno()) is False:
            raise UsageError(f"another process writes to {self.path}: wait until it ends")

    def _read_answers(self) -> None:
        """Read the complete lines, and remove an incomplete one, or zero bytes after a power cut, at the end."""
        self._file.seek(0)
        complete = 0
        with os.fdopen(os.dup(self._file.fileno()), "rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.endswith(b"\n"):
                    if line[: len(ANSWER_START)] != ANSWER_START[: len(line)] and line.strip(b"\0"):
                        raise self._foreign_line(number)
                    break
                complete += len(line)
                self._read_answer(number, line)
        self._file.truncate(complete)

    def _read_answer(self, number: int, content: bytes) -> None:
        known = len(self)
        try:
            fields: Any = json.loads(content)
            if not isinstance(fields["line"], int) or not isinstance(fields["asked"], str):
                raise self._foreign_line(number)
            self._count(fields)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
            raise self._foreign_line(number) from problem
        if len(self) == known:
            raise UsageError(f"{self.path} line {number} answers line {fields['line']} again: remove one of the two")

    def _foreign_line(self, number: int) -> UsageError:
        return UsageError(
            f"{self.path} line {number} was not written by `ondevice batch`: name another file with --out"
        )
