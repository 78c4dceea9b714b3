"""Prepare a bundle for this machine, once: compile kernels in child processes while the weights are packed.

`Preparation` is used by `load`: engines announce the kernel groups and weights that they need, and one callback reports
the progress of all of it. A child process is

    python -m ondevice.preparation GROUP...

or, in a frozen application, its own executable, started again (`freeze_support`). It stores its code in the cache
directory and prints one line per compiled function.

`from ondevice import freeze_support` must stay cheap, so `ondevice.jit`, which imports numba, is imported inside
functions.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from time import perf_counter
from types import FrameType, TracebackType
from typing import Any, NamedTuple, Self

from ondevice import machine
from ondevice.progress import OnPrepare

COMPILING, PACKING, CHECKING = "compiling kernels", "packing weights", "checking weights"
"""Stages, as `OnPrepare` gets them. Compiling and packing run at the same time."""

SECONDS_PER_FUNCTION, SECONDS_PER_BYTE = 0.1, 1e-9
"""Rough costs of compiling a function and of packing a byte, which weight the two stages in the reported share."""

POLL_S = 0.1
"""Seconds between two checks of the child processes."""

UNREPORTED_S = 0.3
"""Checking a pack is reported only after this many seconds: a pack that is in memory takes less."""

TERMINATE_S = 3.0
"""Seconds that a child process gets to end before it is killed. It handles the signal when a compiler pass ends."""

Calls = Sequence[tuple[Any, tuple[Any, ...]]]
"""Functions to compile, each with arguments of the types that it is called with."""


class Group(NamedTuple):
    """Functions that one process compiles in a row.

    source : `module:function`, which returns the `Calls`
    functions : number of functions compiled for them, called ones included; for the reported share
    """

    source: str
    functions: int


TOKENS = (Group("ondevice.generate.warm_up:calls", 39),)
"""Kernels of the tokens layer, for every engine."""

_KERNELS = "ondevice.engines.simd.kernels.warm_up"
SIMD = (
    Group(f"{_KERNELS}:attention", 25),
    Group(f"{_KERNELS}:projection", 22),
    Group(f"{_KERNELS}:lookup", 40),
    Group(f"{_KERNELS}:others", 24),
)
SIMD_LAST = Group(f"{_KERNELS}:whole", 3)
"""Functions that contain the code of the other groups, and are compiled after them."""

FROZEN_COMPILE = "--ondevice-compile"
"""First argument of a frozen application's executable when it is started to compile kernels."""

_log = logging.getLogger("ondevice")
_freeze_support_called = False


class Preparation:
    """Everything that is compiled and packed while a model is loaded, reported in one log line and by one callback.

    An exception from the callback, or Ctrl-C, ends all of it; finished work is kept.
    """

    def __init__(self, on_prepare: OnPrepare | None = None) -> None:
        self._on_prepare = on_prepare
        self._groups: list[Group] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._work: list[str] = []
        self._logged = False
        self._compiled = 0
        self._packed_s = 0.0
        self._packing_s = 0.0
        self._share = 0.0
        self._checking_since = 0.0
        self._silence = ExitStack()

    def __enter__(self) -> Self:
        from ondevice import jit

        self._silence.enter_context(jit.ANNOUNCER.silent())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._silence.close()
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            try:
                process.wait(TERMINATE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()

    def compile(self, groups: Iterable[Group]) -> None:
        """Start compiling the groups that the cache directory lacks; `finish` waits for them."""
        from ondevice import jit

        self._groups = [group for group in groups if not is_kept(group)]
        if not self._groups:
            return
        self._work.insert(0, f"compiling kernels {jit.when(jit.can_keep())}")
        independent = [group for group in self._groups if group is not SIMD_LAST]
        if jit.can_keep() and (command := _compile_command()) is not None and machine.processors() > 1:
            count = min(len(independent), machine.default_threads())
            for number in range(count):
                self._start([*command, *(group.source for group in independent[number::count])])

    def announce(self, work: str) -> None:
        """Log one line about work that takes seconds, with everything started before."""
        self._work.append(work)
        self._log_once()

    def pack(self, done: int, total: int) -> None:
        """Report bytes of weights that are packed or verified, of all."""
        self._packed_s, self._packing_s = done * SECONDS_PER_BYTE, total * SECONDS_PER_BYTE
        self._report(PACKING)

    def check(self, done: int, total: int) -> None:
        """Report bytes of an existing pack that are compared with its checksums, of all."""
        now = perf_counter()
        self._checking_since = self._checking_since or now
        if self._on_prepare is not None and not self._groups and now - self._checking_since > UNREPORTED_S:
            self._on_prepare(CHECKING, done / total)

    def finish(self) -> None:
        """Wait until everything is compiled. What the child processes did not compile is compiled here."""
        if not self._groups:
            return
        self._log_once()
        for process in self._processes:
            while True:
                try:
                    process.wait(POLL_S)
                    break
                except subprocess.TimeoutExpired:
                    self._report(COMPILING)
        compile_groups((group.source for group in self._groups), self._count)
        self._compiled = sum(group.functions for group in self._groups)
        self._report(COMPILING)

    def _start(self, command: list[str]) -> None:
        from ondevice import jit

        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path)}
        if directory := jit.numba_cache_directory():
            environment["NUMBA_CACHE_DIR"] = directory
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
                creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
            )
        except OSError:  # a sandbox that allows no child processes: `finish` compiles in this one
            return
        self._processes.append(process)
        threading.Thread(target=self._count_lines, args=(process,), name="ondevice-preparation", daemon=True).start()

    def _count_lines(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        try:
            for _ in process.stdout:
                self._compiled += 1
        except ValueError:  # closed by __exit__ after an interruption
            pass

    def _count(self) -> None:
        self._compiled += 1
        self._report(COMPILING)

    def _log_once(self) -> None:
        if not self._logged:
            self._logged = True
            _log.warning("preparing for this machine: %s", ", ".join(self._work))

    def _report(self, stage: str) -> None:
        if self._on_prepare is None:
            return
        functions = sum(group.functions for group in self._groups)
        total = functions * SECONDS_PER_FUNCTION + self._packing_s
        done = min(self._compiled, functions) * SECONDS_PER_FUNCTION + self._packed_s
        self._share = max(self._share, done / total if total else 1.0)
        self._on_prepare(stage, self._share)


# Groups of kernels.


def compiled_for(engine: str) -> bool:
    """Whether the cache directory has all kernels of an engine."""
    return all(map(is_kept, (*TOKENS, *SIMD, SIMD_LAST) if engine == "simd" else TOKENS))


def is_kept(group: Group) -> bool:
    """Whether the cache directory has the code of all functions of a group."""
    from ondevice import jit

    return all(jit.is_kept(function) for function, _ in _calls(group.source))


def compile_groups(sources: Iterable[str], count: Callable[[], None]) -> None:
    """Compile all functions of these groups, or load them from the cache directory; `count` is called after each."""
    from ondevice import jit

    with jit.counting(count):
        for source in sources:
            for function, arguments in _calls(source):
                jit.compile_for(function, arguments)


def _calls(source: str) -> Calls:
    module, _, name = source.partition(":")
    calls: Callable[[], Calls] = getattr(import_module(module), name)
    return calls()


# The child process, in Python and in frozen applications.


def freeze_support() -> None:
    """Allow a frozen application to compile kernels in child processes. Call this before anything else.

    A child process is the application's executable, started again with one more argument: then this call compiles the
    kernels and ends the process. PyInstaller's hook adds the call by itself. With other tools the application makes it;
    without it, kernels are compiled in the application's own process, which takes longer. It does nothing in an
    application that is not frozen.
    """
    global _freeze_support_called  # noqa: PLW0603
    if not is_frozen():
        return
    if sys.argv[1:2] == [FROZEN_COMPILE]:
        main(sys.argv[2:])
        sys.exit()
    _freeze_support_called = True


def is_frozen() -> bool:
    """Whether this application was frozen into an executable, which is then the only interpreter it has."""
    return bool(getattr(sys, "frozen", False))


def is_supported() -> bool:
    """Whether this process's executable can be started to compile: it is frozen and called `freeze_support`."""
    return _freeze_support_called


def _compile_command() -> list[str] | None:
    """The command that compiles the groups appended to it; None in an application that embeds Python without one."""
    if is_frozen():
        return [sys.executable, FROZEN_COMPILE] if is_supported() else None
    if not sys.executable or not Path(sys.executable).stem.lower().startswith("python"):
        return None
    return [sys.executable, "-m", "ondevice.preparation"]


def main(sources: Sequence[str]) -> None:
    """Compile groups in this process, and print a line per compiled function."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(1)  # an exception, so that no file is left half written

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    compile_groups(sources, lambda: print(flush=True))  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1:])
