"""`pull`: a ready bundle from the hub into the model home."""

from __future__ import annotations

import dataclasses
import logging
import re
import shutil
import time
from http.client import HTTPException
from pathlib import Path

from ondevice import machine
from ondevice.bundle import MANIFEST, MOST_BYTES, Bundle, check_names, model_home
from ondevice.errors import BundleCorruptError, BundleError, HubError, UsageError, reason
from ondevice.hub import download
from ondevice.hub.place import Place
from ondevice.hub.remote import AbsentError, BrokenConnectionError, Remote
from ondevice.manifest import Manifest
from ondevice.progress import Progress, counted, silent

_log = logging.getLogger("ondevice")

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def pull(
    repository: str,
    *,
    revision: str = "main",
    name: str | None = None,
    replace: bool = False,
    on_progress: Progress | None = silent,
) -> Path:
    """Fetch a bundle, or the rest of one that was begun, and check every file's sha256.

    Args:
        repository: OWNER/NAME, on the hub that HF_ENDPOINT names; HF_TOKEN or `hf auth login` say who reads it.
        revision: branch, tag or commit.
        name: of the bundle under the model home (`$ONDEVICE_HOME`, else `~/.ondevice`); None takes the repository's.
        replace: another bundle of that name.
        on_progress: hears of the bytes that are there. An exception from it ends the download; the rest is fetched by
            the next one.

    Returns:
        The bundle's directory, where it appears when it is complete.

    Raises:
        HubError: it cannot be had: not there, not permitted, not reached, damaged, or no room on the disk.
        BundleError: what is there is no bundle that this version reads.
        UsageError: a name that is none, or taken.
    """
    if not _REPOSITORY.fullmatch(repository):
        raise UsageError(f"{repository!r:.99} is no repository: they are named OWNER/NAME")
    place = Place(repository.partition("/")[2] if name is None else name)
    remote = Remote.of_environment(repository, revision)
    content, remote = _manifest_of(remote)
    manifest = _checked(content, repository, place.out)
    if place.has(manifest):
        return place.out
    if place.is_taken and not replace:
        raise UsageError(
            f"there is another {place.name} in {model_home()}: --replace it, or give this one another --name"
        )
    with place.making() as directory:
        place.keep_only(manifest)
        _check_room(manifest, directory)
        if (warning := machine.memory_warning(manifest.weight_bytes)) is not None:
            _log.warning("%s: %s", place.name, warning)
        advance = counted(on_progress or silent, manifest.size)
        for file, entry in manifest.files.items():
            (directory / file).parent.mkdir(parents=True, exist_ok=True)
            download.Download(remote, file, entry, directory / file, advance).run()
        (directory / MANIFEST).write_bytes(content)
        Bundle.open(directory)
        place.put()
    return place.out


def _manifest_of(remote: Remote) -> tuple[bytes, Remote]:
    """bundle.json, and the commit that it is of: files of a later one would not fit."""
    problem = ""
    for failures in range(download.MOST_FAILURES):
        time.sleep(download.PAUSE_S * (2**failures - 1))
        try:
            with remote.open(MANIFEST) as response:
                content = response.read(MOST_BYTES + 1)
                if not response.length:  # nothing is missing
                    commit = response.headers.get("X-Repo-Commit") or remote.revision
                    return content, dataclasses.replace(remote, revision=commit)
            problem = "the connection was closed"
        except AbsentError as error:
            if remote.has("config.json"):
                raise HubError(
                    f"{remote.repository} holds a checkpoint and no bundle: `ondevice export {remote.repository}` "
                    "makes one of it"
                ) from error
            raise
        except (BrokenConnectionError, OSError, HTTPException) as error:
            problem = reason(error)
    raise HubError(f"{remote.repository} could not be fetched: {problem}")


def _checked(content: bytes, repository: str, out: Path) -> Manifest:
    try:
        if len(content) > MOST_BYTES:
            raise BundleCorruptError(f"bundle.json has more than {MOST_BYTES} bytes")
        manifest = Manifest.from_json(content.decode("utf-8"))
        check_names(out, manifest)
        if MANIFEST in manifest.files or manifest.altered:
            raise BundleCorruptError("bundle.json was altered")
    except UnicodeDecodeError as error:
        raise BundleCorruptError(f"{repository}: bundle.json is not UTF-8 text") from error
    except BundleError as error:
        raise type(error)(f"{repository}: {error}") from error
    return manifest


def _check_room(manifest: Manifest, directory: Path) -> None:
    total = manifest.size
    there = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    free = shutil.disk_usage(directory).free
    if total - there > free:
        raise HubError(
            f"{(total - there) / 1e9:.1f} GB are left to fetch, and {free / 1e9:.1f} GB are free on the disk of "
            f"{directory.parent}: make room, or set ONDEVICE_HOME to a place on another disk"
        )
