"""Turns a Gemma 4 checkpoint and its MTP drafter into a bundle, without torch: see `export`."""

from ondevice_export.exporter import export
from ondevice_export.options import ExportOptions

__all__ = ["ExportOptions", "export"]
