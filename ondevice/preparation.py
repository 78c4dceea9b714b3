"""Makes a bundle ready for this machine, once: kernels are compiled in processes beside this one, weights are packed.

    python -m ondevice.preparation GROUP...

is such a process; that of a frozen application is its own executable (frozen.py). It leaves its code in the cache
directory, and a line for every function that it has compiled.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from pathlib import Path
from time import perf_counter
from types import FrameType, TracebackType
from typing import Any, NamedTuple, Self

from ondevice import frozen, jit, machine
from ondevice.progress import OnPrepare

COMPILING, PACKING, CHECKING = "compiling kernels", "packing weights", "checking weights"
"""Stages. The first two run side by side."""

SECONDS_PER_FUNCTION, SECONDS_PER_BYTE = 0.1, 1e-9
"""Rough costs, which weigh the stages against each other in the share that is told."""

POLL_S = 0.1
"""Seconds between looks at what the processes have done."""

UNSAID_S = 0.3
"""Seconds of checking that are not worth a word: of a pack that is in memory it takes less."""

PATIENCE_S = 3.0
"""For a process to tidy up before it is killed: a signal is heard when a pass of the compiler ends."""

Calls = Sequence[tuple[Any, tuple[Any, ...]]]
"""Functions to compile, each with arguments of the types that it is called with."""


class Group(NamedTuple):
    """Functions that are compiled one after the other."""

    source: str
    """module:function, which returns their Calls."""
    functions: int
    """How many are compiled for them, those included that they call; for the share that is told."""


TOKENS = (Group("ondevice.decoding.warm_up:calls", 20),)
"""For every engine."""

_KERNELS = "ondevice.engines.simd.kernels.warm_up"
SIMD = (
    Group(f"{_KERNELS}:attention", 25),
    Group(f"{_KERNELS}:projection", 22),
    Group(f"{_KERNELS}:lookup", 40),
    Group(f"{_KERNELS}:others", 24),
)
SIMD_LAST = Group(f"{_KERNELS}:whole", 3)
"""These have the code of the other groups in them."""

_log = logging.getLogger("ondevice")


class Preparation:
    """What is compiled and packed while a model is loaded, told in one line and by one callback.

    An exception from the callback, or Ctrl-C, ends all of it; what was finished until then is kept.
    """

    def __init__(self, on_prepare: OnPrepare | None = None) -> None:
        self._heard = on_prepare
        self._groups: list[Group] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._work: list[str] = []
        self._said = False
        self._compiled = 0
        self._packed = 0.0
        self._packing = 0.0
        self._share = 0.0
        self._checking = 0.0
        self._silence = jit.ANNOUNCER.silent()

    def __enter__(self) -> Self:
        self._silence.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._silence.__exit__(kind, error, trace)
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            try:
                process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()

    def compile(self, groups: Iterable[Group]) -> None:
        """Begin to compile those of these that the cache directory lacks; `finish` waits for them."""
        self._groups = [group for group in groups if not is_kept(group)]
        if not self._groups:
            return
        self._work.insert(0, f"compiling kernels {jit.when(jit.can_keep())}")
        aside = [group for group in self._groups if group is not SIMD_LAST]
        if jit.can_keep() and (compiler := _compiler()) is not None and machine.processors() > 1:
            count = min(len(aside), machine.default_threads())
            for number in range(count):
                self._start([*compiler, *(group.source for group in aside[number::count])])

    def announce(self, work: str) -> None:
        """Say in one line what is going to take seconds, with all that was begun before."""
        self._work.append(work)
        self._say()

    def pack(self, done: int, total: int) -> None:
        """So many bytes are packed, and verified, of so many."""
        self._packed, self._packing = done * SECONDS_PER_BYTE, total * SECONDS_PER_BYTE
        self._tell(PACKING)

    def check(self, done: int, total: int) -> None:
        """So many bytes of a pack that lay there are compared with its checksums."""
        now = perf_counter()
        self._checking = self._checking or now
        if self._heard is not None and not self._groups and now - self._checking > UNSAID_S:
            self._heard(CHECKING, done / total)

    def finish(self) -> None:
        """Return when everything is compiled, by the processes or else by this one."""
        if not self._groups:
            return
        self._say()
        for process in self._processes:
            while True:
                try:
                    process.wait(POLL_S)
                    break
                except subprocess.TimeoutExpired:
                    self._tell(COMPILING)
        with jit.counting(self._count_and_tell):
            for group in self._groups:
                compile_group(group.source)
        self._compiled = sum(group.functions for group in self._groups)
        self._tell(COMPILING)

    def _start(self, command: list[str]) -> None:
        told = jit.numba_cache_directory()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path)}
        if told:
            environment["NUMBA_CACHE_DIR"] = told
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
                creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
            )
        except OSError:  # a sandbox that allows none: `finish` compiles here
            return
        self._processes.append(process)
        threading.Thread(target=self._listen, args=(process,), name="ondevice-preparation", daemon=True).start()

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        try:
            for _ in process.stdout:
                self._compiled += 1
        except ValueError:  # closed, because all was interrupted
            pass

    def _count_and_tell(self) -> None:
        self._compiled += 1
        self._tell(COMPILING)

    def _say(self) -> None:
        if not self._said:
            self._said = True
            _log.warning("preparing for this machine: %s", ", ".join(self._work))

    def _tell(self, stage: str) -> None:
        if self._heard is None:
            return
        functions = sum(group.functions for group in self._groups)
        total = functions * SECONDS_PER_FUNCTION + self._packing
        done = min(self._compiled, functions) * SECONDS_PER_FUNCTION + self._packed
        self._share = max(self._share, done / total if total else 1.0)
        self._heard(stage, self._share)


def is_kept(group: Group) -> bool:
    """Whether the cache directory has the code of all functions of a group."""
    return all(jit.is_kept(function) for function, _ in _calls(group.source))


def compiled_for(engine: str) -> bool:
    """Whether nothing is left to compile for an engine."""
    return all(map(is_kept, (*TOKENS, *SIMD, SIMD_LAST) if engine == "simd" else TOKENS))


def compile_group(source: str) -> None:
    """Compile, or load from the cache directory, all functions of a group."""
    for function, arguments in _calls(source):
        jit.compile_for(function, arguments)


def _calls(source: str) -> Calls:
    module, _, name = source.partition(":")
    calls: Callable[[], Calls] = getattr(import_module(module), name)
    return calls()


def _compiler() -> list[str] | None:
    """The beginning of a command that compiles groups; some applications that embed Python have none."""
    if frozen.is_frozen():
        return [sys.executable, frozen.COMPILE] if frozen.is_supported() else None
    if not sys.executable or not Path(sys.executable).stem.lower().startswith("python"):
        return None
    return [sys.executable, "-m", "ondevice.preparation"]


def main(sources: Sequence[str]) -> None:
    """Compile groups in this process."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(1)  # so that nothing is left half written

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    with jit.counting(lambda: print(flush=True)):  # noqa: T201
        for source in sources:
            compile_group(source)


if __name__ == "__main__":
    main(sys.argv[1:])
