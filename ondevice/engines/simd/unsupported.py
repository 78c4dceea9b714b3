"""The error for a bundle that the simd engine has no kernels for."""

from __future__ import annotations

from ondevice.errors import UnsupportedBundleError


class UnsupportedGraphError(UnsupportedBundleError):
    """The simd engine has no kernel for the format or size of some weights. `auto` then runs the bundle with `ort`."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the simd engine cannot run this bundle ({reason}): use --engine ort")
        self.reason = reason
