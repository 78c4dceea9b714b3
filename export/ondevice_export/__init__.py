"""Exports a Gemma 4 checkpoint, its MTP drafter and its heads to a bundle, without torch.

Input: checkpoint directories or hub ids (`source`). Output: a bundle directory, which appears complete or not at all
(`bundle_writer`, `workspace`). Read `exporter` first. `config` reads `config.json` into an `ondevice.model_config`;
`models` and `heads` open checkpoints and check every tensor (`checkpoint`, `safetensors_file`); `graph_files` writes
the ONNX graphs (`graph/`) while `matrices` quantises their weights into data files in chunks of rows, so that no whole
matrix is ever in memory. `manifest` makes `bundle.json`, `quantized_modules` reads checkpoints that were trained
quantised, and `verify` compares a bundle with its original.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ondevice_export.exporter import export

__all__ = ["export"]


def __getattr__(name: str) -> Any:
    """Import `exporter` on first access, and with it onnx-ir and numba: `ondevice export --help` needs neither."""
    if name != "export":
        raise AttributeError(f"module 'ondevice_export' has no attribute {name!r}")
    return import_module("ondevice_export.exporter").export
