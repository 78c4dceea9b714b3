"""PyInstaller's hook. Most modules are imported by name, when they are first needed, and it cannot see that.

numba asks for sources next to an executable (`module_collection_mode`); with our own places for its code
(ondevice/jit.py) bytecode in the archive will do, and starts as fast.
"""

from __future__ import annotations

from PyInstaller.utils.hooks import collect_data_files, collect_submodules

APART = ("ondevice.pyinstaller", "ondevice.server", "ondevice.terminal")
"""Of the command line and the server, which have packages of their own, only what the application imports."""

hiddenimports = collect_submodules("ondevice", filter=lambda name: not name.startswith(APART))
datas = collect_data_files("ondevice")
