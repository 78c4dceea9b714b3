"""Everything ondevice raises on purpose. A message is one line that says what is wrong and what to do."""

from __future__ import annotations

from os import PathLike, fspath
from pathlib import Path
from typing import Any


class OndeviceError(Exception):
    """Root of the tree: catch this to catch every mistake that ondevice can name."""

    def __str__(self) -> str:
        return one_line(super().__str__())

    def __reduce__(self) -> tuple[Any, ...]:
        """By message and attributes: Python's own way calls the class with the message, which breaks a process pool
        wherever a constructor takes something else.
        """
        return _restore, (type(self), self.args, vars(self))


class UsageError(OndeviceError, ValueError):
    """An option or argument, or a combination of them, that makes no sense."""


class GrammarError(UsageError):
    """A grammar for a reply that cannot be compiled, or that became too large to follow."""


class PromptError(OndeviceError, ValueError):
    """A prompt that cannot be run: empty, not text, or holding a token id outside the vocabulary."""


class ContextOverflowError(PromptError):
    """A prompt that leaves no room for a single new token."""

    def __init__(self, prompt_tokens: int, context_length: int, *, counted: bool = True) -> None:
        """
        Args:
            prompt_tokens: as many tokens has the prompt, or at least as many where they were not counted.
            context_length: what there is room for.
            counted: whether they were.
        """
        super().__init__(
            f"the prompt has {'' if counted else 'at least '}{prompt_tokens} tokens and the context holds "
            f"{context_length}: "
            f"shorten the prompt by at least {prompt_tokens - context_length + 1} tokens"
        )
        self.prompt_tokens = prompt_tokens
        self.context_length = context_length


class BundleError(OndeviceError):
    """A bundle that cannot be trusted or understood."""


class BundleNotFoundError(BundleError, FileNotFoundError):
    """No bundle at a path or under a name."""

    def __init__(self, path: Path | str, reason: str = "no bundle.json there") -> None:
        super().__init__(
            f"no bundle at {path}: {reason}. Make one with `ondevice export SOURCE --out DIR`, or fetch one with "
            "`ondevice pull OWNER/NAME`"
        )
        self.path = path


class BundleCorruptError(BundleError):
    """A bundle file is missing, truncated, altered, or points outside its directory."""


class UnsupportedBundleError(BundleError):
    """A bundle of a schema, family or feature that this version does not know."""


class CheckpointError(OndeviceError):
    """A source checkpoint that cannot be exported: a tensor missing or misshapen, a family unknown."""


class PairMismatchError(CheckpointError):
    """A drafter that does not belong to its target."""


class HubError(OndeviceError):
    """A bundle that the hub does not give: it is not there, not permitted, not reached, damaged, or does not fit."""


class SessionFileError(OndeviceError):
    """A file of a saved sequence that is damaged, or belongs to another bundle, engine or version."""

    def __init__(self, path: str | PathLike[str], reason: str) -> None:
        super().__init__(f"{fspath(path)} cannot be loaded: {reason}")
        self.path = path


class MissingDependencyError(OndeviceError, ImportError):
    """A package that this needs, and that not every installation has.

    Attributes:
        package: its import name.
    """

    def __init__(self, package: str, extra: str | None = None, *, what: str = "this", instead: str = "") -> None:
        """
        Args:
            extra: of ondevice-runtime that brings it; None where it is installed by its own name.
            what: needs it.
            instead: what else could be done.
        """
        name = package if extra is None else f"'ondevice-runtime[{extra}]'"
        super().__init__(f"{what} needs {package}: pip install {name}" + (f", or {instead}" if instead else ""))
        self.package = package


def _restore(kind: type[OndeviceError], args: tuple[Any, ...], attributes: dict[str, Any]) -> OndeviceError:
    """An error that another process or a copy has described."""
    error = kind.__new__(kind)
    error.args = args
    vars(error).update(attributes)
    return error


def one_line(text: str) -> str:
    """A text with a space for each line break and control character: names of files and what a bundle says may hold
    any, and a terminal obeys some of them.
    """
    return "".join(character if character.isprintable() else " " for character in text)


def reason(error: BaseException) -> str:
    """What another library's error says, short and in one line, for a message of our own."""
    return one_line((str(error).strip() or type(error).__name__).splitlines()[0])[:200]
