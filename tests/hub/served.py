"""A hub on this machine that misbehaves in the ways that hubs and lines do."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote


@dataclass
class Hub:
    """
    files : by repository, revision and name, as the path says them
    faults : by a file's name, what happens to its next requests, in order; None is nothing
    seen : requests: path, Range, Authorization
    """

    files: dict[str, bytes] = field(default_factory=dict)
    faults: dict[str, list[str | None]] = field(default_factory=dict)
    seen: list[tuple[str, str | None, str | None]] = field(default_factory=list)
    url: str = ""
    commit: str = "c0ffee"
    needed_token: str | None = None
    knows_ranges: bool = True
    moved_to: str | None = None
    on_request: Callable[[str], None] = lambda path: None

    def offer(self, repository: str, directory: Path, revision: str = "main") -> None:
        """All files of a directory, under the revision and the commit that it is."""
        for path in directory.rglob("*"):
            if path.is_file():
                for named in (revision, self.commit):
                    key = f"/{repository}/resolve/{named}/{path.relative_to(directory).as_posix()}"
                    self.files[key] = path.read_bytes()

    def describe(self, repository: str, directory: Path) -> None:
        """What huggingface_hub asks about a repository before it downloads files."""
        names = sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())
        about = {"id": repository, "sha": self.commit, "siblings": [{"rfilename": name} for name in names]}
        tree = [
            {"type": "file", "path": name, "oid": self.commit, "size": (directory / name).stat().st_size}
            for name in names
        ]
        for revision in ("main", self.commit):
            address = f"/api/models/{repository}"
            self.files[f"{address}/revision/{revision}"] = json.dumps(about).encode()
            self.files[f"{address}/tree/{revision}?recursive=true&expand=false"] = json.dumps(tree).encode()

    def asked(self, name: str) -> list[str | None]:
        """The ranges that a file was asked for."""
        return [part for path, part, _ in self.seen if path.endswith(f"/{name}")]


@contextmanager
def serving() -> Iterator[Hub]:
    hub = Hub()

    class Handler(_Handler):
        pass

    Handler.hub = hub
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        """As GET, without the content: what huggingface_hub asks before a download."""
        content = self.hub.files.get(unquote(self.path))
        about = {"X-Repo-Commit": self.hub.commit}
        if content is not None:
            about |= {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "Content-Length": str(len(content))}
        self._answer(404 if content is None else 200, about)

    def do_GET(self) -> None:
        hub, path = self.hub, unquote(self.path)
        hub.seen.append((path, self.headers.get("Range"), self.headers.get("Authorization")))
        hub.on_request(path)
        if hub.moved_to is not None:
            self._answer(302, {"Location": hub.moved_to + path})
            return
        if hub.needed_token and self.headers.get("Authorization") != f"Bearer {hub.needed_token}":
            self._answer(401, {"X-Error-Code": "GatedRepo"})
            return
        content = hub.files.get(path)
        if content is None:
            known = any(key.startswith("/".join(path.split("/")[:3]) + "/") for key in hub.files)
            self._answer(404, {"X-Error-Code": "EntryNotFound" if known else "RepoNotFound"})
            return
        faults = hub.faults.get(path.rsplit("/", 1)[1], [])
        self._send(content, faults.pop(0) if faults else None)

    def _send(self, content: bytes, fault: str | None) -> None:
        if fault and fault.isdecimal():
            self._answer(int(fault), {})
            return
        first = 0
        headers = {"X-Repo-Commit": self.hub.commit}
        if (wanted := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))) and self.hub.knows_ranges:
            first = int(wanted[1])
            if first >= len(content):
                self._answer(416, {})
                return
            begins = first + 1 if fault == "shifted" else first
            headers["Content-Range"] = f"bytes {begins}-{len(content) - 1}/{len(content)}"
        body = content[first:]
        if fault == "altered":
            body = bytes([body[0] ^ 1]) + body[1:]
        headers["Content-Length"] = str(len(body) + (7 if fault == "too long" else 0))
        if fault == "endless":
            del headers["Content-Length"]
            body += b"more"
        sent = body[: len(body) // 2] if fault == "broken" else body
        self._answer(206 if "Content-Range" in headers else 200, headers, sent)

    def _answer(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.close_connection = True
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(ConnectionError):  # a client that has seen enough
            self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        pass
