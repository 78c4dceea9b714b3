"""Random HTTP requests to a server: changed fields of valid requests, and damaged framing.

Each must get a reply or a status of 4xx, and nothing may appear on the server's standard error.
"""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Mapping
from typing import Any, NoReturn

from tests.fuzz.mutations import HOSTILE, change_bytes, change_json
from tests.server.alone import Alone

PATIENCE_S = 120.0
"""Seconds until an answer must have come."""

FRAMING_S = 0.3
"""Seconds until the client of a damaged request, which may lack its end, disconnects."""

PICTURE = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg=="
)
FUNCTION = {"name": "f", "description": "x", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
CONVERSATION = [
    {"role": "system", "content": "x"},
    {"role": "user", "content": [{"type": "text", "text": "hello"}]},
    {"role": "assistant", "content": None, "reasoning_content": "x", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "1"},
    {"role": "user", "content": "again"},
]
SAMPLING = {"max_tokens": 2, "temperature": 0.7, "top_p": 0.9, "seed": 1, "stop": ["x"]}

VALID: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", {"messages": CONVERSATION, "tools": [TOOL], "tool_choice": "auto", **SAMPLING}),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": PICTURE}}]}],
            "max_completion_tokens": 2,
            "logprobs": True,
            "top_logprobs": 2,
            "logit_bias": {"5": 1},
            "n": 2,
            "chat_template_kwargs": {"enable_thinking": True},
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": CONVERSATION[:2],
            "max_tokens": 3,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "object", "properties": {"a": {"enum": ["x", 1]}}}},
            },
        },
    ),
    ("/v1/completions", {"prompt": "abc", "echo": True, "logprobs": 1, "n": 2, **SAMPLING}),
    ("/v1/completions", {"prompt": [[5, 6], [7]], **SAMPLING, "stream_options": {"include_usage": True}}),
    (
        "/v1/responses",
        {
            "instructions": "x",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
                {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x"}], "summary": []},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "x"},
            ],
            "tools": [{"type": "function", **FUNCTION}],
            "max_output_tokens": 2,
            "metadata": {"a": "b"},
            "reasoning": {"effort": "low"},
            "text": {"format": {"type": "text"}},
        },
    ),
    (
        "/v1/messages",
        {
            "max_tokens": 2,
            "system": [{"type": "text", "text": "x"}],
            "messages": [
                {"role": "user", "content": "x"},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "x"}]},
            ],
            "tools": [{"name": "f", "input_schema": FUNCTION["parameters"]}],
            "tool_choice": {"type": "auto"},
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "stop_sequences": ["x"],
        },
    ),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}),
    ("/tokenize", {"content": "abc", "add_special": True, "parse_special": False, "with_pieces": True}),
    ("/detokenize", {"tokens": [5, 6, 7]}),
)

PATHS = (
    "/", "/health", "/v1/models", "/v1/models/x%ff%00/y", "/props", "/metrics", "/nothing", "/../etc", "//", "/v1/\xe9",
)  # fmt: skip

FIELDS = (
    "stream", "stream_options", "n", "stop", "seed", "top_k", "min_p", "repeat_penalty", "presence_penalty",
    "drafter", "logit_bias", "logprobs", "top_logprobs", "response_format", "json_schema", "grammar", "tools",
    "tool_choice", "parallel_tool_calls", "reasoning_effort", "chat_template_kwargs", "return_progress",
    "return_rounds", "echo", "suffix", "best_of", "store", "metadata", "previous_response_id", "output_config",
    "thinking", "user", "max_tokens", "unknown",
)  # fmt: skip

VALUES: tuple[Any, ...] = (
    *HOSTILE, {"type": "regex", "regex": "[a-z]{2}"}, {"type": "regex", "regex": "("}, {"type": "json_object"},
    {"type": "choice", "choice": ["a"]}, {"type": "lark", "lark": "start: /a/"}, {"self": 1}, {"include_usage": True},
    "none", "auto", "required", {"type": "function", "function": {"name": "f"}}, [TOOL] * 3, [["5", 1]], {"5": 1e300},
    "low", "ngram", {"enable_thinking": False, "x": ["\udc80"]}, {"format": {"type": "json_schema", "schema": {}}},
    ["a"] * 70,
)  # fmt: skip

HEADERS: tuple[tuple[str, str], ...] = (
    ("Origin", "http://["), ("Origin", "null"), ("Origin", "http://localhost"), ("Origin", "\xff"), ("Host", "a:x"),
    ("Authorization", "Bearer \xe9"), ("Authorization", "Basic"), ("x-api-key", "\x80"), ("Expect", "100-continue"),
    ("Content-Encoding", "gzip"), ("Content-Type", "text/plain; charset=utf-16"), ("Upgrade", "websocket"),
    ("Connection", "upgrade"), ("Access-Control-Request-Method", "\xff"), ("Transfer-Encoding", "chunked"),
    ("Content-Length", "99999999999999999999999"), ("Content-Length", "-1"), ("Content-Length", "1_0"),
    ("A", "b" * 20_000),
)  # fmt: skip

METHODS = ("GET", "POST", "PUT", "OPTIONS", "HEAD", "DELETE", "PATCH", "FOO", "get")


class Requests:
    """Sends random requests to a server."""

    def __init__(self, served: Alone) -> None:
        self._served = served
        self._said = len(served.errors)

    def try_one(self, rng: random.Random) -> tuple[str, str, list[str]]:
        """See `Mutants.try_one`."""
        request, said, whole = _request(rng)
        answer = self._answer(request, PATIENCE_S if whole else FRAMING_S)
        faults = _faults(answer, whole)
        if errors := self._served.errors[self._said :]:
            self._said += len(errors)
            faults.append(f"standard error: {errors:.2000}")
        return "requests", said, faults

    def _answer(self, request: bytes, seconds: float) -> bytes:
        pieces: list[bytes] = []
        with socket.create_connection((self._served.host, self._served.port), timeout=seconds) as connection:
            try:
                connection.sendall(request)
                while piece := connection.recv(1 << 16):
                    pieces.append(piece)
            except (TimeoutError, ConnectionError):
                pass
        return b"".join(pieces)


def _request(rng: random.Random) -> tuple[bytes, str, bool]:
    """The bytes of a request, a description, and whether it is a whole one."""
    method, path, body, headers, said = "POST", "", b"", [("Host", "localhost")], ""
    if rng.random() < 0.03:
        method, path = rng.choice(METHODS), rng.choice(PATHS)
    else:
        path, fields = rng.choice(VALID)
        body, said = _body(fields, rng)
        if rng.random() < 0.02:
            method = rng.choice(METHODS)
    framing = rng.random()
    if framing < 0.05:
        headers.append(rng.choice(HEADERS))
    named = {name for name, _ in headers}
    if "Content-Length" not in named and "Transfer-Encoding" not in named:
        headers.append(("Content-Length", str(len(body))))
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers), "Connection: close", "", ""]
    request = "\r\n".join(lines).encode("latin-1") + body
    if 0.05 <= framing < 0.09:
        request, changed = change_bytes(request, rng)
        said = f"{said}; {changed}"
    return request, f"{method} {path} {headers[1:]!r:.100} {said} {body!r:.1000}", framing >= 0.09


def _body(fields: Mapping[str, Any], rng: random.Random) -> tuple[bytes, str]:
    changed = dict(fields)
    for _ in range(rng.choice((0, 0, 1, 2))):
        changed[rng.choice(FIELDS)] = rng.choice(VALUES)
    if rng.random() < 0.3:
        changed["stream"] = True
    text, said = change_json(json.dumps(changed), rng)
    if rng.random() < 0.1:
        body, more = change_bytes(text.encode(), rng)
        return body, f"{said}; {more}"
    return text.encode(), said


def _faults(answer: bytes, whole: bool) -> list[str]:
    if not answer:
        return ["no answer"] if whole else []
    head, _, body = answer.partition(b"\r\n\r\n")
    status = head.split(b" ", 2)[1:2]
    if not status or not status[0].isdigit() or not 100 <= int(status[0]) < 500:
        return [f"status: {answer!r:.500}"]
    if not whole:
        return []
    if b"text/event-stream" in head.lower():
        lines = _dechunked(body).decode().splitlines()
        texts = [line[6:] for line in lines if line.startswith("data: ") and line != "data: [DONE]"]
    else:
        texts = [body.decode()] if b"application/json" in head.lower() and body else []
    for text in texts:
        try:
            value = json.loads(text, parse_constant=_no_number)
        except ValueError as error:
            return [f"no JSON ({error}): {answer!r:.500}"]
        failure = value.get("error") or (value.get("response") or {}).get("error")
        if failure and (failure.get("code") in (500, "server_error") or failure.get("type") == "api_error"):
            return [f"an error of the server: {text:.500}"]
    return []


def _dechunked(body: bytes) -> bytes:
    """The content of a chunked body."""
    made = bytearray()
    while body:
        size, _, body = body.partition(b"\r\n")
        made += body[: int(size, 16)]
        body = body[int(size, 16) + 2 :]
    return bytes(made)


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")
