"""A server of three models under mixed requests: replies of all APIs, background ones, and clients that leave."""

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
from typing import Any

import pytest

from ondevice.bundle import MANIFEST, Bundle
from ondevice.model import CACHE_BYTES
from tests.fixtures.chat_bundle import write_chat_bundle
from tests.server.alone import Alone, served_alone

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")

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


def requests(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """A random request."""
    said = [{"role": "user", "content": f"What is {rng.randrange(50)}?"}]
    [name] = rng.choices(NAMES, (20, 20, 1))  # each change of the models in memory takes a second
    count = rng.choice((1, 4, 30))
    return rng.choice(
        (
            ("/v1/chat/completions", {"model": name, "messages": said, "max_tokens": count, "n": rng.choice((1, 3))}),
            ("/v1/completions", {"model": name, "prompt": said[0]["content"], "max_tokens": count, "stream": True}),
            ("/v1/messages", {"model": name, "messages": said, "max_tokens": count}),
            ("/v1/responses", {"model": name, "input": said, "max_output_tokens": count}),
            ("/v1/responses", {"model": name, "input": said, "max_output_tokens": count, "background": True}),
            ("/api/chat", {"model": name, "messages": said, "options": {"num_predict": count}}),
            ("/api/generate", {"model": name, "prompt": "x", "options": {"num_predict": count}}),
        )
    )


def leave(served: Alone, path: str, fields: dict[str, Any]) -> None:
    """Send a request, and disconnect without reading the response."""
    with closing(served.connect()) as connection:
        connection.request("POST", path, json.dumps(fields).encode())
        if connection.sock is not None:
            connection.sock.shutdown(socket.SHUT_RDWR)


def soak(served: Alone, count: int) -> Counter[int]:
    """Statuses of so many requests of several clients at once."""
    statuses: Counter[int] = Counter()

    def client(seed: int) -> None:
        rng = random.Random(seed)
        kept: list[str] = []
        for _ in range(count // CLIENTS):
            path, fields = requests(rng)
            if rng.random() < 0.1:
                leave(served, path, fields)
                continue
            answer = served.post(path, **fields)
            statuses[answer.status] += 1
            if fields.get("background") and answer.status == 200:
                kept.append(answer.body["id"])
            if kept and rng.random() < 0.3:
                one = f"/v1/responses/{kept.pop()}"
                method, more = rng.choice((("GET", ""), ("POST", "/cancel"), ("DELETE", ""), ("GET", "?stream=true")))
                statuses[served.ask(method, one + more).status] += 1

    threads = [threading.Thread(target=client, args=[seed]) for seed in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return statuses


def check(served: Alone, count: int) -> None:
    before, errors = served.memory("VmRSS"), served.errors
    statuses = soak(served, count)
    assert set(statuses) <= {200, 404}, statuses  # 404: a background response that newer ones have replaced
    assert statuses[200] > 0.95 * sum(statuses.values())
    served.wait_until_idle()
    assert served.errors == errors
    loaded = [card["id"] for card in served.get("/v1/models").body["data"] if card["status"]["value"] == "loaded"]
    assert 1 <= len(loaded) <= 2
    assert served.memory("VmRSS") - before < ROOM * 1e9


def test_mixed_requests(alone: Alone) -> None:
    check(alone, 120)


@pytest.mark.slow
def test_10000_mixed_requests(alone: Alone) -> None:
    check(alone, 10_000)
