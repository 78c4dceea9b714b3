"""Turns a Gemma 4 checkpoint and its MTP drafter into a bundle, without torch: see `export`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ondevice_export.exporter import export

__all__ = ["export"]


def __getattr__(name: str) -> Any:
    """Import onnx-ir and numba when they are first needed: `ondevice export --help` needs neither."""
    if name != "export":
        raise AttributeError(f"module 'ondevice_export' has no attribute {name!r}")
    return import_module("ondevice_export.exporter").export
