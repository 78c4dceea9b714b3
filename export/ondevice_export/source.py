"""Where a checkpoint comes from: a directory, or the hub."""

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
    """A checkpoint on this machine."""

    directory: Path
    id: str
    """The hub id, or the directory's name: a bundle tells no one's paths."""
    revision: str | None = None


class _AbsentError(CheckpointError):
    """The hub, or the local cache when offline, does not have a repository."""


def locate(source: str, revision: str | None = None) -> Checkout:
    """Find a checkpoint, downloading it from the hub where it is no directory.

    Raises:
        CheckpointError: there is no such directory or repository, or it cannot be reached.
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
    """The drafter of a target.

    Args:
        drafter: `none`, `auto` (the hub's `<id>-assistant`; for a directory its sibling or child `drafter`, or
            `<directory>-assistant`), or a source of its own.
        target: what it drafts for.
        note: told when `auto` finds nothing.
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
    """Hub ids of drafters that a target may have: a variant that was trained quantised has the plain model's too."""
    plain, found, _ = target.partition("-qat-")
    return [f"{target}-assistant", *([f"{plain}-assistant"] if found else [])]


def locate_heads(heads: str, target: Checkout) -> Checkout | None:
    """The heads of a target: `none`, `auto` (the directory `heads` beside or in the target's), or a directory."""
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
    """What a bundle is called when the user does not say: the id's last part, a directory `target` its parent's."""
    name = target.id.rsplit("/", 1)[-1]
    return target.directory.parent.name if name == "target" else name


def _download(source: str, revision: str | None) -> Checkout:
    try:
        from huggingface_hub import errors, snapshot_download
    except ImportError as error:
        raise MissingDependencyError("huggingface_hub", "export") from error
    try:
        # Interrupted downloads resume; HF_HUB_OFFLINE, HF_TOKEN and the cache's place are the library's business.
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
