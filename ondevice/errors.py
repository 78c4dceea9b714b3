"""Everything ondevice raises on purpose. A message is one line that says what is wrong and what to do."""

from __future__ import annotations

from pathlib import Path


class OndeviceError(Exception):
    """Root of the tree: catch this to catch every mistake that ondevice can name."""


class UsageError(OndeviceError, ValueError):
    """An option or argument, or a combination of them, that makes no sense."""


class PromptError(OndeviceError, ValueError):
    """A prompt that cannot be run: empty, not text, or holding a token id outside the vocabulary."""


class ContextOverflowError(PromptError):
    """A prompt that leaves no room for a single new token."""

    def __init__(self, prompt_tokens: int, context_length: int) -> None:
        super().__init__(
            f"the prompt has {prompt_tokens} tokens and the context holds {context_length}: "
            f"shorten the prompt by at least {prompt_tokens - context_length + 1} tokens"
        )
        self.prompt_tokens = prompt_tokens
        self.context_length = context_length


class BundleError(OndeviceError):
    """A bundle that cannot be trusted or understood."""


class BundleNotFoundError(BundleError, FileNotFoundError):
    """No bundle at a path or under a name."""

    def __init__(self, path: Path | str, reason: str = "no bundle.json there") -> None:
        super().__init__(f"no bundle at {path}: {reason}. Make one with `ondevice export SOURCE --out DIR`")
        self.path = path

    def __str__(self) -> str:
        # FileNotFoundError formats (errno, strerror) pairs; ours has a single ready message.
        return str(self.args[0])


class BundleCorruptError(BundleError):
    """A bundle file is missing, truncated, altered, or points outside its directory."""


class UnsupportedBundleError(BundleError):
    """A bundle of a schema, family or feature that this version does not know."""


class CheckpointError(OndeviceError):
    """A source checkpoint that cannot be exported: a tensor missing or misshapen, a family unknown."""


class PairMismatchError(CheckpointError):
    """A drafter that does not belong to its target."""


class MissingDependencyError(OndeviceError, ImportError):
    """An optional package that this command needs is not installed."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"this needs {package}: pip install 'ondevice[{extra}]'")
        self.package = package
