"""All errors that ondevice raises on purpose. A message is one line that says what is wrong and what to do.

The functions below the classes put names, values and other libraries' errors into such a line.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from itertools import islice
from os import PathLike, fspath
from pathlib import Path
from typing import Any


class OndeviceError(Exception):
    """Base class of all errors of ondevice."""

    def __str__(self) -> str:
        return one_line(super().__str__())

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the message and the attributes. Python's default calls the class with the message alone, which fails
        in a process pool for every class whose constructor takes other arguments.
        """
        return _restore, (type(self), self.args, vars(self))


class UsageError(OndeviceError, ValueError):
    """An option or argument that does not exist or has a wrong value, or options that contradict each other."""


class GrammarError(UsageError):
    """A grammar of a reply that cannot be compiled, or that grew too large while it was followed."""


class PromptError(OndeviceError, ValueError):
    """A prompt that cannot be run: empty, not text, or with a token id outside the vocabulary."""


class ContextOverflowError(PromptError):
    """A prompt that fills the context, so that not one new token fits.

    The message begins with the words of Anthropic's API, by which agents know that they have to shorten a conversation.

    Attributes:
        prompt_tokens: number of tokens of the prompt, or a lower bound; None if it was refused for its characters.
        context_length: number of tokens that the context holds.
    """

    def __init__(
        self, prompt_tokens: int | None, context_length: int, *, counted: bool = True, characters: str = ""
    ) -> None:
        """
        Args:
            prompt_tokens, context_length: see the attributes.
            counted: whether `prompt_tokens` is exact.
            characters: without `prompt_tokens`, the number of characters and the largest possible one, for the message.
        """
        size, less = characters, ""
        if prompt_tokens is not None:
            size = f"{'' if counted else 'at least '}{prompt_tokens} tokens > {context_length - 1} maximum"
            less = f" by at least {prompt_tokens - context_length + 1} tokens"
        super().__init__(f"prompt is too long: {size} (the context holds {context_length} tokens): shorten it{less}")
        self.prompt_tokens = prompt_tokens
        self.context_length = context_length


class BundleError(OndeviceError):
    """A bundle that is missing, damaged or not supported."""


class BundleNotFoundError(BundleError, FileNotFoundError):
    """No bundle at a path or under a name."""

    def __init__(self, path: Path | str, reason: str = "no bundle.json there") -> None:
        super().__init__(
            f"no bundle at {path}: {reason}. Make one with `ondevice export SOURCE --out DIR`, or fetch one with "
            "`ondevice pull OWNER/NAME`"
        )
        self.path = path


class BundleCorruptError(BundleError):
    """A bundle whose files are missing, truncated or altered, or whose paths lead out of its directory."""


class UnsupportedBundleError(BundleError):
    """A bundle with a schema version, model family or feature that this version does not support."""


class CheckpointError(OndeviceError):
    """A checkpoint that cannot be exported: a tensor missing or of the wrong shape, or an unknown model family."""


class PairMismatchError(CheckpointError):
    """A drafter checkpoint that was made for another target."""


class HubError(OndeviceError):
    """A failed download: not found, no permission, no connection, damaged data, or too little disk space."""


class SessionFileError(OndeviceError):
    """A saved sequence that is damaged, or belongs to another bundle, engine or version."""

    def __init__(self, path: str | PathLike[str], reason: str) -> None:
        super().__init__(f"{fspath(path)} cannot be loaded: {reason}")
        self.path = path


class MissingDependencyError(OndeviceError, ImportError):
    """An optional package that is not installed.

    Attributes:
        package: its import name.
    """

    def __init__(self, package: str, extra: str | None = None, *, what: str = "this", instead: str = "") -> None:
        """
        Args:
            package: import name of the package.
            extra: extra of ondevice-runtime that installs it; None if it is installed by its own name.
            what: the feature that needs the package, for the message.
            instead: an alternative to installing it, for the message.
        """
        name = package if extra is None else f"'ondevice-runtime[{extra}]'"
        super().__init__(f"{what} needs {package}: pip install {name}" + (f", or {instead}" if instead else ""))
        self.package = package


def _restore(kind: type[OndeviceError], args: tuple[Any, ...], attributes: dict[str, Any]) -> OndeviceError:
    """Rebuild an unpickled or copied error."""
    error = kind.__new__(kind)
    error.args = args
    vars(error).update(attributes)
    return error


def one_line(text: str) -> str:
    """Replace line breaks and control characters by spaces. File names and the content of a bundle may contain them,
    and a terminal would execute some.
    """
    return "".join(character if character.isprintable() else " " for character in text)


_OF_LIBRARIES = ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RuntimeError


def pass_on(error: BaseException) -> None:
    """Raise an error that is not a library's, such as Ctrl-C, or the exception with which an application's signal
    handler ends work that takes too long. Libraries written in Rust raise `Exception` itself, or a few kinds of it;
    their panics are no `Exception`, and are not raised either.
    """
    made_by_library = type(error) is Exception or isinstance(error, _OF_LIBRARIES)
    if not made_by_library and type(error).__name__ != "PanicException":
        raise error


def reason(error: BaseException) -> str:
    """The first line of another library's error, at most 200 characters, for a message of our own."""
    return one_line((str(error).strip() or type(error).__name__).splitlines()[0])[:200]


def near(word: str, known: Iterable[str]) -> str:
    """`: did you mean X?` for the known word that a misspelt one resembles most; empty if none does."""
    found = get_close_matches(word[:99], list(known), 1)
    return f": did you mean {found[0]}?" if found else ""


def system_error(error: OSError) -> str:
    """An error of the operating system in one phrase, without its number: `answers/: is a directory`."""
    phrase = error.strerror or str(error) or type(error).__name__
    named = f"{error.filename}: " if isinstance(error.filename, str) and error.filename else ""
    return one_line(f"{named}{phrase[:1].lower()}{phrase[1:]}")


MOST_BITS = 14_000
"""Bits of an integer that `repr` prints: it refuses one of more than 4,300 digits."""


def shown(value: object, most: int = 99) -> str:
    """`repr(value)`, cut to `most` characters, for a message of our own.

    Only the beginning of a text, list or mapping is read: `repr` of 48 MB of base64 takes 240 ms, in which no other
    thread runs.
    """
    return repr(_beginning(value, most))[:most]


def _beginning(value: object, most: int, depth: int = 3) -> object:
    """A value of JSON with the part of each text, list and mapping that `most` characters can show."""
    if isinstance(value, str | bytes):
        return value[:most]
    if isinstance(value, int) and (bits := value.bit_length()) > MOST_BITS:
        return f"a number of {bits} bits"
    if not isinstance(value, list | tuple | dict):
        return value
    if not depth:
        return "..."
    first, inner = islice(value, most // 3 + 1), depth - 1  # an element takes three characters at least
    if isinstance(value, dict):
        return {_beginning(key, most): _beginning(value[key], most, inner) for key in first}
    made = [_beginning(each, most, inner) for each in first]
    return made if isinstance(value, list) else tuple(made)
