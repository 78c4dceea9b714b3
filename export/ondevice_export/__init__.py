"""Exports a checkpoint, its MTP drafter and its heads to a bundle, without torch.

Input: checkpoint directories or hub ids. Output: a bundle directory, which appears complete or not at all
(`bundle_writer`). Read `exporter` first.

    gguf/        GGUF files as checkpoints
    checkpoint/  finds and opens checkpoints; checks configuration and every tensor
    families/    what each family of models computes, as data
    graph/       the ONNX graphs
    graph_files  writes the graphs while `matrices` quantises their weights into data files (`data_file`, `quantize`) in
                 chunks of rows, so that no whole matrix is ever in memory
    manifest     makes `bundle.json`; `text_files` copies the tokenizer and templates
    verify       compares a bundle with its original, which `original` runs on torch
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ondevice_export.exporter import export

__all__ = ["export"]


def __getattr__(name: str) -> Any:
    """Import `exporter` on first access, and with it onnx-ir, which `ondevice export --help` does not need."""
    if name != "export":
        raise AttributeError(f"module 'ondevice_export' has no attribute {name!r}")
    return import_module("ondevice_export.exporter").export
