"""What both engines say of heads that a bundle does not have."""

from __future__ import annotations

from ondevice.errors import UsageError


def no_heads(kind: str) -> UsageError:
    """The error for proposals of a kind that there is not."""
    return UsageError(f"this bundle has no {kind} heads: train some with models/recipe, and export with --heads DIR")
