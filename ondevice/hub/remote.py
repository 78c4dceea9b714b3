"""Files of a repository on the hub: where they are, who may read them, and what the answers mean."""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from email.message import Message
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import IO
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from ondevice import __version__
from ondevice.errors import HubError, reason
from ondevice.machine import expanded, home

HUB = "https://huggingface.co"
PATIENCE_S = 30.0
"""For a byte."""

FOR_NOW = (408, 425, 429, 500, 502, 503, 504)
"""Statuses that say nothing about the next attempt."""


class BrokenConnectionError(Exception):
    """What may work the next time."""


class AbsentError(HubError):
    """There is no such repository, revision or file."""


@dataclass(frozen=True)
class Remote:
    """A revision of a repository."""

    repository: str
    revision: str
    endpoint: str = HUB
    token: str | None = None

    @classmethod
    def of_environment(cls, repository: str, revision: str, environment: Mapping[str, str] = os.environ) -> Remote:
        """On the hub that HF_ENDPOINT names, read with HF_TOKEN or with what `hf auth login` has kept.

        Raises:
            HubError: HF_HUB_OFFLINE is set, or the endpoint is none.
        """
        if environment.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
            raise HubError("HF_HUB_OFFLINE is set: unset it to reach the hub")
        endpoint = (environment.get("HF_ENDPOINT") or HUB).rstrip("/")
        if urlsplit(endpoint).scheme not in ("https", "http"):
            raise HubError(f"HF_ENDPOINT must begin with https://, not {endpoint!r:.99}")
        return cls(repository, revision, endpoint, environment.get("HF_TOKEN") or _kept_token(environment))

    def open(self, name: str, first: int = 0) -> HTTPResponse:
        """A file from its byte `first` on. The answer may begin elsewhere: Content-Range says where.

        Raises:
            AbsentError: it is not there.
            BrokenConnectionError: another attempt may succeed.
            HubError: none would.
        """
        url = f"{self.endpoint}/{self.repository}/resolve/{quote(self.revision, safe='')}/{quote(name)}"
        # files as they are: a proxy that packs them would change what Range counts
        headers = {"User-Agent": f"ondevice/{__version__}", "Accept-Encoding": "identity"}
        request = Request(url, headers=headers | ({"Range": f"bytes={first}-"} if first else {}))
        if self.token:
            request.add_unredirected_header("Authorization", f"Bearer {self.token}")
        try:
            opened: HTTPResponse = build_opener(_Redirects).open(request, timeout=PATIENCE_S)
        except HTTPError as error:
            with error:
                raise self._refusal(error, name) from error
        except (URLError, OSError, HTTPException) as error:
            cause = error.reason if isinstance(error, URLError) else error
            if isinstance(cause, ssl.SSLCertVerificationError):
                raise HubError(f"{self.endpoint} cannot be trusted: {reason(cause)}") from error
            raise BrokenConnectionError(f"{self.endpoint} is out of reach: {reason(error)}") from error
        except ValueError as error:
            raise HubError(f"{self.endpoint} cannot be asked: {reason(error)}") from error
        return opened

    def has(self, name: str) -> bool:
        """Whether there is such a file, as far as the hub can be asked."""
        try:
            self.open(name).close()
        except (HubError, BrokenConnectionError):
            return False
        return True

    def _refusal(self, error: HTTPError, name: str) -> Exception:
        where = f"{self.repository} on {self.endpoint}"
        if error.code in FOR_NOW:
            return BrokenConnectionError(f"{self.endpoint} answers {error.code} {reason(Exception(error.reason))}")
        if error.code in (401, 403):
            return HubError(
                f"{where} does not exist, or needs permission: accept its terms on its page, then `hf auth login` or "
                "set HF_TOKEN"
            )
        if error.code == 404:
            what = {"RevisionNotFound": f"no revision {self.revision}", "EntryNotFound": f"no {name}"}
            return AbsentError(f"{where}: there is {what.get(error.headers.get('X-Error-Code', ''), f'no {name}')}")
        if error.code == 416:
            return HubError(f"{where}: {name} is shorter than bundle.json says")
        return HubError(f"{where}: {name} cannot be read, the hub answers {error.code}")


class _Redirects(HTTPRedirectHandler):
    """Files lie on other hosts, to whom the token is not told; the hub itself may send to another of its own pages."""

    def redirect_request(  # noqa: PLR0917
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> Request | None:
        made = super().redirect_request(req, fp, code, msg, headers, newurl)  # type: ignore[arg-type]
        if made is None:
            return None
        before, after = urlsplit(req.full_url), urlsplit(made.full_url)
        if (before.scheme, after.scheme) == ("https", "http"):
            raise URLError("it sends to a place without encryption")
        token = req.unredirected_hdrs.get("Authorization")
        if token and (before.scheme, before.netloc) == (after.scheme, after.netloc):
            made.add_unredirected_header("Authorization", token)
        return made


def _kept_token(environment: Mapping[str, str]) -> str | None:
    """What `hf auth login` wrote."""
    cache = expanded(environment.get("XDG_CACHE_HOME") or home() / ".cache")
    hub_home = expanded(environment.get("HF_HOME") or cache / "huggingface")
    try:
        kept = Path(environment.get("HF_TOKEN_PATH") or hub_home / "token").read_text("ascii").strip()
    except (OSError, ValueError):
        return None
    return kept or None
