"""Who may talk to the server: looked at before anything else of a request is read."""

from __future__ import annotations

import hmac
import ipaddress
import re
import socket
from collections.abc import Collection
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ondevice.server import page
from ondevice.server.request_error import RequestError

OPEN_PATHS = (*page.FILES, "/health", "/v1/health")
"""Without a key: they tell nothing, and the page asks for the key itself."""

HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^:\[\]]*)(?::\d+)?")


@dataclass(frozen=True)
class Rules:
    """
    hosts : names that clients may call this machine by, beside `localhost`, its own name, and addresses
    origins : of pages in browsers that may use the server; `*` for all
    api_key : that clients must know
    """

    hosts: Collection[str] = ()
    origins: Collection[str] = ()
    api_key: str | None = None


class Guard:
    """An ASGI application in front of another.

    A stranger's page, in a browser on this machine, must not reach the server: neither by a name that it lets point to
    this machine (DNS rebinding), which the Host header tells, nor across origins, which the Origin header tells.
    """

    def __init__(self, app: ASGIApp, rules: Rules) -> None:
        self._app = app
        self._rules = rules
        own = socket.gethostname().lower()
        self._hosts = {"localhost", own, f"{own}.local", *(host.lower() for host in rules.hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        try:
            self._check_host(headers.get("host", ""))
            foreign = origin is not None and self._is_foreign(origin, headers.get("host", ""))
            if foreign and "access-control-request-method" in headers and scope["method"] == "OPTIONS":
                response: ASGIApp = Response(status_code=204, headers=_preflight(headers))
            else:
                self._check_key(scope["path"], headers)
                response = self._app
        except RequestError as error:
            foreign = False
            response = JSONResponse(error.body(scope["path"]), error.status, error.headers)
        await response(scope, receive, _allowing(origin, send) if foreign and origin else send)

    def _check_host(self, header: str) -> None:
        match = HOST.fullmatch(header)
        host = match[1].lower().removesuffix(".") if match else ""
        if host not in self._hosts and not _is_address(host):
            raise RequestError(
                403, f"this server is not called {header!r:.99}: start it with --allow-host to let it be"
            )

    def _is_foreign(self, origin: str, host: str) -> bool:
        """Whether another origin's page asks.

        Raises:
            RequestError: one that may not.
        """
        if urlsplit(origin).netloc.lower() == host.lower():
            return False
        if "*" not in self._rules.origins and origin not in self._rules.origins:
            raise RequestError(403, f"pages of {origin!r:.99} may not use this server: start it with --allow-origin")
        return True

    def _check_key(self, path: str, headers: Headers) -> None:
        key = self._rules.api_key
        if key is None or path in OPEN_PATHS:
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        given = given.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        if not hmac.compare_digest(given.encode(), key.encode()):
            raise RequestError(401, "this server needs its API key: `Authorization: Bearer KEY`, or `x-api-key: KEY`")


def _is_address(host: str) -> bool:
    """An address is no name that a stranger could let point here."""
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


def _preflight(headers: Headers) -> dict[str, str]:
    asked = headers.get("access-control-request-headers", "")
    return {"Access-Control-Allow-Methods": "GET, POST", "Access-Control-Allow-Headers": asked or "content-type"}


def _allowing(origin: str, send: Send) -> Send:
    """Let the page of another origin read the answer."""

    async def send_allowing(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers["Access-Control-Allow-Origin"] = origin
            headers.add_vary_header("Origin")
        await send(message)

    return send_allowing
