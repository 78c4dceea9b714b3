"""What PyInstaller must know to freeze an application that embeds ondevice. It finds this by itself."""

from __future__ import annotations

from pathlib import Path


def hook_directories() -> list[str]:
    """The entry point `pyinstaller40`, `hook-dirs`."""
    return [str(Path(__file__).parent)]
