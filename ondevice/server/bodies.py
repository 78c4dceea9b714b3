"""Receive the body of a request and parse it as JSON, within limits that are checked before the work.

A client decides what a body holds: 30 MB of `[],` would be ten million lists, a gigabyte, and seconds in which Python's
parser lets no other thread run. So long runs of base64, which only media have, are taken out of a body before it is
parsed, and the rest is limited in its length and its number of elements.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import string
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, nullcontext
from itertools import pairwise
from math import isfinite
from typing import Any, NoReturn

from starlette.requests import Request

from ondevice.errors import reason, shown
from ondevice.server.requests import RequestError, RequestFields
from ondevice.text.media_parts import MAX_BYTES

MAX_TEXT_BYTES = 1 << 23
"""Longest body without its media: a context of 262,144 tokens, 1.3 million characters of six bytes (`\\u4e00`)."""

MAX_REQUEST_BYTES = 4 * MAX_BYTES // 3 + MAX_TEXT_BYTES
"""Longest body: that, and the largest picture or sound in base64."""

MAX_ELEMENTS = 1 << 19
"""Most commas and opening brackets of a body, those in texts included: twice the token ids of the longest context."""

MAX_NAMES = 1 << 17
"""Most colons of a body, those in texts included. The parser lets no other thread run while it makes objects: 130,000
names take 60 ms."""

MAX_DIGITS = 100
"""Longest number, in characters: Python takes a time in the square of them."""

MAX_BODIES_BYTES = 2 * MAX_REQUEST_BYTES
"""Most bytes of all bodies that are being received, parsed and encoded. Further ones wait for room."""

SMALL_BYTES = 1 << 16
"""Bodies up to this length do not wait for room: the limit of connections limits them."""

MAX_PARSED = 2
"""Most parsed bodies longer than SMALL_BYTES, until their requests are read. An object takes up to 30 times the length
of its JSON, so that bodies that have room together would take gigabytes."""

MAX_RECEIVING = 64
"""Most bodies that are being received. A further one ends the receipt of the oldest."""

MAX_BODY_S = 120.0
"""Seconds within which a body must arrive, the wait for room included."""

BLOCK = 1 << 14
"""Runs of base64 are found in blocks of so many bytes."""

BASE64 = f"{string.ascii_letters}{string.digits}+/=".encode()

ESCAPES = {rb"\/": "/", rb"\n": "\n", rb"\r": "\r", rb"\u002b": "+", rb"\u002B": "+"}
"""How JSON may write what base64 has: `/` in PHP, `+` in .NET, line breaks everywhere."""

LONGEST_ESCAPE = 6
"""Bytes of `\\u002b`."""

HALF_PAIR = re.compile("[\ud800-\udfff]")
ESCAPED_HALF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")
"""Half a surrogate pair, which is not text. Characters outside of Unicode's first plane are escaped as two halves."""


class Bodies:
    """The bodies in memory. All methods belong to one event loop. One other thread parses bodies, one by one."""

    def __init__(self) -> None:
        self._room = MAX_BODIES_BYTES
        self._given_back = asyncio.Event()
        self._receiving: list[asyncio.Timeout] = []
        """Deadlines of the bodies that are being received, oldest first."""
        self._parsed = asyncio.Semaphore(MAX_PARSED)
        self._parser = ThreadPoolExecutor(1, "ondevice-parser")

    @asynccontextmanager
    async def receive(self, request: Request) -> AsyncIterator[RequestFields]:
        """Receive and parse the body of a request. It takes its room until the block ends.

        Raises:
            RequestError: a limit is exceeded, the body does not arrive in time, or it is not a JSON object.
            ClientDisconnect: the client has disconnected.
        """
        length = request.headers.get("content-length", "")
        expected = int(length[:20]) if length.isdecimal() else 0
        if expected > MAX_REQUEST_BYTES:
            raise _too_long()
        taken, body = 0, bytearray()
        try:
            async with self._deadline():
                taken = await self._take(expected)
                async for piece in request.stream():
                    body += piece
                    if not taken and len(body) > SMALL_BYTES:  # it did not say its length
                        taken = await self._take(MAX_REQUEST_BYTES)
                    if len(body) > MAX_REQUEST_BYTES:
                        raise _too_long()
            async with self._parsed if len(body) > SMALL_BYTES else nullcontext():
                yield await asyncio.get_running_loop().run_in_executor(self._parser, parse, body)
        finally:
            self._give_back(taken)

    @asynccontextmanager
    async def _deadline(self) -> AsyncIterator[None]:
        """End the block with a `RequestError` after MAX_BODY_S, or earlier if too many newer ones have begun."""
        try:
            async with asyncio.timeout(MAX_BODY_S) as deadline:
                if len(self._receiving) == MAX_RECEIVING:
                    self._receiving.pop(0).reschedule(0)
                self._receiving.append(deadline)
                try:
                    yield
                finally:
                    if deadline in self._receiving:
                        self._receiving.remove(deadline)
        except TimeoutError as error:
            raise RequestError(408, "the body of the request did not arrive in time: try again later") from error

    async def _take(self, size: int) -> int:
        """Wait until there is room for a body of this length, and take it. Returns what must be given back."""
        if size <= SMALL_BYTES:
            return 0
        while size > self._room:
            self._given_back.clear()
            await self._given_back.wait()
        self._room -= size
        return size

    def _give_back(self, taken: int) -> None:
        self._room += taken
        self._given_back.set()


def parse(body: bytes | bytearray) -> RequestFields:
    """The JSON object in a body.

    Raises:
        RequestError: it is none, or exceeds a limit.
    """
    rest = _WithoutMedia(body)
    try:
        text = rest.json.decode("utf-8-sig")
        values = DECODER.decode(text)
        if rest.runs or ESCAPED_HALF_PAIR.search(text) is not None:
            values = _each_text(values, rest.put_back)
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"the request is not valid JSON: {reason(error)}") from error
    if not isinstance(values, dict):
        raise RequestError(400, f"the request must be a JSON object, not {type(values).__name__}")
    return RequestFields(values)


class _WithoutMedia:
    """A body without its long runs of base64.

    json : the body with a mark in place of each run. Where a run is not part of a text, this is not JSON
    runs : where the blocks of each run begin, and where the last of them ends. None begins or ends within an escape
    """

    def __init__(self, body: bytes | bytearray) -> None:
        """
        Raises:
            RequestError: the rest exceeds a limit.
        """
        self._body = memoryview(body)
        self._mark = secrets.token_hex(16)
        self.runs: list[list[int]] = []
        kept: list[bytes | bytearray] = []
        start = length = elements = names = 0
        while start < len(body):
            stop = _behind_escape(body, start + BLOCK)
            block = body[start:stop]
            if len(block) >= BLOCK and _behind_escape(body, start) == start and _is_base64(block):
                if self.runs and self.runs[-1][-1] == start:
                    self.runs[-1].append(stop)
                else:
                    kept.append(f"{self._mark}{len(self.runs):04}".encode())
                    self.runs.append([start, stop])
                start = stop
                continue
            kept.append(block)
            length += len(block)
            elements += len(block) - len(block.translate(None, b",[{"))
            names += block.count(b":")
            if length > MAX_TEXT_BYTES:
                raise RequestError(413, f"the request has more than {MAX_TEXT_BYTES} bytes besides base64")
            if elements > MAX_ELEMENTS:
                raise RequestError(413, f"the request has more than {MAX_ELEMENTS} commas and opening brackets")
            if names > MAX_NAMES:
                raise RequestError(413, f"the request has more than {MAX_NAMES} colons")
            start = stop
        self.json = b"".join(kept)

    def put_back(self, text: str) -> str:
        """A text of the JSON with its runs.

        Raises:
            ValueError: it holds half a surrogate pair, or a long run beside characters that would make each of the
                run's take up to four bytes.
        """
        if not text.isascii() and HALF_PAIR.search(text) is not None:
            raise ValueError("a text holds half a surrogate pair")
        if self._mark not in text:
            return text
        pieces = re.split(rf"{self._mark}(\d{{4}})", text)
        runs = [self.runs[int(number)] for number in pieces[1::2]]
        if not text.isascii() and sum(run[-1] - run[0] for run in runs) > MAX_TEXT_BYTES:
            raise ValueError("a text with base64 of a picture or sound holds other characters than those of base64")
        pieces[1::2] = ["".join(_unescaped(self._body[start:stop]) for start, stop in pairwise(run)) for run in runs]
        return "".join(pieces)


def _behind_escape(body: bytes | bytearray, place: int) -> int:
    """A place of a body, or the end of the escape that it may lie in."""
    escape = body.rfind(b"\\", max(place - LONGEST_ESCAPE + 1, 0), place)
    if escape < 0:
        return place
    return max(place, escape + (LONGEST_ESCAPE if body[escape + 1 : escape + 2] == b"u" else 2))


def _is_base64(block: bytes | bytearray) -> bool:
    rest = block.translate(None, BASE64)
    return not rest or (not rest.strip(b"\\") and len(rest) == sum(map(block.count, ESCAPES)))


def _unescaped(block: memoryview) -> str:
    """The base64 of a block of a run."""
    text = str(block, "ascii")
    if "\\" in text:
        for escape, character in ESCAPES.items():
            text = text.replace(escape.decode(), character)
    return text


def _each_text(value: Any, change: Callable[[str], str]) -> Any:
    """A value of JSON with every text in it changed, names included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_each_text(each, change) for each in value]
    if isinstance(value, dict):
        return {change(name): _each_text(each, change) for name, each in value.items()}
    return value


def _whole(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a number has more than {MAX_DIGITS} digits")
    return int(text)


def _finite(text: str) -> float:
    number = float(text) if len(text) <= MAX_DIGITS else float("nan")
    if not isfinite(number):
        raise ValueError(f"the number {shown(text, 20)} is too large or too long")
    return number


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")


DECODER = json.JSONDecoder(parse_int=_whole, parse_float=_finite, parse_constant=_refuse)


def _too_long() -> RequestError:
    return RequestError(413, f"the request has more than {MAX_REQUEST_BYTES} bytes")
