"""`ondevice pull`: download a ready bundle from the Hugging Face hub into the model home.

`huggingface_hub` supplies endpoint, token, offline mode, proxies, redirects and error classes. The files themselves are
streamed here and not by its `snapshot_download`: since version 2 that deletes a partial file when it ends and begins a
killed download again from byte 0 (huggingface_hub PR 4228), which for `target.onnx.data` means gigabytes. Here every
byte that reached the disk is kept, and a file counts as downloaded when its sha256 is that of bundle.json.

A bundle grows in `.NAME.fetching` in the model home, and is renamed to `NAME` when it is complete.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar
from urllib.parse import urlsplit

from ondevice import __version__, machine
from ondevice.bundle import MANIFEST, MAX_BYTES, Bundle, check_names, model_home, sha256
from ondevice.bundle_format.manifest import FileEntry, Manifest
from ondevice.errors import (
    BundleCorruptError,
    BundleError,
    HubError,
    MissingDependencyError,
    UsageError,
    one_line,
    reason,
)
from ondevice.files import lock, rename_over
from ondevice.progress import Advance, Progress, counted, silent

_log = logging.getLogger("ondevice")

PIECE = 1 << 20
"""Bytes read from a response at a time."""

TIMEOUT_S = 30.0
"""Longest wait for a connection or for the next byte."""

MAX_FAILURES = 6
"""Consecutive requests without a new byte before the download gives up."""

PAUSE_S = 0.5
"""Wait after the first failed request; it doubles after each further one."""

TRANSIENT = (408, 425, 429, 500, 502, 503, 504)
"""HTTP statuses after which the request is repeated."""

_UNFINISHED = ".fetching"
_NAME = re.compile(r"[\w-][\w.+-]*")
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_T = TypeVar("_T")


def pull(
    repository: str,
    *,
    revision: str = "main",
    name: str | None = None,
    replace: bool = False,
    on_progress: Progress | None = silent,
) -> Path:
    """Download a bundle, or the missing rest of one, and check the sha256 of every file.

    Args:
        repository: OWNER/NAME on the hub that HF_ENDPOINT names; HF_TOKEN or `hf auth login` give the access token.
        revision: branch, tag or commit.
        name: name of the bundle under the model home (`$ONDEVICE_HOME`, else `~/.ondevice`); None: that of the
            repository.
        replace: whether to replace another bundle of that name.
        on_progress: called with the bytes that are on the disk and the bundle's size. An exception from it ends the
            download; the next call continues with the rest.

    Returns:
        The bundle's directory, which appears when the bundle is complete.

    Raises:
        HubError: the bundle is absent, not permitted, out of reach or damaged, or the disk is too small.
        BundleError: the repository's bundle cannot be read by this version.
        UsageError: a malformed repository or bundle name, or a name that is taken.
        MissingDependencyError: huggingface_hub is not installed.
    """
    if not isinstance(repository, str) or not _REPOSITORY.fullmatch(repository):
        raise UsageError(f"{repository!r:.99} is not a repository: they are named OWNER/NAME")
    destination = Destination(repository.partition("/")[2] if name is None else name)
    content, remote = _fetch_manifest(_Remote.of_environment(repository, revision))
    manifest = _checked(content, repository, destination.path)
    if destination.has(manifest):
        return destination.path
    if destination.is_taken and not replace:
        raise UsageError(
            f"another bundle is called {destination.name} in {model_home()}: pass --replace to replace it, or --name "
            "to give the new one another name"
        )
    with destination.lock() as directory:
        destination.keep_only(manifest)
        _check_free_space(manifest, directory)
        if (warning := machine.memory_warning(manifest.weight_bytes)) is not None:
            _log.warning("%s: %s", destination.name, warning)
        advance = counted(on_progress or silent, manifest.size)
        for file, entry in manifest.files.items():
            _download(remote, file, entry, directory / file, advance)
        (directory / MANIFEST).write_bytes(content)
        Bundle.open(directory)
        destination.publish()
    return destination.path


def is_published(repository: str) -> bool:
    """Whether a repository on the hub has a bundle; False too where the hub does not answer."""
    return _Remote.of_environment(repository, "main").has(MANIFEST)


def unfinished_names() -> list[str]:
    """Names of bundles whose download is incomplete."""
    found = model_home().glob(f".*{_UNFINISHED}")
    return sorted(path.name.removeprefix(".").removesuffix(_UNFINISHED) for path in found if path.is_dir())


def check_environment() -> None:
    """Check the variables of which `huggingface_hub` makes requests.

    Raises:
        HubError: HF_ENDPOINT is no address, or HF_TOKEN cannot be in a header.
    """
    endpoint, token = os.environ.get("HF_ENDPOINT"), os.environ.get("HF_TOKEN", "")
    if endpoint and not re.match(r"https?://\w", endpoint):
        raise HubError(f"HF_ENDPOINT must begin with https://, not {endpoint!r:.99}")
    if not token.isascii() or not token.strip().isprintable():
        raise HubError("HF_TOKEN is not an access token: it has characters that no header may have")


class Destination:
    """Directories of one bundle name under the model home.

    Attributes:
        path: the complete bundle.
        unfinished: the bundle while it is downloaded. It stays when the process is killed.
    """

    def __init__(self, name: str) -> None:
        """
        Raises:
            UsageError: `name` cannot be a directory's name.
        """
        if not isinstance(name, str) or not _NAME.fullmatch(name) or len(name) > 200:
            raise UsageError(f"{name!r:.99} is not a valid bundle name: use letters, digits, points and hyphens")
        self.name = name
        self.path = model_home() / name
        self.unfinished = self.path.with_name(f".{name}{_UNFINISHED}")

    @property
    def is_taken(self) -> bool:
        """Whether anything has the bundle's name."""
        return self.path.exists() or self.path.is_symlink()

    def has(self, manifest: Manifest) -> bool:
        """Whether the complete bundle is there and has this manifest."""
        try:
            return Bundle.open(self.path).manifest == manifest
        except BundleError:
            return False

    @contextmanager
    def lock(self) -> Iterator[Path]:
        """Create `unfinished` and lock it for this process; Windows has no such lock.

        Raises:
            UsageError: another process holds the lock.
        """
        self.unfinished.mkdir(parents=True, exist_ok=True)
        handle = None if sys.platform == "win32" else os.open(self.unfinished, os.O_RDONLY | os.O_DIRECTORY)
        try:
            if handle is not None and (lock(handle) is False or not self._is_here(handle)):
                raise UsageError(f"another process downloads {self.name}: wait until it ends")
            yield self.unfinished
        finally:
            if handle is not None:
                os.close(handle)

    def _is_here(self, handle: int) -> bool:
        """Whether an open directory is still `unfinished`: another process may have renamed it before it was locked."""
        with suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(handle), self.unfinished.stat())
        return False

    def keep_only(self, manifest: Manifest) -> None:
        """Delete files that an earlier run downloaded and that this manifest does not list."""
        for path in self.unfinished.rglob("*"):
            if path.is_file() and path.relative_to(self.unfinished).as_posix() not in manifest.files:
                path.unlink()

    def publish(self) -> None:
        """Rename `unfinished` to `path`, and delete the bundle that was there."""
        retired = self.path.with_name(f".{self.name}.old-{secrets.token_hex(4)}")  # `ondevice export` restores it
        rename_over(self.unfinished, self.path, retired)
        if retired.is_symlink():
            retired.unlink()
        else:
            shutil.rmtree(retired, ignore_errors=True)


class _ConnectionLostError(Exception):
    """A request that failed for a reason that may be gone at the next attempt."""


class _AbsentError(HubError):
    """No such repository, revision or file."""


class _Remote(NamedTuple):
    """One revision of a repository on a hub."""

    repository: str
    revision: str
    endpoint: str

    @classmethod
    def of_environment(cls, repository: str, revision: str) -> _Remote:
        """The repository on the hub that HF_ENDPOINT names.

        Raises:
            HubError: see `check_environment`.
            MissingDependencyError: huggingface_hub is not installed.
        """
        try:
            from huggingface_hub import constants
        except ImportError as error:
            raise MissingDependencyError("huggingface_hub", what="`ondevice pull`") from error
        check_environment()
        return cls(repository, revision, (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/"))

    @contextmanager
    def open(self, name: str, first: int = 0) -> Iterator[Any]:
        """Request a file from byte `first` on; yields the streaming response of httpx.

        The response may begin at another byte: see `Content-Range`. Errors of the connection are translated while the
        body is read, too.

        Raises:
            _AbsentError: there is no such file.
            _ConnectionLostError: the next attempt may succeed.
            HubError: no attempt will succeed.
        """
        from huggingface_hub import get_session, hf_hub_url
        from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
        from huggingface_hub.errors import HTTPError as ClientError  # type: ignore[attr-defined]  # httpx or httpx2
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]  # lazy

        url = hf_hub_url(self.repository, name, revision=self.revision, endpoint=self.endpoint)
        # identity: a proxy that compresses the body would change the bytes that Range counts
        headers = build_hf_headers(library_name="ondevice", library_version=__version__) | {
            "Accept-Encoding": "identity"
        }
        headers |= {"Range": f"bytes={first}-"} if first else {}
        try:
            with get_session().stream(
                "GET", url, headers=headers, timeout=TIMEOUT_S, follow_redirects=True
            ) as response:
                hf_raise_for_status(response)
                if urlsplit(self.endpoint).scheme == "https" and response.url.scheme != "https":
                    raise HubError(f"{self.endpoint} redirects to an address without encryption")
                yield response
        except ImportError as error:
            raise HubError(f"{self.endpoint} cannot be reached: {reason(error)}") from error
        except OfflineModeIsEnabled as error:
            raise HubError("HF_HUB_OFFLINE is set: unset it to reach the hub") from error
        except HfHubHTTPError as error:
            raise self._refusal(error.response, name) from error
        except ClientError as error:
            if "CERTIFICATE_VERIFY_FAILED" in str(error):
                raise HubError(f"{self.endpoint} cannot be trusted: {reason(error)}") from error
            raise _ConnectionLostError(f"{self.endpoint} is out of reach: {reason(error)}") from error

    def has(self, name: str) -> bool:
        """Whether the file exists; False too where the hub does not answer."""
        try:
            with self.open(name):
                return True
        except (HubError, _ConnectionLostError):
            return False

    def _refusal(self, response: Any, name: str) -> Exception:
        where, status = f"{self.repository} on {self.endpoint}", response.status_code
        if status in TRANSIENT:
            return _ConnectionLostError(f"{self.endpoint} answers {status} {one_line(response.reason_phrase)}")
        if status in (401, 403):
            return HubError(
                f"{where} does not exist, or needs permission: accept its terms on its page, then `hf auth login` or "
                "set HF_TOKEN"
            )
        if status == 404:
            unknown = response.headers.get("X-Error-Code") == "RevisionNotFound"
            return _AbsentError(f"{where}: there is no {f'revision {self.revision}' if unknown else name}")
        if status == 416:
            return HubError(f"{where}: {name} is shorter than bundle.json says")
        return HubError(f"{where}: {name} cannot be read, the hub answers {status}")


def _download(remote: _Remote, name: str, entry: FileEntry, path: Path, advance: Advance) -> None:
    """Download one file of a bundle, or the rest of it, and check its sha256.

    Args:
        path: the local file; bytes that it has already are kept, unless the sha256 shows that they are wrong.
        advance: called with the number of new bytes, negative where bytes are discarded.

    Raises:
        HubError: the hub cannot be reached, or its file differs from bundle.json.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    begun = path.is_file() and 0 < path.stat().st_size <= entry.size
    for mode in ("ab", "wb") if begun else ("wb",):
        with path.open(mode) as file:
            advance(file.tell())
            _repeated(partial(_append, remote, name, entry, file, advance), name, file.tell)
            file.flush()
            os.fsync(file.fileno())
        if sha256(path) == entry.sha256:
            return
        advance(-entry.size)
    path.unlink()
    raise HubError(f"{name} of {remote.repository} is damaged or was altered: its sha256 is wrong")


def _append(remote: _Remote, name: str, entry: FileEntry, file: BinaryIO, advance: Advance) -> None:
    """Append to `file`, open at its end, the bytes that one request brings.

    Raises:
        _ConnectionLostError: bytes are still missing.
    """
    try:
        if file.tell() < entry.size:
            with remote.open(name, file.tell()) as response:
                _receive(response, f"{name} of {remote.repository}", entry, file, advance)
    except _ConnectionLostError:
        if file.tell() < entry.size:
            raise
    if file.tell() < entry.size:
        raise _ConnectionLostError("the connection was closed")


def _receive(response: Any, where: str, entry: FileEntry, file: BinaryIO, advance: Advance) -> None:
    first, total = _byte_range(response)
    if total not in (None, entry.size):
        raise HubError(f"{where} has {total} bytes, and bundle.json says {entry.size}")
    if first == 0:  # where bytes are there, the server ignores Range and sends the whole file
        advance(-file.tell())
        file.seek(0)
        file.truncate()
    elif first != file.tell():
        raise _ConnectionLostError(f"the server sent bytes from {first} on instead of {file.tell()}")
    for piece in response.iter_bytes(PIECE):
        if file.tell() + len(piece) > entry.size:
            raise HubError(f"{where} is longer than bundle.json says")
        file.write(piece)
        advance(len(piece))


def _repeated(request: Callable[[], _T], name: str, length: Callable[[], int] = lambda: 0) -> _T:
    """Repeat a request until it succeeds.

    Args:
        name: the file, for the error.
        length: bytes received so far. A failed request that brought some does not count towards `MAX_FAILURES`.

    Raises:
        HubError: `MAX_FAILURES` consecutive requests failed.
    """
    failures = 0
    while True:
        before = length()
        try:
            return request()
        except _ConnectionLostError as error:
            failures = 1 if length() > before else failures + 1
            if failures == MAX_FAILURES:
                raise HubError(
                    f"{name} could not be downloaded whole: {error}. The same command continues from here"
                ) from error
        time.sleep(PAUSE_S * 2 ** (failures - 1))


def _byte_range(response: Any) -> tuple[int, int | None]:
    """First byte of a response's body in its file, and the file's length where the response says it."""
    if response.status_code == 206:
        found = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", ""))
        if found is None:
            raise _ConnectionLostError("the server does not say which bytes it sends")
        return int(found[1]), None if found[2] == "*" else int(found[2])
    length = response.headers.get("Content-Length", "")
    return 0, int(length) if length.isdecimal() else None


def _fetch_manifest(remote: _Remote) -> tuple[bytes, _Remote]:
    """bundle.json, and the repository at the commit that the file is from: a branch may move during the download."""

    def request() -> tuple[bytes, str]:
        with remote.open(MANIFEST) as response:
            content = bytearray()
            for piece in response.iter_bytes(PIECE):
                content += piece
                if len(content) > MAX_BYTES:
                    break
            answers = [response, *response.history]
            commits = [each.headers["X-Repo-Commit"] for each in answers if "X-Repo-Commit" in each.headers]
            return bytes(content), commits[0] if commits else remote.revision

    try:
        content, commit = _repeated(request, f"bundle.json of {remote.repository}")
    except _AbsentError as error:
        if remote.has("config.json"):
            raise HubError(
                f"{remote.repository} holds a checkpoint and no bundle: `ondevice export {remote.repository}` makes "
                "one of it"
            ) from error
        raise
    return content, remote._replace(revision=commit)


def _checked(content: bytes, repository: str, out: Path) -> Manifest:
    try:
        if len(content) > MAX_BYTES:
            raise BundleCorruptError(f"bundle.json has more than {MAX_BYTES} bytes")
        manifest = Manifest.from_json(content.decode("utf-8"))
        check_names(out, manifest)
        if MANIFEST in manifest.files or manifest.altered:
            raise BundleCorruptError("bundle.json was altered")
    except UnicodeDecodeError as error:
        raise BundleCorruptError(f"{repository}: bundle.json is not UTF-8 text") from error
    except BundleError as error:
        raise type(error)(f"{repository}: {error}") from error
    return manifest


def _check_free_space(manifest: Manifest, directory: Path) -> None:
    there = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    left, free = manifest.size - there, shutil.disk_usage(directory).free
    if left > free:
        raise HubError(
            f"{left / 1e9:.1f} GB are left to download, and {free / 1e9:.1f} GB are free on the disk of "
            f"{directory.parent}: make room, or set ONDEVICE_HOME to a directory on another disk"
        )
