"""PyInstaller's hook: lists the modules to include. Most are imported by name when first used, which it cannot see.

Bytecode in the archive is enough: a kernel library that is built on the user's machine is found again by its hash.
"""

from __future__ import annotations

from PyInstaller.utils.hooks import collect_data_files, collect_submodules

OPTIONAL = ("ondevice.pyinstaller", "ondevice.server", "ondevice.cli")
"""Packages of which only the modules that the application imports are included: command line and server, which need
further dependencies.
"""

hiddenimports = collect_submodules("ondevice", filter=lambda name: not name.startswith(OPTIONAL))
datas = collect_data_files("ondevice")
