"""Builds parts of the kernel library on this machine, each by `builder` in a process of its own.

The process is `python -m ondevice.native.builder ...` or, in a frozen application, its own executable, started again
(`freeze_support`). It prints an empty line for each function that is translated, and writes a code block to the cache
directory. Where that cannot be written, or where another user could change it there, the block follows the lines, and
the reason is on standard error if it was not known before, as for a full disk.

`from ondevice import freeze_support` must stay cheap: this module imports no numba.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Self

from ondevice.errors import OndeviceError
from ondevice.native import library
from ondevice.native.code_block import BEGINNING

FUNCTIONS = {"packing": 10, "tokens": 56, "forward": 193, "export": 27, "roofline": 3}
"""About the number of functions of each part (it changes with the instruction set), for the reported share."""

BUILDER = "ondevice.native.builder"
"""The module that a process runs to build a part."""

FROZEN_COMPILE = "--ondevice-build-kernels"
"""First argument of a frozen application's executable when it is started to build kernels."""

TERMINATE_S = 3.0
"""Seconds that a process gets to end before it is killed."""

_log = logging.getLogger("ondevice")
_freeze_support_called = False


class Build:
    """The building of one part, in another process. Leaving the context before `wait` has returned ends the process.

    Attributes:
        part: the part's name.
    """

    def __init__(self, part: str) -> None:
        """
        Raises:
            OndeviceError: no process can be started.
        """
        self.part = part
        self._translated, self._code, self._said = 0, b"", b""
        command = [*_command(), "--set", library.choice().set, "--part", part]
        self._file = library.cached(part) if library.obstacle() is None else None
        command += [] if self._file is None else ["--out", str(self._file)]
        here = _current_directory()
        path = os.pathsep.join(each or str(here) for each in sys.path if each or here)
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,  # a temporary file would need room on the disk
                env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0"},
                cwd=here or Path(__file__).parent,  # numba needs one
                creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
            )
        except OSError as error:
            raise OndeviceError(
                f"kernels for this CPU cannot be built, as no process can be started: {error}"
            ) from error
        self._readers = [
            threading.Thread(target=read, name="ondevice-build", daemon=True)
            for read in (self._read, self._read_errors)
        ]
        for reader in self._readers:
            reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(TERMINATE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._process.stdout.close()
        self._process.stderr.close()

    @property
    def share(self) -> float:
        """The share of the part's functions that are translated; 1.0 once `wait` has returned True."""
        return 1.0 if self._process.returncode == 0 else min(1.0, self._translated / FUNCTIONS[self.part])

    def wait(self, seconds: float | None = None) -> bool:
        """Wait at most so many seconds; returns whether `library.find` finds the part.

        Raises:
            OndeviceError: the process failed.
        """
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        for reader in self._readers:
            reader.join()
        if code:
            raise OndeviceError(f"kernels for this CPU could not be built: {self._error() or f'exit code {code}'}")
        if self._code:
            library.adopt(self.part, self._code, None if self._file is None else self._error())
            self._code = b""
        return True

    def _error(self) -> str:
        """The last line that the process has written to standard error; empty if there is none."""
        return self._said.decode(errors="replace").strip()

    def _read(self) -> None:
        output = self._process.stdout
        assert output is not None
        try:
            for line in output:
                if line.startswith(BEGINNING):
                    self._code = line + output.read()
                self._translated += 1
        except ValueError:  # closed by __exit__ after an interruption
            pass

    def _read_errors(self) -> None:
        errors = self._process.stderr
        assert errors is not None
        with contextlib.suppress(ValueError):  # as above
            for line in errors:
                self._said = line if line.strip() else self._said


def build_now(part: str) -> None:
    """Build a part that was not prepared; one line is logged."""
    _log.warning("compiling kernels for this CPU (%s)", library.when(library.obstacle()))
    with Build(part) as build:
        build.wait()


# Frozen applications.


def freeze_support() -> None:
    """Allow a frozen application to build kernels, which needs a process. Call this before anything else.

    The process is the application's executable, started again with one more argument: then this call builds the kernels
    and ends the process. PyInstaller's hook adds the call by itself. Applications that ship a kernel library of their
    platform build nothing. The call does nothing in an application that is not frozen.
    """
    global _freeze_support_called  # noqa: PLW0603
    if not is_frozen():
        return
    if sys.argv[1:2] == [FROZEN_COMPILE]:
        import_module(BUILDER).main(sys.argv[2:])
        sys.exit()
    _freeze_support_called = True


def is_frozen() -> bool:
    """Whether this application was frozen into an executable, which is then the only interpreter it has."""
    return bool(getattr(sys, "frozen", False))


def _current_directory() -> Path | None:
    """The current directory; None if it was removed."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return None


def _command() -> list[str]:
    """The command of a process that builds, without its options.

    Raises:
        OndeviceError: this application embeds Python without an interpreter that could be started.
    """
    if is_frozen():
        if _freeze_support_called:
            return [sys.executable, FROZEN_COMPILE]
        raise OndeviceError(
            "this application has no kernels for this CPU, and cannot build them: "
            "it must call ondevice.freeze_support()"
        )
    if not sys.executable or not Path(sys.executable).stem.lower().startswith("python"):
        raise OndeviceError(
            "there are no kernels for this CPU, and no Python interpreter to build them with: "
            "install a wheel of ondevice-runtime for this platform"
        )
    return [sys.executable, "-P", "-m", BUILDER]  # -P: without the current directory, which this process may not import
