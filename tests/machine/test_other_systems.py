"""The package is imported as on Windows and macOS, in a process without the modules and functions that they lack.

The libraries that ondevice uses are imported before, as Linux has them.
"""

import subprocess
import sys

import pytest

from tests.conftest import ROOT

SCRIPT = """
import asyncio, concurrent.futures, ctypes, importlib, mmap, multiprocessing, os, pkgutil
import readline, signal, subprocess, sys, tempfile, threading
import argcomplete, huggingface_hub, jinja2, numpy, tokenizers, tqdm
extras = "llguidance", "starlette.applications", "uvicorn", "rich.live", "onnxruntime", "numba", "PIL.Image", "ray"
for name in extras:
    try:
        importlib.import_module(name)
    except ImportError:
        pass
system, modules, names = sys.argv[1], sys.argv[2].split(","), sys.argv[3].split(",")
for module in modules:
    sys.modules[module] = None
for name in names:
    owner, _, attribute = name.rpartition(".")
    delattr(sys.modules[owner], attribute)
sys.platform = system  # not os.name, on which Python's own paths depend
import ondevice
for found in pkgutil.walk_packages(ondevice.__path__, "ondevice."):
    if not found.name.startswith(("ondevice.pyinstaller.", "ondevice.__main__", "ondevice.engines.simd.kernels.")):
        importlib.import_module(found.name)
from ondevice.cli.main import COMMANDS, command_parser
for name, command in COMMANDS.items():
    if command.extra is None:
        command_parser(name).format_help()
print(len([name for name in sys.modules if name.startswith("ondevice")]))
"""

LINUX_ONLY = ["os.sched_getaffinity", "os.sched_setaffinity", "os.getxattr", "mmap.MADV_HUGEPAGE"]
POSIX = [
    "os.geteuid",
    "os.getuid",
    "os.register_at_fork",
    "os.sysconf",
    "os.O_DIRECTORY",
    "signal.SIGHUP",
    "signal.SIGKILL",
]

SYSTEMS = {
    "win32": (["fcntl", "resource", "termios", "grp", "pwd", "readline", "tty", "pty"], [*LINUX_ONLY, *POSIX]),
    "darwin": (["spwd"], LINUX_ONLY),
}
"""Modules that a system does not have, and names of modules that it has."""


@pytest.mark.skipif(sys.platform != "linux", reason="takes away what Linux has")
@pytest.mark.parametrize("system", SYSTEMS)
def test_every_module_and_command_can_be_imported(system):
    modules, names = (",".join(each) for each in SYSTEMS[system])
    command = [sys.executable, "-c", SCRIPT, system, modules, names]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert int(ended.stdout) > 80
