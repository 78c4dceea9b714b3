"""Where this computer keeps what can be made again."""

from __future__ import annotations

import os
from pathlib import Path

from ondevice.errors import UsageError
from ondevice.machine.home import expanded, home


def cache_directory() -> Path:
    """`$ONDEVICE_CACHE`, else the platform's own place for it. It may not exist, nor be writable.

    Raises:
        UsageError: `$ONDEVICE_CACHE` names a user that does not exist.
    """
    if chosen := os.environ.get("ONDEVICE_CACHE"):
        try:
            return expanded(chosen)
        except UsageError as error:
            raise UsageError(f"ONDEVICE_CACHE is {error}") from error
    if os.name == "nt":
        return Path(os.environ.get("LOCALAPPDATA") or home() / "AppData/Local") / "ondevice" / "cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or home() / ".cache") / "ondevice"
