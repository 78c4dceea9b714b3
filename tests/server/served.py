"""An HTTP client for servers, and a server in this process."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any, NamedTuple

from ondevice.bundle import Bundle
from ondevice.model import Model
from ondevice.server.model_manager import ServedModel
from ondevice.server.running import Server, Setup

PATIENCE_S = 300.0
"""Seconds after which a test that waits for something fails."""


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: Any


class Client:
    """Requests to a running server."""

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self.port = port

    def connect(self) -> HTTPConnection:
        return HTTPConnection(self.host, self.port, timeout=PATIENCE_S)

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        """Send a request. A body that is not bytes is sent as JSON."""
        with closing(self.connect()) as connection:
            connection.request(
                method, path, _encoded(body), {name.replace("_", "-"): each for name, each in headers.items()}
            )
            response = connection.getresponse()
            raw = response.read()
            received = {name.lower(): value for name, value in response.getheaders()}
            parsed = json.loads(raw) if "application/json" in received.get("content-type", "") else raw.decode()
            return Answer(response.status, received, parsed)

    def get(self, path: str, **headers: str) -> Answer:
        return self.ask("GET", path, **headers)

    def post(self, path: str, **fields: Any) -> Answer:
        return self.ask("POST", path, fields)

    @contextmanager
    def stream(self, path: str, **fields: Any) -> Iterator[Iterator[str]]:
        """The lines of a stream without empty ones. Leaving the block disconnects."""
        with closing(self.connect()) as connection:
            connection.request("POST", path, _encoded({**fields, "stream": True}))
            response = connection.getresponse()
            assert response.status == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            yield _lines(response)
            if connection.sock is not None:
                connection.sock.close()
            response.close()

    def messages(self, path: str, **fields: Any) -> list[Any]:
        """The JSON objects of a complete stream."""
        with self.stream(path, **fields) as lines:
            found = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        return [json.loads(each) for each in found if each != "[DONE]"]

    def gauge(self, name: str) -> float:
        """The value of a metric."""
        for line in self.get("/metrics").body.splitlines():
            if line.startswith(f"ondevice:{name} "):
                return float(line.split()[1])
        raise AssertionError(f"no {name}")

    def let_it_notice(self) -> None:
        """Wait until the server has noticed that connections were closed: it handles events in order."""
        for _ in range(5):
            self.get("/health")

    def wait_until_idle(self) -> None:
        wait_until(lambda: self.gauge("requests_processing") == 0 and self.gauge("requests_deferred") == 0)


class Served(Client):
    """A running server in this process."""

    def __init__(self, server: Server) -> None:
        super().__init__(server.host, server.port)
        self.server = server
        self.url = server.url


@contextmanager
def serving(bundle: Path, load: Callable[[], Model], *, wait: bool = True, **setup: Any) -> Iterator[Served]:
    """Run a server at a free port within the block."""
    server = Server([ServedModel(Bundle.open(bundle), lambda report: load())], Setup(**setup))
    with running(server, wait=wait) as served:
        yield served


@contextmanager
def running(server: Server, *, wait: bool = True) -> Iterator[Served]:
    """Run a server within the block."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            server.run()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    served = Served(server)
    try:
        if wait:
            wait_until(lambda: served.get("/health").status == 200)
        yield served
    finally:
        server.stop()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    if failed:
        raise failed[0]


def wait_until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


def text_of(chunks: list[Any], index: int = 0) -> str:
    """The text of a streamed chat completion's choice."""
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def _lines(response: HTTPResponse) -> Iterator[str]:
    for line in response:
        if text := line.decode().rstrip("\n"):
            yield text


def _encoded(body: Any) -> bytes | None:
    return body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
