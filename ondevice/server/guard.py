"""Access control by Host header, Origin header and API key, checked before a request is read further."""

from __future__ import annotations

import hmac
import ipaddress
import re
import socket
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ondevice.errors import UsageError, shown
from ondevice.server import page
from ondevice.server.requests import RequestError

OPEN_PATHS = (*page.FILES, "/health", "/v1/health")
"""Paths without an API key: they reveal nothing, and the page itself asks the user for the key."""

KEY = re.compile(r"[!-~]+")
HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^:\[\]]*)(?::\d+)?")


@dataclass(frozen=True)
class Rules:
    """
    hosts : accepted in the Host header, in addition to `localhost`, this machine's name, and all IP addresses
    origins : origins of browser pages that may use the server; `*` for all
    api_key : that clients must send; None for no key

    Raises:
        UsageError: a key that a header cannot carry. Some clients send letters outside ASCII as UTF-8, others as
            Latin-1, and browsers refuse to send them.
    """

    hosts: Collection[str] = ()
    origins: Collection[str] = ()
    api_key: str | None = None

    def __post_init__(self) -> None:
        if self.api_key is not None and not KEY.fullmatch(self.api_key):
            raise UsageError("an API key consists of ASCII letters, digits and punctuation, without spaces")


class Guard:
    """An ASGI application that checks each request before it calls another application.

    Pages of other sites, open in a browser on this machine, must not reach the server. The Host header shows requests
    that come by a foreign name which resolves to this machine (DNS rebinding), the Origin header those across origins.
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
        origin, foreign = headers.get("origin"), False
        try:
            self._check_host(headers.get("host", ""))
            foreign = origin is not None and self._is_foreign(origin, headers.get("host", ""))
            if foreign and "access-control-request-method" in headers and scope["method"] == "OPTIONS":
                response: ASGIApp = Response(status_code=204, headers=_preflight(headers))
            else:
                self._check_key(scope["path"], headers)
                response = self._app
        except RequestError as error:
            response = JSONResponse(error.body(scope["path"]), error.status, error.headers)
        await response(scope, receive, _allowing(origin, send) if foreign and origin else send)

    def _check_host(self, header: str) -> None:
        match = HOST.fullmatch(header)
        host = match[1].lower().removesuffix(".") if match else ""
        if host not in self._hosts and not _is_address(host):
            raise RequestError(403, f"host {shown(header)} is not allowed: start the server with --allow-host")

    def _is_foreign(self, origin: str, host: str) -> bool:
        """Whether the request comes from a page of another origin.

        Raises:
            RequestError: from one that is not allowed.
        """
        with suppress(ValueError):  # no address, as `http://[`: it is not in the rules either
            if urlsplit(origin).netloc.lower() == host.lower():
                return False
        if "*" not in self._rules.origins and origin not in self._rules.origins:
            raise RequestError(403, f"origin {shown(origin)} is not allowed: start the server with --allow-origin")
        return True

    def _check_key(self, path: str, headers: Headers) -> None:
        key = self._rules.api_key
        if key is None or path in OPEN_PATHS:
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        given = given.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        if not hmac.compare_digest(given.encode(), key.encode()):
            raise RequestError(401, "wrong or missing API key: send `Authorization: Bearer KEY` or `x-api-key: KEY`")


def _is_address(host: str) -> bool:
    """Whether a host is an IP address, which unlike a name cannot be made to resolve to this machine."""
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


def _preflight(headers: Headers) -> dict[str, str]:
    asked = headers.get("access-control-request-headers", "")
    return {
        "Access-Control-Allow-Methods": "GET, POST, DELETE",
        "Access-Control-Allow-Headers": asked or "content-type",
    }


def _allowing(origin: str, send: Send) -> Send:
    """A `send` that adds the headers with which a page of another origin may read the response."""

    async def send_allowing(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers["Access-Control-Allow-Origin"] = origin
            headers.add_vary_header("Origin")
        await send(message)

    return send_allowing
