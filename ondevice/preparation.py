"""Prepare a bundle for this machine, once: kernels are built while the weights are packed.

`Preparation` is used by `load`: engines announce the parts of the kernel library and the weights that they need, and
one callback reports the progress of all of it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import ExitStack
from time import perf_counter
from types import TracebackType
from typing import Self

from ondevice.native import library
from ondevice.native.building import FUNCTIONS, Build
from ondevice.progress import OnPrepare

COMPILING, PACKING, CHECKING = "compiling kernels", "packing weights", "checking weights"
"""Stages, as `OnPrepare` gets them. Compiling and packing run at the same time."""

SECONDS_PER_FUNCTION, SECONDS_PER_BYTE = 0.1, 1e-9
"""Rough costs of building a function and of packing a byte, which weight the two stages in the reported share."""

POLL_S = 0.1
"""Seconds between two looks at the building processes."""

UNREPORTED_S = 0.3
"""Checking a pack is reported only after this many seconds: a pack that is in memory takes less."""

_log = logging.getLogger("ondevice")


class Preparation:
    """All building and packing while a model is loaded, reported in one log line and by one callback.

    An exception from the callback, or Ctrl-C, ends all of it; finished work is kept.

    Attributes:
        on_prepare: called with the progress of what is waited for; None reports nothing.
    """

    def __init__(self, on_prepare: OnPrepare | None = None) -> None:
        self.on_prepare = on_prepare
        self._builds: list[Build] = []
        self._work: list[str] = []
        self._logged = False
        self._packed_s = 0.0
        self._packing_s = 0.0
        self._share = 0.0
        self._checking_since = 0.0
        self._processes = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._processes.close()

    def compile(self, parts: Iterable[str]) -> None:
        """Start building the parts of the kernel library that this machine lacks.

        `finish` waits for them; what quantises and packs weights is waited for here, a second or two.
        """
        parts = library.missing(parts)
        if not parts:
            return
        self._work.insert(0, f"compiling kernels {library.when(library.obstacle())}")
        for part in parts:
            self._builds.append(self._processes.enter_context(Build(part)))
        for build in self._builds:
            if build.part in ("packing", "export"):
                self._wait(build)

    def announce(self, work: str) -> None:
        """Log one line about work that takes seconds, with everything started before."""
        self._work.append(work)
        self.say()

    def pack(self, done: int, total: int) -> None:
        """Report bytes of weights that are packed or verified, of all."""
        self._packed_s, self._packing_s = done * SECONDS_PER_BYTE, total * SECONDS_PER_BYTE
        self._report(PACKING)

    def check(self, done: int, total: int) -> None:
        """Report bytes of an existing pack that are compared with its checksums, of all."""
        now = perf_counter()
        self._checking_since = self._checking_since or now
        if self.on_prepare is not None and not self._builds and now - self._checking_since > UNREPORTED_S:
            self.on_prepare(CHECKING, done / total)

    def finish(self) -> None:
        """Wait until everything is built.

        Raises:
            OndeviceError: kernels could not be built.
        """
        if not self._builds:
            return
        self.say()
        for build in self._builds:
            self._wait(build)
        self._report(COMPILING)

    def say(self) -> None:
        """Log one line about everything started so far, unless one was logged or nothing was started."""
        if self._work and not self._logged:
            self._logged = True
            _log.warning("preparing for this machine: %s", ", ".join(self._work))

    def _wait(self, build: Build) -> None:
        while not build.wait(POLL_S):
            self._report(COMPILING)

    def _report(self, stage: str) -> None:
        if self.on_prepare is None:
            return
        done, total = self._packed_s, self._packing_s
        for build in self._builds:
            building_s = FUNCTIONS[build.part] * SECONDS_PER_FUNCTION
            done, total = done + build.share * building_s, total + building_s
        self._share = max(self._share, done / total if total else 1.0)
        self.on_prepare(stage, self._share)
