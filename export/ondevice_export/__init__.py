"""Turns a Gemma 4 checkpoint and its MTP drafter into a bundle, without torch: see `export`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ondevice_export.exporter import export
    from ondevice_export.verify import Verification, verify

__all__ = ["Verification", "export", "verify"]

_HOMES = {
    "export": "ondevice_export.exporter",
    "verify": "ondevice_export.verify",
    "Verification": "ondevice_export.verify",
}


def __getattr__(name: str) -> Any:
    """Import onnx-ir and numba when they are first needed: `ondevice export --help` needs neither."""
    if name not in _HOMES:
        raise AttributeError(f"module 'ondevice_export' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
