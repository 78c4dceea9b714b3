"""Where this computer keeps what can be made again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path:
    """`$ONDEVICE_CACHE`, else the platform's own place for it. It may not exist, nor be writable."""
    chosen = os.environ.get("ONDEVICE_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    if os.name == "nt":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData/Local") / "ondevice" / "cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ondevice"
