"""PyInstaller's hook for the command line, whose commands are imported by name."""

from __future__ import annotations

from PyInstaller.utils.hooks import collect_submodules

hiddenimports = collect_submodules("ondevice.terminal")
