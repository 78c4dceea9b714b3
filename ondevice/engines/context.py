"""How long a sequence may become."""

from __future__ import annotations

from ondevice.errors import UsageError


def context_within(wanted: int | None, available: int) -> int:
    """The context length to use: what was asked for, or all there is.

    Raises:
        UsageError: more than the model has, or too few for a prompt and an answer.
    """
    if wanted is None:
        return available
    if not 1 < wanted <= available:
        raise UsageError(f"a context of {wanted} tokens is not possible: this model has 2 to {available}")
    return wanted
