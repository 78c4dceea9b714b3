"""Finds checkpoints: local directories and GGUF files, or repositories on the hub, which are downloaded."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ondevice.bundle import GGUF, GGUF_PART, name_of_export
from ondevice.errors import CheckpointError, MissingDependencyError, reason
from ondevice.hub import check_environment
from ondevice.machine import expanded

Note = Callable[[str], None]

TOOL_TEMPLATE = "additional_chat_templates/tool_use.jinja"
"""The chat template for tools, where it is a file of its own."""

SPECIAL_TOKENS_MAP = "special_tokens_map.json"
"""The special tokens of older checkpoints, by name."""

_PATTERNS = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    SPECIAL_TOKENS_MAP,
    "chat_template.jinja",
    TOOL_TEMPLATE,
    "*.safetensors",
    "*.safetensors.index.json",
]
_IGNORED = ["*/*.safetensors*", "consolidated*.safetensors"]
"""Weights in folders, as of other formats; all weights once more, under the names of Mistral's own code."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True)
class Checkout:
    """A checkpoint on this machine: a directory, or a GGUF file."""

    directory: Path
    """The directory, or that of the GGUF file."""
    id: str
    """The hub id, or the directory's or file's name: a bundle does not record local paths."""
    revision: str | None = None
    file: Path | None = None
    """The GGUF file; of several parts any one."""

    @property
    def path(self) -> Path:
        return self.file or self.directory


class _AbsentError(CheckpointError):
    """The hub, or when offline the local cache, does not have a repository."""


def locate(source: str, revision: str | None = None, gguf: str | None = None) -> Checkout:
    """Find a checkpoint: a local directory or GGUF file, or else a repository that is downloaded from the hub.

    Args:
        source: the directory, the file or the hub id.
        revision: branch, tag or commit on the hub.
        gguf: the GGUF file to take of a directory or repository.

    Raises:
        CheckpointError: there is no such directory, file or repository, or the hub cannot be reached.
    """
    path = expanded(source)
    if gguf is not None and (not gguf.endswith(GGUF) or set(gguf) & set("*?[]\\") or ".." in gguf):
        raise CheckpointError(f"--gguf names one file, such as model-Q4_0.gguf, not {gguf!r:.99}")
    if path.is_dir() or path.is_file() or source.lower().endswith(GGUF):
        if revision is not None:
            raise CheckpointError(
                f"{source} is a {'directory' if path.is_dir() else 'file'}: a revision belongs to a hub id"
            )
        return _local(source, path, gguf)
    if source.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(source):
        raise CheckpointError(
            f"{source} is neither a directory, a GGUF file nor a hub id such as google/gemma-4-E2B-it"
        )
    return _download(source, revision) if gguf is None else _download_file(source, revision, gguf)


def _local(source: str, path: Path, gguf: str | None) -> Checkout:
    """A checkpoint on this machine."""
    if path.is_file() and gguf is not None:
        raise CheckpointError(f"{source} is a file: --gguf names a file of a directory or a repository")
    if path.is_dir() and gguf is None:
        if not (path / "config.json").exists() and (files := sorted(path.glob(f"*{GGUF}"))):
            raise CheckpointError(f"{source} holds GGUF files: name one of them, such as {files[0]}")
        return Checkout(path.resolve(), path.resolve().name)
    file = path if gguf is None else path / gguf
    if not file.is_file():
        raise CheckpointError(f"{file} does not exist: name a GGUF file, a directory or a hub id")
    if file.suffix.lower() != GGUF:
        raise CheckpointError(f"{file} is not a GGUF file: a checkpoint is a *{GGUF} file, a directory or a hub id")
    file = file.absolute()  # a link's target, as in Hugging Face's cache, has another name
    return Checkout(file.parent, file.name, None, file)


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
    if (found := next(_beside(target, "drafter"), None)) is not None:
        return locate(str(found))
    note(f"no drafter beside {target.path.name}: name one with --drafter")
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
    found = next(_beside(target, "heads"), None)
    return None if found is None else locate(str(found))


def _beside(target: Checkout, name: str) -> Iterator[Path]:
    """Directories with a configuration that belong to a local target: `name` in or beside its directory, and
    `<directory>-assistant`; of a GGUF file only `name` in its directory, where other models may lie too.
    """
    directory = target.directory
    places = [directory / name]
    if target.file is None:
        places = [directory.parent / name, directory / name]
        if name == "drafter":
            places.append(directory.with_name(directory.name + "-assistant"))
    return (found for found in places if (found / "config.json").is_file() and found != directory)


def default_name(target: Checkout) -> str:
    """The default name of a bundle: the last part of the target's id on the hub, or as `name_of_export` says."""
    if target.file is None and target.revision is not None:
        return target.id.rsplit("/", 1)[-1]
    return name_of_export(target.path, is_file=target.file is not None)


def _download(source: str, revision: str | None) -> Checkout:
    directory = _snapshot(source, revision, _PATTERNS, _IGNORED)
    if not (directory / "config.json").exists():
        raise CheckpointError(f"{source} has no config.json: if it has GGUF files, name one with --gguf")
    return Checkout(directory, source, directory.name)


def _download_file(source: str, revision: str | None, gguf: str) -> Checkout:
    """Download one GGUF file, or all parts of a model of which it is one."""
    part = GGUF_PART.fullmatch(gguf)
    directory = _snapshot(source, revision, [gguf if part is None else f"{part['name']}-*-of-{part['count']}{GGUF}"])
    if not (directory / gguf).is_file():
        raise CheckpointError(f"{source} has no file {gguf}{_offered(source, revision)}")
    return Checkout((directory / gguf).parent, source, directory.name, directory / gguf)


def _offered(source: str, revision: str | None) -> str:
    """The names of a repository's GGUF files, for a message; empty if the hub does not say."""
    from huggingface_hub import errors, list_repo_files

    try:
        names = [name for name in list_repo_files(source, revision=revision) if name.endswith(GGUF)]
    except (errors.HfHubHTTPError, ConnectionError, OSError, ValueError):
        return ""
    return f", only {', '.join(names[:20])}" if names else " and no other GGUF file"


def _snapshot(source: str, revision: str | None, patterns: list[str], ignored: list[str] | None = None) -> Path:
    """Download the files of a repository that match `patterns`; their directory.

    Raises:
        CheckpointError: the repository cannot be read.
        HubError: see `check_environment`.
    """
    try:
        from huggingface_hub import errors, snapshot_download
    except ImportError as error:
        raise MissingDependencyError("huggingface_hub", "export") from error
    check_environment()
    try:
        # The library resumes interrupted downloads and handles HF_HUB_OFFLINE, HF_TOKEN and the cache directory.
        return Path(snapshot_download(source, revision=revision, allow_patterns=patterns, ignore_patterns=ignored))
    except errors.GatedRepoError as error:
        raise CheckpointError(f"{source} is gated: accept its licence on the hub, then `hf auth login`") from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(f"{source} has no revision {revision!r}") from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise _AbsentError(
            f"{source} is neither a directory here nor a repository that you can read on the hub: check its name, and "
            "`hf auth login` if it is private"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise _AbsentError(
            f"{source} is neither a directory nor in the local cache, and the hub is out of reach: connect, or name a "
            "directory or a GGUF file"
        ) from error
    except (errors.HfHubHTTPError, ConnectionError, ImportError) as error:  # the last without support for a proxy
        raise CheckpointError(f"{source} could not be downloaded: {reason(error)}") from error
