"""The page at `/` in a browser without a window: fixtures, and what a user does there."""

from __future__ import annotations

import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING, Any

import pytest

from tests.server.served import Client, Served

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Request

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PATIENCE_MS = 60_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    if CHROMIUM is None:
        pytest.skip("no chromium here: apt install chromium")
    with sync_playwright() as playwright:
        microphone = ["--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"]  # one that beeps
        started = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", *microphone], timeout=2 * PATIENCE_MS
        )
        yield started
        started.close()


@pytest.fixture
def open_page(browser: Browser, request: pytest.FixtureRequest) -> Iterator[Callable[..., Page]]:
    """Opens the page of a server; in the end, it has asked nobody else and had no error."""
    from playwright.sync_api import expect

    expect.set_options(timeout=PATIENCE_MS)
    rate: float = request.config.getoption("--slow-page")
    contexts, asked, errors = [], list[str](), list[str]()

    def start(served: Served | Relay, ready: bool = True) -> Page:
        context = browser.new_context(viewport={"width": 900, "height": 640})
        context.on("page", lambda page: slow_down(page, rate) if rate > 1 else None)
        contexts.append((context, served.url))
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda line: errors.append(line.text) if "Content Security Policy" in line.text else None)
        page.goto(served.url)
        if ready:
            expect(page.locator("#model")).not_to_have_text("ondevice", timeout=PATIENCE_MS)
        return page

    yield start
    for context, _ in contexts:
        context.close()
    assert errors == []
    homes = tuple(f"{scheme}{url}/" for scheme in ("", "blob:") for _, url in contexts)
    assert [url for url in asked if not url.startswith((*homes, "data:"))] == []


def slow_down(page: Page, rate: float) -> None:
    """Let the page's processor take `rate` times as long, and its network as many times 5 ms longer."""
    session = page.context.new_cdp_session(page)
    session.send("Emulation.setCPUThrottlingRate", {"rate": rate})
    session.send("Network.enable")
    conditions = {"offline": False, "latency": 5 * rate, "downloadThroughput": -1, "uploadThroughput": -1}
    session.send("Network.emulateNetworkConditions", conditions)


def send(page: Page, text: str) -> None:
    page.fill("#message", text)
    page.press("#message", "Enter")


def wait_for_end(page: Page) -> None:
    """Wait until the last reply in view is complete: it has the button that only a complete one has."""
    from playwright.sync_api import expect

    expect(page.locator(".reply .again")).to_be_visible(timeout=PATIENCE_MS)
    expect(page.locator("#send")).to_be_visible(timeout=PATIENCE_MS)


def new_chat(page: Page) -> None:
    """Open an empty conversation. The page does so in an event after the click: what is typed before it is sent to the
    conversation in view.
    """
    from playwright.sync_api import expect

    page.click("#new")
    expect(page.locator(".turn")).to_have_count(0, timeout=PATIENCE_MS)


def resize(page: Page, width: int, height: int) -> None:
    """Change the size of the window, and wait until the page has it."""
    page.set_viewport_size({"width": width, "height": height})
    page.wait_for_function("([width, height]) => innerWidth === width && innerHeight === height", arg=[width, height])


def bodies_of(page: Page) -> list[Any]:
    """The bodies of the requests for replies, as they are sent."""
    bodies: list[Any] = []
    page.on("request", lambda request: bodies.append(request.post_data_json) if is_asked_for(request) else None)
    return bodies


def is_asked_for(request: Request) -> bool:
    """Whether a request is for a reply."""
    return request.method == "POST" and request.url.endswith("/v1/responses")


DRAFTS: Any = {"drafter": "ngram", "num_assistant_tokens": 8, "num_assistant_tokens_schedule": "constant"}
"""Options of replies in pictures: whether drafts pay depends on what else the machine does."""


PIECE = b"event: response.output_text.delta"
"""Begins an event of a reply, which brings one piece of its text."""


class Relay:
    """Connections to a server that can be cut, as those to a machine that sleeps. The page is opened at `url`.

    pieces : pieces of a reply's text that the server may still send, until the connections are cut
    """

    def __init__(self) -> None:
        self.pieces = inf
        self._target = ("", 0)
        self._open: list[socket.socket] = []
        self._changing = threading.Lock()
        self._listener: socket.socket | None = None
        self._reserved = _bound(0)
        """Bound and not listening, so that no other program gets the port while there is no listener."""
        self._port = self._reserved.getsockname()[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def lead_to(self, served: Client) -> None:
        """Accept connections, to this server."""
        self._target = (served.host, served.port)
        self._listener = _bound(self._port)
        self._listener.listen()
        threading.Thread(target=self._accept, args=(self._listener,)).start()

    def cut(self) -> None:
        """End all connections, and refuse further ones."""
        with self._changing:
            if self._listener is not None:
                self._listener.shutdown(socket.SHUT_RDWR)
                self._listener = None
            for each in self._open:
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
            self._open.clear()
            self.pieces = inf  # after that: what was held back must not be sent

    def close(self) -> None:
        self.cut()
        self._reserved.close()

    def _accept(self, listener: socket.socket) -> None:
        with listener:
            while True:
                try:
                    client = listener.accept()[0]
                except OSError:  # `cut` has ended it
                    return
                self._join(client, listener)

    def _join(self, client: socket.socket, listener: socket.socket) -> None:
        """Connect a client to the server; end its connection where the server has gone or `cut` was faster."""
        try:
            server = socket.create_connection(self._target)
        except OSError:
            client.close()
            return
        with self._changing:
            if listener is not self._listener:
                client.close()
                server.close()
                return
            self._open += (client, server)
        for source, target in ((client, server), (server, client)):
            threading.Thread(target=self._pass_on, args=(source, target)).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        before = b""
        with suppress(OSError), source, target:
            while data := source.recv(1 << 7):  # an event of a reply has more bytes
                while source.getpeername() == self._target and self.pieces <= 0:
                    time.sleep(0.01)
                self.pieces -= (before + data).count(PIECE)
                before = (before + data)[1 - len(PIECE) :]
                target.sendall(data)
            target.shutdown(socket.SHUT_RDWR)


def _bound(port: int) -> socket.socket:
    """A socket at a port of this machine, which several sockets of this process may have."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "SO_REUSEPORT"):
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    made.bind(("127.0.0.1", port))
    return made


@pytest.fixture
def relay() -> Iterator[Relay]:
    made = Relay()
    yield made
    made.close()
