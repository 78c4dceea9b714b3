"""How large is an application that PyInstaller or cx_Freeze freezes, with kernels, with numba, with ONNX Runtime?

    python -m benchmarks.memory.frozen BUNDLE

Run it with the interpreter of an environment that contains only what an application needs, of which the wheel of this
platform comes first: `python -m venv clean && clean/bin/pip install dist/ondevice_runtime-*-manylinux*x86_64.whl
pyinstaller cx_Freeze`. It freezes the desktop example without its window, and starts each application once: all must
give the same reply.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.command import command_line, run_command
from ondevice.bundle import Bundle

EXAMPLE = Path(__file__).parents[2] / "examples/desktop/headless.py"
EXECUTABLE = "app.exe" if os.name == "nt" else "app"

WITH_FREEZE_SUPPORT = f"""\
import ondevice

ondevice.freeze_support()

import {EXAMPLE.stem}

{EXAMPLE.stem}.main()
"""
"""The application for a freezer that has no hook which makes the call."""

COMPILER = ("numba", "llvmlite")
VARIANTS = {
    "kernels of the wheel, no numba": ("onnxruntime", *COMPILER),
    "numba too": ("onnxruntime",),
    "ONNX Runtime too": (),
}
"""Modules to leave out."""


def pyinstaller(directory: Path, left_out: Sequence[str], path: Sequence[Path]) -> Path:
    """Freeze the example with PyInstaller, whose hook is in the wheel; returns the executable.

    Args:
        left_out: names of modules and packages.
        path: where modules are looked for first.
    """
    words = ["--log-level=ERROR", *(word for name in left_out for word in ("--exclude-module", name))]
    words += [f"--{kind}path={directory / kind}" for kind in ("dist", "work", "spec")]
    _run(["PyInstaller", "--name=app", "--onedir", *words, str(EXAMPLE)], directory, path)
    return directory / "dist/app" / EXECUTABLE


def cx_freeze(directory: Path, left_out: Sequence[str], path: Sequence[Path]) -> Path:
    """The same with cx_Freeze.

    It is told to take the whole package, as it does not see what is imported when first used, but for command line and
    server: it would take what they import, too.
    """
    script = directory / "app.py"
    script.write_text(WITH_FREEZE_SUPPORT, "utf-8")
    left_out = [*left_out, "ondevice.cli", "ondevice.server", "ondevice.pyinstaller", "tkinter"]
    words = [f"--script={script}", "--target-name=app", "build_exe", "--packages=ondevice", "--silent-level=3"]
    words += [f"--excludes={','.join(left_out)}", f"--build-exe={directory / 'app'}"]
    _run(["cx_Freeze", *words], directory, [*path, EXAMPLE.parent])
    return directory / "app" / EXECUTABLE


Freezer = Callable[[Path, Sequence[str], Sequence[Path]], Path]

FREEZERS: dict[str, Freezer] = {"PyInstaller": pyinstaller, "cx_Freeze": cx_freeze}


def _run(words: Sequence[str], directory: Path, path: Sequence[Path]) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    subprocess.run(
        [sys.executable, "-m", *words], check=True, env=environment, cwd=directory, stdout=subprocess.DEVNULL
    )


def start(app: Path, bundle: Path, home: Path, cache: Path) -> subprocess.CompletedProcess[str]:
    """Ask an application a question, in the directory `home`; nothing of this environment leads to packages."""
    environment = {"ONDEVICE_CACHE": str(cache), "HOME": str(home), "PATH": os.environ["PATH"]}
    command = [str(app), str(bundle), "def is_prime(n):"]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=home)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("bundle", type=Path)
    bundle = Bundle.open(parser.parse_args().bundle).path.resolve()  # a mistake is one line, before minutes of freezing
    replies = set()
    print("| | freezer | MB | MB as .tar.gz |\n| --- | --- | ---: | ---: |")
    for variant, left_out in VARIANTS.items():
        for name, freeze in FREEZERS.items():
            with tempfile.TemporaryDirectory() as work:
                app = freeze(Path(work), left_out, ())
                ended = start(app, bundle, Path(work), Path(work, "cache"))
                if ended.returncode or not ended.stdout.strip() or ended.stderr:
                    raise SystemExit(f"{name}, {variant}: it ends with {ended.returncode}\n{ended.stderr}")
                replies.add(ended.stdout)
                size = sum(path.lstat().st_size for path in app.parent.rglob("*") if not path.is_dir())
                packed = Path(shutil.make_archive(str(Path(work, "packed")), "gztar", app.parent)).stat().st_size
            print(f"| {variant} | {name} | {size / 1e6:.0f} | {packed / 1e6:.0f} |", flush=True)
    if len(replies) != 1:
        raise SystemExit("the applications do not give the same reply")


if __name__ == "__main__":
    run_command(main)
