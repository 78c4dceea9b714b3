"""A server of three models under mixed requests: replies of all APIs, background ones, clients that leave, and errors.

They leave it as small as it was, and the same greedy request has the same reply throughout.
"""

from __future__ import annotations

import json
import random
import socket
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ondevice.bundle import MANIFEST, Bundle
from ondevice.model import CACHE_BYTES
from tests.fixtures.chat_bundle import write_chat_bundle
from tests.server.alone import Alone, served_alone

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc"),
    pytest.mark.needs("llguidance"),  # some requests have a grammar
]

MEGABYTE = 1 << 20
NAMES = ("first", "second", "third")
CLIENTS = 6

ROOM = 2.5 * CACHE_BYTES / 1e9
"""GB for two of the models."""


@pytest.fixture(scope="module")
def alone(reference_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Alone]:
    room = tmp_path_factory.mktemp("soak")
    for name in NAMES:
        path = write_chat_bundle(reference_bundle, room / "bundles" / name, do_sample=True)
        (path / MANIFEST).write_text(replace(Bundle.open(path).manifest, name=name).to_json(), "utf-8")
    words = ("--context-length", "512", "--memory", str(ROOM), "--max-waiting", "64")
    with served_alone(room / "bundles", room, *words) as served:
        yield served


CHARACTERS = "abcdefghij klmnop\n(){}=+"
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
CANARY = {"model": "first", "prompt": "def total(values):\n", "max_tokens": 24, "temperature": 0}


class Request(NamedTuple):
    path: str
    fields: dict[str, Any]
    status: int = 200
    """The expected one."""


def text(rng: random.Random, most: int) -> str:
    return "".join(rng.choices(CHARACTERS, k=rng.randrange(1, most)))


def conversation(rng: random.Random) -> list[dict[str, str]]:
    """A conversation that begins like others of the same number and goes on by a random number of turns."""
    own, roles = random.Random(rng.randrange(8)), ("user", "assistant")
    return [{"role": roles[turn % 2], "content": text(own, 30)} for turn in range(2 * rng.randrange(3) + 1)]


def request_of(rng: random.Random) -> Request:
    """A random request."""
    said = conversation(rng)
    [name] = rng.choices(NAMES, (20, 20, 1))  # each change of the models in memory takes a second
    count = rng.choice((1, 4, 30))
    chat = {"model": name, "messages": said, "max_tokens": count}
    completion = {"model": name, "prompt": text(rng, 100), "max_tokens": count, "temperature": rng.choice((0, 1))}
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    return rng.choice(
        (
            Request("/v1/chat/completions", {**chat, "n": rng.choice((1, 3))}),
            Request("/v1/chat/completions", {**chat, "stream": True}),
            Request("/v1/chat/completions", {**chat, "response_format": schema}),
            Request("/v1/completions", {**completion, "stream": True}),
            Request("/v1/completions", {**completion, "logprobs": 3, "stop": ["\n", "e"]}),
            Request("/v1/completions", {**completion, "prompt": text(rng, 400), "max_tokens": 2}),
            Request("/v1/messages", chat),
            Request("/v1/responses", {"model": name, "input": said, "max_output_tokens": count}),
            Request("/v1/responses", {"model": name, "input": said, "max_output_tokens": count, "background": True}),
            Request("/api/chat", {"model": name, "messages": said, "options": {"num_predict": count}}),
            Request("/api/generate", {"model": name, "prompt": "x", "options": {"num_predict": count}}),
            Request("/v1/completions", {**completion, "temperature": "warm"}, 400),
            Request("/v1/completions", {**completion, "prompt": [1] * 300_000}, 400),
            Request("/v1/chat/completions", {**chat, "messages": [{"role": "nobody", "content": "x"}]}, 400),
        )
    )


def leave(served: Alone, path: str, fields: dict[str, Any]) -> None:
    """Send a request, and disconnect without reading the response."""
    with closing(served.connect()) as connection:
        connection.request("POST", path, json.dumps(fields).encode())
        if connection.sock is not None:
            connection.sock.shutdown(socket.SHUT_RDWR)


def soak(served: Alone, count: int) -> Counter[str]:
    """Failures among so many requests of several clients at once."""
    failures: Counter[str] = Counter()
    canary = served.post("/v1/completions", **CANARY).body["choices"]

    def client(seed: int) -> None:
        rng = random.Random(seed)
        kept: list[str] = []
        for number in range(count // CLIENTS):
            path, fields, status = request_of(rng)
            if rng.random() < 0.1:
                leave(served, path, fields)
                continue
            answer = served.post(path, **fields)
            if answer.status != status:
                failures[f"{path}: {answer.status} instead of {status}: {answer.body}"] += 1
            if fields.get("background") and answer.status == 200:
                kept.append(answer.body["id"])
            if kept and rng.random() < 0.3:
                one = f"/v1/responses/{kept.pop()}"
                method, more = rng.choice((("GET", ""), ("POST", "/cancel"), ("DELETE", ""), ("GET", "?stream=true")))
                if (found := served.ask(method, one + more).status) not in (200, 404):  # newer ones may replace it
                    failures[f"{method} of a background response: {found}"] += 1
            if number % 50 == 0 and served.post("/v1/completions", **CANARY).body["choices"] != canary:
                failures["another reply to the same request"] += 1

    threads = [threading.Thread(target=client, args=[seed]) for seed in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failures


def check(served: Alone, count: int) -> None:
    before, errors = served.memory("VmRSS"), served.errors
    assert not soak(served, count)
    served.wait_until_idle()
    assert served.errors == errors
    loaded = [card["id"] for card in served.get("/v1/models").body["data"] if card["status"]["value"] == "loaded"]
    assert 1 <= len(loaded) <= 2
    assert served.memory("VmRSS") - before < ROOM * 1e9


def held(served: Alone) -> tuple[int, int]:
    """Descriptors and threads of the server."""
    descriptors, threads = (len(list(Path(f"/proc/{served.pid}", each).iterdir())) for each in ("fd", "task"))
    return descriptors, threads


def test_mixed_requests(alone: Alone) -> None:
    check(alone, 120)


@pytest.mark.slow
def test_10000_mixed_requests(alone: Alone) -> None:
    check(alone, 1_000)
    descriptors, threads = held(alone)
    check(alone, 9_000)
    later_descriptors, later_threads = held(alone)
    assert later_descriptors <= descriptors + 16  # connections that were not closed yet
    assert later_threads <= threads + 4
