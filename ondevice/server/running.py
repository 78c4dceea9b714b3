"""Run a server: listen, load the model, answer until a signal or `Server.stop`, then cancel and unload.

`Connection` limits what clients can do before there is a request: their number, and the time for its headers.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ondevice.engines.protocol import MAX_SESSIONS
from ondevice.errors import UsageError, system_error
from ondevice.options import check_whole
from ondevice.server.app import make_app
from ondevice.server.guard import Rules
from ondevice.server.metrics import Metrics
from ondevice.server.model_manager import Models, ServedModel, StoppedError
from ondevice.server.replies import AdmissionQueue
from ondevice.server.requests import RequestError

MAX_PORT = 65535

MAX_CONNECTIONS = 128
"""Most connections. A further one takes the place of one that is closing, of the oldest without a request, or of one
whose client does not read."""

MAX_HEADER_S = 30.0
"""Seconds from the beginning of a connection, or the end of a response, within which the headers of a request must have
arrived. Uvicorn itself closes a connection that sends nothing for five seconds after a response."""

MAX_UNREAD_S = 60.0
"""Seconds for which a client may leave a response unread that no longer fits into the buffers."""

MIN_CHUNK, FREE_CHUNKS = 256, 256
"""Bytes that the chunks of a body must have on average, but for the first ones. A chunk takes the event loop 12 us: a
body of 50 MB with one byte in each would take minutes of it."""


@dataclass(frozen=True)
class Setup:
    """
    host, port : address to listen at; port 0 takes a free one
    max_sequences : replies that are generated at the same time; the model must be loaded with as many sequences
    max_waiting : requests that may wait for one of them; further ones are refused
    idle_s : seconds without a request after which a model is unloaded; None keeps it in memory
    memory : bytes that the models in memory may take together; None for no limit
    aliases : further names of models, and the names of these models; empty for the first one
    rules : access control
    """

    host: str = "127.0.0.1"
    port: int = 0
    max_sequences: int = 4
    max_waiting: int = 32
    idle_s: float | None = None
    memory: int | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)
    rules: Rules = field(default_factory=Rules)


class Server:
    """Listens from its construction on, and answers while `run` runs."""

    def __init__(self, sources: Sequence[ServedModel], setup: Setup) -> None:
        """
        Args:
            sources: the models. The first one is loaded when the server starts, the others when a request names them.
            setup: address and limits.

        Raises:
            UsageError: the address cannot be listened at, `max_sequences` is out of range, or see `Models`.
        """
        check_whole("max_sequences", setup.max_sequences, 1, MAX_SESSIONS)
        models = Models(sources, idle_s=setup.idle_s, memory=setup.memory, aliases=setup.aliases)
        self._socket = _listen(setup.host, setup.port)
        self.host = setup.host
        self.port = int(self._socket.getsockname()[1])
        self._models = models
        queue = AdmissionQueue(setup.max_sequences, setup.max_waiting)
        config = uvicorn.Config(
            make_app(models, queue, Metrics(), setup.rules),
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            proxy_headers=False,
            log_level="error",
            http=Connection,
            loop="asyncio",
        )
        self._uvicorn = _Uvicorn(config, models)

    @property
    def names(self) -> list[str]:
        """The names of the models."""
        return list(self._models.by_name)

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the server."""
        return ipaddress.ip_address(self._socket.getsockname()[0]).is_loopback

    def run(self) -> signal.Signals | None:
        """Load the model and answer requests until `stop` or a signal.

        Returns:
            The signal; None after `stop`.

        Raises:
            Exception: what loading the model raises.
        """
        asyncio.run(self._run())
        return self._uvicorn.signal

    def stop(self) -> None:
        """End `run` soon and cancel all replies. May be called from any thread."""
        self._uvicorn.should_exit = True

    async def _run(self) -> None:
        loading = asyncio.create_task(self._models.start())
        loading.add_done_callback(lambda task: self.stop() if task.exception() else None)
        try:
            await self._uvicorn.serve([self._socket])
        finally:
            self._models.close()
            self._socket.close()
            if self._uvicorn.signal is not None:  # uvicorn has restored its handlers
                _end_at_next_signal()
        with contextlib.suppress(StoppedError, RequestError):  # stopped before the model was loaded
            await loading


class _Uvicorn(uvicorn.Server):
    """Uvicorn, but it cancels replies when it stops instead of waiting for them."""

    def __init__(self, config: uvicorn.Config, models: Models) -> None:
        super().__init__(config)
        self._models = models
        self.signal: signal.Signals | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal cancels all replies; a second one ends the process at once."""
        self.signal = signal.Signals(sig)
        self.should_exit = True
        _end_at_next_signal()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._models.close()
        await super().shutdown(sockets)


class Connection(H11Protocol):
    """Uvicorn's connection with limits, which it has none of: half-sent headers would stay open for ever."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.conn = _Parser(h11.SERVER)
        self._is_unread = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._deadline = self._header_deadline()
        connections = [each for each in self.connections if isinstance(each, Connection)]
        others = [each for each in connections if each is not self and not each._has_ended]
        if len(others) < MAX_CONNECTIONS:
            return
        if dispensable := [each for each in others if each._is_dispensable]:
            first = min(dispensable, key=lambda each: (not each.transport.is_closing(), each._deadline.when()))
            first.transport.abort()
        else:
            self._refuse(503, f"{MAX_CONNECTIONS} connections are open: try again later")

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_answering and not self._is_unread:
            self._deadline.cancel()

    def on_response_complete(self) -> None:
        self._expect_request()
        super().on_response_complete()
        if self._is_answering and not self._is_unread:  # the next request had arrived already
            self._deadline.cancel()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._is_unread = True
        self._deadline.cancel()
        self._deadline = self.loop.call_later(MAX_UNREAD_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._is_unread = False
        self._deadline.cancel()
        if not self._is_answering:
            self._expect_request()

    def _expect_request(self) -> None:
        """Give the client the time for the headers of its next request, once it has read the response."""
        if not self._is_unread:
            self._deadline.cancel()
            self._deadline = self._header_deadline()

    def _header_deadline(self) -> asyncio.TimerHandle:
        return self.loop.call_later(MAX_HEADER_S, self._refuse, 408, "the headers did not arrive in time")

    def send_400_response(self, msg: str) -> None:
        """Close the connection after malformed HTTP.

        Uvicorn itself writes an error in any case, and the response to a request whose body is malformed after it. For
        h11 either is a second response, an exception.
        """
        self._break_off(400, "the request is not valid HTTP, or its chunks are too small")

    def shutdown(self) -> None:
        """Let the connection close behind its response. A request whose body is still arriving is refused, since that
        may take two minutes.
        """
        if self._is_answering and self.cycle.more_body:
            self._break_off(503, "the server is stopping")
        else:
            super().shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.cancel()
        super().connection_lost(exc)

    def _break_off(self, status: int, message: str) -> None:
        """Close the connection in the middle of a request, with an error if no response has begun."""
        if self._is_answering:  # its application has not ended: it receives and sends nothing more
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._refuse(status, message)
        else:
            self.transport.close()

    @property
    def _is_answering(self) -> bool:
        """Whether the headers of a request have arrived, and the response is not complete."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _has_ended(self) -> bool:
        """Whether the connection is closed, and nothing of a response is left for its client to read."""
        return self.transport.is_closing() and not self.transport.get_write_buffer_size()

    @property
    def _is_dispensable(self) -> bool:
        """Whether the connection may be cut for another one."""
        return self.transport.is_closing() or self._is_unread or not self._is_answering

    def _refuse(self, status: int, message: str) -> None:
        """Close the connection with an error, which has to be written by hand: there is no request to respond to."""
        body = json.dumps(RequestError(status, message).openai()).encode()
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nconnection: close\r\ncontent-type: application/json\r\n"
        )
        self.transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        self.transport.close()


class _Parser(h11.Connection):
    """h11's parser of a connection, which refuses bodies in many small chunks."""

    _chunks = _bytes = 0

    def next_event(self) -> Any:
        """
        Raises:
            RemoteProtocolError: malformed HTTP, or too small chunks.
        """
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._chunks = self._bytes = 0
        elif isinstance(event, h11.Data):
            self._chunks += event.chunk_end
            self._bytes += len(event.data)
            if self._bytes < MIN_CHUNK * (self._chunks - FREE_CHUNKS):
                raise h11.RemoteProtocolError("the chunks of a body are too small")
        return event


def _end_at_next_signal() -> None:
    """Let the next signal end the process at once: a running forward or load may take long."""
    for sig in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sig, signal.SIG_DFL)


def _listen(host: str, port: int) -> socket.socket:
    """A socket that already listens, so that clients can ask for the progress while the model is loaded."""
    if not 0 <= port <= MAX_PORT:  # some systems would take the port modulo 65536
        raise UsageError(f"a port is a number from 0 to {MAX_PORT}, not {port}")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        raise UsageError(
            f"cannot listen at {host}, port {port} ({system_error(error)}): try another --port or --host"
        ) from error
