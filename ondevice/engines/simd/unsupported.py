"""What makes a bundle one that this engine leaves to another."""

from __future__ import annotations

from ondevice.errors import UnsupportedBundleError


class UnsupportedGraphError(UnsupportedBundleError):
    """A graph with something in it that the simd engine has no kernel for."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the simd engine cannot run this bundle ({reason}): use --engine ort")
        self.reason = reason
