"""Exports a checkpoint, its MTP drafter and its heads to a bundle, without torch.

Input: checkpoint directories, GGUF files or hub ids. Output: a bundle directory, which appears complete or not at all
(`bundle_writer`). Read `exporter` first; `command` is `ondevice export`.

    checkpoint/  finds and opens checkpoints; checks configuration and every tensor
    gguf/        GGUF files as checkpoints
    families/    what each family of models computes, as data
    graph/       the ONNX graphs
    graph_files  writes the graphs while `matrices` quantises their weights into data files (`data_file`, `quantize`) in
                 chunks of rows, so that no matrix but the small ones of towers is whole in memory
    calibration/ rounds by what a text or an importance matrix says of a matrix's inputs
    bit_budget   chooses a format for every matrix; `export_options` has those that follow from a user's options
    manifest     makes `bundle.json`; `text_files` copies the tokenizer and templates, `response_templates` has more
    verify       compares a bundle with its original, which `original` runs on torch
    reference    a checkpoint in float32, with which `ondevice check --against` compares a bundle
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
