"""PyInstaller's hook for applications that embed ondevice. PyInstaller finds it through an entry point."""

from __future__ import annotations

from pathlib import Path


def hook_directories() -> list[str]:
    """Directory of the hooks; the entry point `hook-dirs` of the group `pyinstaller40`."""
    return [str(Path(__file__).parent)]
