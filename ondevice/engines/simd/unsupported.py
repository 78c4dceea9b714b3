"""The error for a bundle that this engine leaves to another."""

from __future__ import annotations

from ondevice.errors import UnsupportedBundleError


class UnsupportedGraphError(UnsupportedBundleError):
    """A graph that the simd engine has no kernels for; `auto` runs it with onnxruntime."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the simd engine cannot run this bundle ({reason}): use --engine ort")
        self.reason = reason
