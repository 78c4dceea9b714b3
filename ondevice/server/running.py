"""A server from its first socket to its last reply."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType

import uvicorn

from ondevice.bundle import Bundle
from ondevice.errors import UsageError
from ondevice.model import Model
from ondevice.progress import OnPrepare
from ondevice.server.app import make_app
from ondevice.server.guard import Rules
from ondevice.server.metrics import Metrics
from ondevice.server.places import Places
from ondevice.server.request_error import RequestError
from ondevice.server.residence import Residence, StoppedError
from ondevice.server.service import Service

MOST_PORT = 65535


@dataclass(frozen=True)
class Setup:
    """
    host, port : to listen at; port 0 takes a free one
    places : replies at a time, as many as the model has sequences
    most_waiting : requests that may wait for one of them
    idle_s : seconds without a request after which the model's memory is given back; None keeps it
    rules : who may talk to the server
    """

    host: str = "127.0.0.1"
    port: int = 0
    places: int = 4
    most_waiting: int = 32
    idle_s: float | None = None
    rules: Rules = field(default_factory=Rules)


class Server:
    """Listens from the moment it is made; answers while it runs."""

    def __init__(self, bundle: Bundle, load: Callable[[OnPrepare], Model], setup: Setup) -> None:
        """
        Args:
            load: makes the bundle's model; called in another thread.

        Raises:
            UsageError: it cannot listen there.
        """
        self._socket = _listening(setup.host, setup.port)
        self.host = setup.host
        self.port = int(self._socket.getsockname()[1])
        self._residence = Residence(load, setup.idle_s)
        service = Service(bundle, self._residence, Places(setup.places, setup.most_waiting), Metrics())
        config = uvicorn.Config(
            make_app(service, setup.rules),
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            proxy_headers=False,
            http="h11",
            loop="asyncio",
        )
        self._uvicorn = _Uvicorn(config, self._residence)
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        return ipaddress.ip_address(self._socket.getsockname()[0]).is_loopback

    def run(self) -> signal.Signals | None:
        """Answer until `stop`, or until a signal comes, which is returned. Raises what loading the model does."""
        asyncio.run(self._run())
        return self._uvicorn.signal

    def stop(self) -> None:
        """End `run` soon: replies are cancelled. From any thread."""
        self._uvicorn.should_exit = True

    async def _run(self) -> None:
        loading = asyncio.create_task(self._residence.start())
        loading.add_done_callback(lambda task: self.stop() if task.exception() else None)
        try:
            await self._uvicorn.serve([self._socket])
        finally:
            self._residence.close()
            self._socket.close()
            if self._uvicorn.signal is not None:  # which uvicorn has put back as they were
                _end_at_once()
        with contextlib.suppress(StoppedError, RequestError):  # it ended before the model was there
            await loading


class _Uvicorn(uvicorn.Server):
    """Uvicorn that cancels replies when it is to end, instead of waiting for them."""

    def __init__(self, config: uvicorn.Config, residence: Residence) -> None:
        super().__init__(config)
        self._residence = residence
        self.signal: signal.Signals | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal ends all replies; a second one ends the process at once."""
        self.signal = signal.Signals(sig)
        self.should_exit = True
        _end_at_once()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._residence.close()
        await super().shutdown(sockets)


def _end_at_once() -> None:
    """Let the next signal do so: what still runs, a forward or a loading, may take long."""
    for sig in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sig, signal.SIG_DFL)


def _listening(host: str, port: int) -> socket.socket:
    """A socket that listens already: who connects while the model is loaded hears so."""
    if not 0 <= port <= MOST_PORT:  # some systems would take the rest of a division
        raise UsageError(f"a port is a number from 0 to {MOST_PORT}, not {port}")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        raise UsageError(f"cannot listen at {host}, port {port} ({error}): try another --port or --host") from error
