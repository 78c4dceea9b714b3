"""PyInstaller's hook: lists the modules to include. Most are imported by name when first used, which it cannot see.

The kernel libraries of a platform's wheel are included as data, unchanged, because they are checked by their hashes.
Without them, bytecode in the archive is enough to build kernels on the user's machine.
"""

from __future__ import annotations

from PyInstaller.utils.hooks import collect_data_files, collect_submodules

from ondevice.native import library

OPTIONAL = ("ondevice.pyinstaller", "ondevice.server", "ondevice.cli")
"""Packages of which only the modules that the application imports are included: command line and server, which need
further dependencies.
"""

hiddenimports = collect_submodules("ondevice", filter=lambda name: not name.startswith(OPTIONAL))
datas = collect_data_files("ondevice")
datas += [
    (str(file), f"ondevice/native/libraries/{file.parent.name}")
    for file in library.SHIPPED.glob("*/*")
    if file.suffix != ".json"  # which `collect_data_files` has found
]
