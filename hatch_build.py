"""Hatch's build hook: the wheel of a platform has its kernel libraries, if ONDEVICE_PLATFORM names one.

    python -m ondevice.native.shipping --platform linux-x86_64
    ONDEVICE_PLATFORM=linux-x86_64 python -m build --wheel

Without the variable a wheel has none, fits every platform, and builds its kernels at the first start; so `pip install
.` needs neither compiler nor linker.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class LibrariesHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the libraries of one platform, and the wheel's tag."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatch before it builds.

        Raises:
            ValueError: the platform is unknown.
            FileNotFoundError: its libraries have not been built.
        """
        name = os.environ.get("ONDEVICE_PLATFORM")
        if not name or version == "editable":
            return
        sys.path.insert(0, self.root)  # the package itself imports none of its dependencies
        platforms = import_module("ondevice.native.sets").PLATFORMS
        if name not in platforms:
            raise ValueError(f"ONDEVICE_PLATFORM={name}: expected one of {', '.join(platforms)}")
        folder = f"ondevice/native/libraries/{name}"
        for each in platforms[name].sets:
            for file in (f"{folder}/{each}{platforms[name].suffix}", f"{folder}/{each}.json"):
                if not Path(self.root, file).is_file():
                    raise FileNotFoundError(f"{file}: run python -m ondevice.native.shipping --platform {name}")
                build_data["force_include"][str(Path(self.root, file))] = file
        build_data["pure_python"], build_data["tag"] = False, f"py3-none-{platforms[name].wheel}"
