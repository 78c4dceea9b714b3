"""Random HTTP requests to a server: changed fields of valid requests, hostile headers and damaged framing.

Each must get a response or a status of 4xx, all JSON must be valid, and nothing may appear on the server's standard
error.
"""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Mapping
from contextlib import closing, suppress
from typing import Any, NamedTuple, NoReturn

from tests.fuzz.mutations import HOSTILE, change_bytes, change_json
from tests.server.alone import Alone

SERVED = ("--context-length", "256", "--drafter", "none")
"""Options of the server, for short replies to requests whose maximum has gone."""

PATIENCE_S = 120.0
"""Seconds until the response to a whole request must have come."""

DAMAGED_S = 0.05
"""Seconds until the client of a request that may lack its end disconnects. Nothing depends on what it receives."""

PICTURE = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg=="
)
FUNCTION = {"name": "f", "description": "x", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
FUNCTION_CALL = {"name": "f", "arguments": {"a": 1}}
CONVERSATION = [
    {"role": "system", "content": "x"},
    {"role": "user", "content": [{"type": "text", "text": "hello"}]},
    {"role": "assistant", "content": None, "reasoning_content": "x", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "1"},
    {"role": "user", "content": "again"},
]
SAMPLING = {"max_tokens": 2, "temperature": 0.7, "top_p": 0.9, "seed": 1, "stop": ["x"]}
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", 1]}}}

VALID: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", {"messages": CONVERSATION, "tools": [TOOL], "tool_choice": "auto", **SAMPLING}),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": PICTURE}}]}],
            "max_completion_tokens": 2,
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": CONVERSATION[:2],
            "max_completion_tokens": 2,
            "logprobs": True,
            "top_logprobs": 2,
            "logit_bias": {"5": 1},
            "n": 2,
            "return_progress": True,
            "return_rounds": True,
            "chat_template_kwargs": {"enable_thinking": True},
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": CONVERSATION[:2],
            "max_tokens": 3,
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
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
    ("/v1/responses", {"input": "x", "background": True, "max_output_tokens": 2}),
    ("/v1/responses", {"input": "x", "background": True, "max_output_tokens": 50, "stream": True}),
    ("/v1/responses/resp_0/cancel", {"input": "x"}),
    (
        "/v1/responses/input_tokens",
        {
            "input": [{"type": "function_call", "call_id": "1", "namespace": "n", "name": "f", "arguments": "{}"}],
            "tools": [
                {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]},
                {"type": "web_search"},
            ],
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
            "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
        },
    ),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}),
    (
        "/api/chat",
        {
            "model": "reference:latest",
            "messages": [
                {"role": "user", "content": "x", "images": [PICTURE.partition(",")[2]]},
                {"role": "assistant", "content": "", "thinking": "x", "tool_calls": [{"function": FUNCTION_CALL}]},
                {"role": "tool", "content": "x", "tool_name": "f"},
            ],
            "tools": [TOOL],
            "think": True,
            "keep_alive": "5m",
            "options": {"num_predict": 2, "temperature": 0.5, "num_ctx": 100, "num_assistant_tokens": 2},
        },
    ),
    ("/api/chat", {"messages": CONVERSATION[:1], "stream": False, "format": SCHEMA, "options": {"num_predict": 2}}),
    ("/api/generate", {"prompt": "x", "system": "y", "logprobs": True, "options": {"num_predict": 2, "stop": ["x"]}}),
    ("/api/generate", {"prompt": "x", "raw": True, "stream": False, "options": {"num_predict": 2, "seed": 1}}),
    ("/api/show", {"model": "reference", "verbose": True}),
    ("/tokenize", {"content": "abc", "add_special": True, "parse_special": False, "with_pieces": True}),
    ("/detokenize", {"tokens": [5, 6, 7]}),
)
"""Requests with a body."""

PATHS = (
    "/v1/responses/resp_0", "/v1/responses/x%00?stream=true&starting_after=-1", "/v1/responses/?stream=1",
    "/api/tags", "/api/ps", "/api/version", "/api/pull", "/api/push", "/api/create", "/api/copy", "/api/delete",
    "/api/embed", "/api/embeddings", "/v1/embeddings", "/props?model=x%00",
    "/", "/health", "/v1/health", "/v1/models", "/v1/models/x%ff%00/y", "/props", "/metrics", "/nothing", "/../etc",
    "//", "/v1/%ed%a0%80", "/health?a=%ff&&=", "*", "http://[", "/v1/\xe9", "/\x1b", "/" + "a" * 30_000,
)  # fmt: skip

FIELDS = (
    "stream", "stream_options", "n", "stop", "seed", "top_k", "min_p", "repeat_penalty", "presence_penalty",
    "drafter", "logit_bias", "logprobs", "top_logprobs", "response_format", "json_schema", "grammar", "tools",
    "tool_choice", "parallel_tool_calls", "reasoning_effort", "chat_template_kwargs", "return_progress",
    "return_rounds", "echo", "suffix", "best_of", "store", "metadata", "previous_response_id", "output_config",
    "model", "options", "format", "think", "raw", "images", "system", "continue_final_message", "num_assistant_tokens",
    "thinking", "user", "max_tokens", "instructions", "input", "messages", "prompt", "content", "tokens", "unknown",
)  # fmt: skip


NESTED = {f"nested {depth}": '{"a": [' * (depth // 2) + "]}" * (depth // 2) for depth in (100, 400, 900, 980)}
"""Lists and objects in each other, by the text that a body has in their place until it is JSON: it takes recursion to
change them."""

VALUES: tuple[Any, ...] = (
    *HOSTILE, {"type": "regex", "regex": "[a-z]{2}"}, {"type": "regex", "regex": "("}, {"type": "json_object"},
    {"type": "regex", "regex": "(a{1000}){1000}"}, {"type": "choice", "choice": ["a"]}, {"type": "choice", "choice": 5},
    {"type": "lark", "lark": "start: /a/"}, {"self": 1}, {"messages": []}, {"namespace": 5, "tools": 1},
    {"include_usage": True}, "none", "auto", "required", {"type": "function", "function": {"name": "f"}}, [TOOL] * 3,
    [["5", 1]], {"5": 1e300}, {"5": -1e300}, {"5": -100}, {str(10**40): 1}, "low", "ngram", {"format": SCHEMA},
    {"enable_thinking": False, "x": ["\udc80"]}, {"format": {"type": "json_schema", "schema": {}}}, ["a"] * 70,
    *NESTED, 10**40, 10**99, 1e300, [10**40], [[10**40]], "<eos>" * 50,
    "\ue000<turn|>\ue001", ["<|tool_call>", "<|channel>"], "\u2039" * 1000, [0.0] * 20, {"": {"": ""}}, [[], [[]]],
)  # fmt: skip

FRAMING: tuple[tuple[str, str], ...] = (
    ("Transfer-Encoding", "chunked"), ("Transfer-Encoding", "gzip"), ("Content-Length", "9" * 23),
    ("Content-Length", "-1"), ("Content-Length", "1_0"), ("Content-Length", "70000000"), ("Content-Length", "500"),
    ("Content-Length", "1"), ("Content-Length", "0"), ("A", "b" * 100_000),
)  # fmt: skip
"""Headers that say a wrong length of the body, or none."""

HEADERS: tuple[tuple[str, str], ...] = (
    ("Origin", "http://["), ("Origin", "null"), ("Origin", "http://localhost"), ("Origin", "\xff"), ("Host", "a:x"),
    ("Authorization", "Bearer \xe9"), ("Authorization", "Basic"), ("x-api-key", "\x80"), ("Expect", "100-continue"),
    ("Content-Encoding", "gzip"), ("Content-Type", "text/plain; charset=utf-16"), ("Content-Type", "\xff"),
    ("Content-Type", "multipart/form-data"), ("Upgrade", "websocket"), ("Upgrade", "h2c"), ("Connection", "upgrade"),
    ("Access-Control-Request-Method", "\xff"), ("Access-Control-Request-Headers", "\xe9"), ("Range", "bytes=9-1"),
    ("If-None-Match", "*"), ("If-Modified-Since", "\xff"), ("A", "b" * 20_000), ("A b", "c"), ("A", "b\x00c"), ("", ""),
)  # fmt: skip

METHODS = ("GET", "POST", "PUT", "OPTIONS", "HEAD", "DELETE", "PATCH", "CONNECT", "FOO", "get")

BODIES = (
    b"",
    b"[]",
    b'"x"',
    b"5",
    b"null",
    b"\xef\xbb\xbf{}",
    b"\xff\xfe{\0}\0",
    b"{}" * 9,
    b"\x1f\x8b\x08\0",
    b"a=b&c",
)


class Made(NamedTuple):
    """A request.

    content : its bytes
    said : what it is, for a report of a fault
    is_whole : whether it has its end, so that a response must come
    """

    content: bytes
    said: str
    is_whole: bool


class Requests:
    """Sends random requests to a server, one after another."""

    def __init__(self, served: Alone) -> None:
        self._served = served
        self._errors = len(served.errors)

    def try_one(self, rng: random.Random) -> tuple[str, str, list[str]]:
        """See `Mutants.try_one`."""
        request = make(rng)
        faults = _faults(self._answer(request), request)
        if errors := self._served.errors[self._errors :]:
            self._errors += len(errors)
            faults.append(f"standard error: {errors:.3000}")
        return "requests", request.said, faults

    def _answer(self, request: Made) -> bytes:
        pieces: list[bytes] = []
        seconds = PATIENCE_S if request.is_whole else DAMAGED_S
        with (
            suppress(TimeoutError, ConnectionError),
            closing(socket.create_connection((self._served.host, self._served.port), timeout=seconds)) as connection,
        ):
            connection.sendall(request.content)
            while piece := connection.recv(1 << 16):
                pieces.append(piece)
        return b"".join(pieces)


def make(rng: random.Random) -> Made:
    """A random request."""
    path, fields = rng.choice(VALID)
    (body, said), method = _body(fields, rng), "POST"
    if rng.random() < 0.08:
        path, method = rng.choice(PATHS), "GET"
    if rng.random() < 0.05:
        method = rng.choice(METHODS)
    if method == "GET" and rng.random() < 0.8:
        body = b""
    headers = [("Host", "localhost")]
    chance, is_whole = rng.random(), True
    if chance < 0.05:
        headers.append(rng.choice(HEADERS))
    elif chance < 0.07:
        headers.append(rng.choice(FRAMING))
        is_whole = False
    elif chance > 0.96:
        headers.append(("Transfer-Encoding", "chunked"))
        body, is_whole = _chunked(body, rng)
    if is_whole and chance <= 0.96:
        headers.append(("Content-Length", str(len(body))))
    if 0.07 < chance < 0.08:  # two requests, of which the second arrives before the first is answered
        first = _request(method, path, headers, body)
        return Made(
            first + _request(method, path, [*headers, CLOSE], body), f"twice {method} {path:.100} {said}", False
        )
    request = _request(method, path, [*headers, CLOSE], body, "0" if rng.random() < 0.02 else "1")
    if 0.08 < chance < 0.11:
        request, changed = change_bytes(request, rng)
        said, is_whole = f"{said}; {changed}", False
    return Made(request, f"{method} {path:.100} {headers[1:]!r:.100} {said} {body!r:.1500}", is_whole)


CLOSE = ("Connection", "close")


def _chunked(body: bytes, rng: random.Random) -> tuple[bytes, bool]:
    """A body in one to three chunks, and whether all of them are as they should be."""
    at = sorted(rng.randrange(len(body) + 1) for _ in range(2))
    pieces = [piece for piece in (body[: at[0]], body[at[0] : at[1]], body[at[1] :]) if piece]
    chunks = [b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces] + [b"0\r\n\r\n"]
    if is_whole := rng.random() < 0.5:
        return b"".join(chunks), is_whole
    chunks[rng.randrange(len(chunks))] = rng.choice((b"zz\r\n", b"-1\r\n\r\n", b"f" * 30, b"5;a=\r\nab\r\n", b""))
    return b"".join(chunks), is_whole


def _request(method: str, path: str, headers: list[tuple[str, str]], body: bytes, minor: str = "1") -> bytes:
    lines = [f"{method} {path} HTTP/1.{minor}", *(f"{name}: {value}" for name, value in headers), "", ""]
    return "\r\n".join(lines).encode("latin-1") + body


NUMBERS = (-(2**63), -1e19, 1024 - 2**63, -1, 0, 0.5, 1e-300, 3, 7, 1e17, 2**31, 2**32, 2**53, 2**63 - 1, 2**64, 1e300)
KEYWORDS: dict[str, tuple[Any, ...]] = {
    "type": ("object", "array", "string", "number", "integer", "boolean", "null", ["string", "null"], "x", []),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "const"), NUMBERS),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), NUMBERS),
    "enum": ([-1, "a"], [], [None, True, {"a": []}], [1e300, 1e-300], [10**40], ["\0\n\ue000"]),
    "pattern": ("a*", "(", "^a{3}$", "(a{99}){99}", "(?=a)", "\\\\d+", "[^\0]", "a{99999}"),
    "format": ("date", "uuid", "uri", "x", 5),
    "required": (["a"], ["z"], [5], "a"),
    "$ref": ("#", "#/properties/a", "#/$defs/x", "http://x/y", "file:///etc/passwd", "%"),
    "additionalProperties": (True, False, {}, 5),
    "x-guidance": ({}, {"whitespace_flexible": True}, {"coerce_one_of": 5}, {"item_separator": "("}, []),
}
"""Keywords of JSON schemas, with values."""
INNER = ("items", "additionalProperties", "not", "if", "contains", "propertyNames")


def _schema(rng: random.Random, depth: int = 0) -> Any:
    """A random JSON schema, or nearly one."""
    made = {name: rng.choice(KEYWORDS[name]) for name in rng.sample(list(KEYWORDS), rng.choice((0, 1, 2, 3, 5)))}
    if depth == 3:
        return made
    if rng.random() < 0.4:
        made["properties"] = {name: _schema(rng, depth + 1) for name in rng.sample(("a", "b", "", "$ref", "é"), 2)}
    if rng.random() < 0.3:
        made[rng.choice(("allOf", "anyOf", "oneOf", "prefixItems"))] = [_schema(rng, depth + 1) for _ in range(2)]
    if rng.random() < 0.3:
        made[rng.choice(INNER)] = _schema(rng, depth + 1)
    if rng.random() < 0.1:
        made["$defs"] = {"x": _schema(rng, depth + 1)}
    return made


def _with_schema(fields: dict[str, Any], rng: random.Random) -> None:
    """Put a random schema into the fields of a request, as its form or as a tool's parameters."""
    schema = _schema(rng)
    if rng.random() < 0.5:
        fields["json_schema"] = schema
    else:
        strict: Any = rng.choice(({}, {"strict": True}, {"strict": 5}))
        fields["tools"] = [{"type": "function", "function": {"name": "f", "parameters": schema, **strict}}]
        fields["tool_choice"] = rng.choice(("auto", "required", {"type": "function", "function": {"name": "f"}}))


def _body(fields: Mapping[str, Any], rng: random.Random) -> tuple[bytes, str]:
    """A body made of the fields of a valid request, and what was changed."""
    if rng.random() < 0.02:
        return rng.choice(BODIES), "another body"
    changed = dict(fields)
    for _ in range(rng.choice((0, 0, 0, 1, 2))):
        changed[rng.choice(FIELDS)] = rng.choice(VALUES)
    if rng.random() < 0.2:
        _with_schema(changed, rng)
    if rng.random() < 0.3:
        changed["stream"] = True
    text, said = json.dumps(changed), ""
    if rng.random() < 0.8:
        text, said = change_json(text, rng)
    for name, value in NESTED.items():
        text = text.replace(f'"{name}"', value)
    if rng.random() < 0.05:
        body, more = change_bytes(text.encode(), rng)
        return body, f"{said}; {more}"
    return text.encode(), said


def _faults(answer: bytes, request: Made) -> list[str]:
    if not answer:
        return ["no answer"] if request.is_whole else []
    head, _, body = answer.partition(b"\r\n\r\n")
    while head.startswith(b"HTTP/1.1 100 "):
        head, _, body = body.partition(b"\r\n\r\n")
    status = head.split(b" ", 2)[1:2]
    if not status or not status[0].isdigit() or not 200 <= int(status[0]) < 500:
        return [f"status: {answer!r:.500}"]
    if not request.is_whole:
        return []
    head = head.lower()
    if b"transfer-encoding: chunked" in head:
        body = _dechunked(body)
    if b"text/event-stream" in head:
        lines = body.decode().split("\n")
        texts = [line[6:] for line in lines if line.startswith("data: ") and line != "data: [DONE]"]
    elif b"application/x-ndjson" in head:
        texts = body.decode().splitlines()
    else:
        texts = [body.decode()] if b"application/json" in head and body else []
    return [fault for text in texts if (fault := _fault(text))]


def _fault(text: str) -> str:
    """The fault of a JSON object of a response; empty if it is as it should be."""
    try:
        value = json.loads(text, parse_constant=_no_number)
    except ValueError as error:
        return f"no JSON ({error}): {text!r:.500}"
    inner = value.get("response")  # in an event of the Responses API; a text in Ollama's
    failure = value.get("error") or (inner.get("error") if isinstance(inner, dict) else None)
    if isinstance(failure, str):  # Ollama's
        return f"an error of the server: {text:.500}" if failure.startswith("internal error") else ""
    if failure and (failure.get("code") in (500, "server_error") or failure.get("type") == "api_error"):
        return f"an error of the server: {text:.500}"
    return ""


def _dechunked(body: bytes) -> bytes:
    """The content of a chunked body."""
    made = bytearray()
    while body:
        size, _, body = body.partition(b"\r\n")
        made += body[: int(size, 16)]
        body = body[int(size, 16) + 2 :]
    return bytes(made)


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")
