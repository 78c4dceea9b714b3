"""Finds checkpoints: local directories, or repositories on the hub, which are downloaded."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ondevice.errors import CheckpointError, MissingDependencyError
from ondevice.machine import expanded

Note = Callable[[str], None]

_PATTERNS = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "*.safetensors",
    "*.safetensors.index.json",
]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True)
class Checkout:
    """A checkpoint's directory on this machine."""

    directory: Path
    id: str
    """The hub id, or the directory's name: a bundle does not record local paths."""
    revision: str | None = None


class _AbsentError(CheckpointError):
    """The hub, or when offline the local cache, does not have a repository."""


def locate(source: str, revision: str | None = None) -> Checkout:
    """Find a checkpoint: a local directory, or else a repository that is downloaded from the hub.

    Raises:
        CheckpointError: there is no such directory or repository, or the hub cannot be reached.
    """
    directory = expanded(source)
    if directory.is_dir():
        if revision is not None:
            raise CheckpointError(f"{source} is a directory: a revision belongs to a hub id")
        return Checkout(directory.resolve(), directory.resolve().name)
    if source.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(source):
        raise CheckpointError(f"{source} is neither a directory nor a hub id such as google/gemma-4-E2B-it")
    return _download(source, revision)


def locate_drafter(drafter: str, target: Checkout, note: Note) -> Checkout | None:
    """Find the drafter of a target; None if there is none.

    Args:
        drafter: `none`; `auto` (the hub's `<id>-assistant`; for a directory its sibling or child `drafter`, or
            `<directory>-assistant`); or a directory or hub id.
        target: the target's checkpoint.
        note: called with a message if `auto` finds nothing.
    """
    if drafter == "none":
        return None
    if drafter != "auto":
        return locate(drafter)
    if target.revision is not None:
        for name in _assistants(target.id):
            try:
                return locate(name)
            except _AbsentError:
                note(f"no drafter: {name} was not found")
        return None
    directory = target.directory
    for found in (
        directory.parent / "drafter",
        directory / "drafter",
        directory.with_name(directory.name + "-assistant"),
    ):
        if (found / "config.json").is_file() and found != directory:
            return locate(str(found))
    note(f"no drafter beside {directory.name}: name one with --drafter")
    return None


def _assistants(target: str) -> list[str]:
    """Candidate hub ids of a target's drafter; a variant that was trained quantised may use the plain model's."""
    plain, found, _ = target.partition("-qat-")
    return [f"{target}-assistant", *([f"{plain}-assistant"] if found else [])]


def locate_heads(heads: str, target: Checkout) -> Checkout | None:
    """Find the heads of a target; None if there are none.

    `heads` is `none`, `auto` (the directory `heads` in the target's directory or next to it), or a directory.
    """
    if heads == "none":
        return None
    if heads != "auto":
        return locate(heads)
    directory = target.directory
    for found in (directory.parent / "heads", directory / "heads"):
        if (found / "config.json").is_file() and found != directory:
            return locate(str(found))
    return None


def default_name(target: Checkout) -> str:
    """The default name of a bundle: the last part of the target's id; the parent's name for a directory `target`."""
    name = target.id.rsplit("/", 1)[-1]
    return target.directory.parent.name if name == "target" else name


def _download(source: str, revision: str | None) -> Checkout:
    try:
        from huggingface_hub import errors, snapshot_download
    except ImportError as error:
        raise MissingDependencyError("huggingface_hub", "export") from error
    try:
        # The library resumes interrupted downloads and handles HF_HUB_OFFLINE, HF_TOKEN and the cache directory.
        path = snapshot_download(source, revision=revision, allow_patterns=_PATTERNS, ignore_patterns=["*/*"])
    except errors.GatedRepoError as error:
        raise CheckpointError(f"{source} is gated: accept its licence on the hub, then `hf auth login`") from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(f"{source} has no revision {revision!r}") from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise _AbsentError(f"{source} is no directory here and no repository you can read on the hub") from error
    except errors.LocalEntryNotFoundError as error:
        raise _AbsentError(
            f"{source} is neither a directory nor in the local cache, and the hub is out of reach"
        ) from error
    except (errors.HfHubHTTPError, ConnectionError) as error:
        raise CheckpointError(f"{source} could not be downloaded: {str(error).splitlines()[0]}") from error
    directory = Path(path)
    return Checkout(directory, source, directory.name)
