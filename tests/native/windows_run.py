"""Prints `tests.simd.outputs`' digest of a bundle, with every forward computed by a Windows library under Wine:

    python -m tests.native.windows_run LIBRARY.dll REPLAY.exe BUNDLE

Everything else runs here. A forward is one call of the kernel `run`, which takes addresses; so a Windows process,
`replay.c`, has the memory of this one at the same addresses and calls the kernel there, and the words that the kernel
changed are copied back. Only blocks that have changed since the last call are sent. One thread computes.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from ondevice.arrays import Int64Array
from ondevice.bundle import Bundle
from ondevice.engines.simd import engine
from ondevice.engines.simd.kernels.contract.entries import run
from tests.simd.outputs import digest

BLOCK = 65536
"""Windows maps memory at multiples of this."""

PAGE = 4096

SLOTS = 32768
"""Blocks that the Windows process can have: as in `replay.c`."""

FILES = (".pack", ".data", ".onnx")
"""Mapped files that kernels read."""

ATTEMPTS = 3
"""Processes that may end before they run the kernel: Wine may have used an address that a call needs, and another
process has other addresses. A process that ends in the kernel is a failure at once.
"""
RUNS, END = 1, -1
"""Numbers that `replay.c` writes before it calls the kernel, and after the blocks that the kernel changed."""


class KernelNotReachedError(Exception):
    """The Windows process ended before it called the kernel."""


def main() -> None:
    library, program, bundle = map(Path, sys.argv[1:])
    command = ["wine", str(program), str(library.resolve()), run.symbol]
    real, calls = engine.SimdEngine.__init__, 0

    def with_one_thread(self: engine.SimdEngine, *args: object, **options: object) -> None:
        real(self, *args, **{**options, "threads": 1})  # type: ignore[arg-type]

    engine.SimdEngine.__init__ = with_one_thread  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as directory, ExitStack() as processes:

        def started() -> WindowsProcess:
            process = WindowsProcess(command, Path(directory))
            processes.callback(process.end)
            return process

        process = started()

        def replayed(*arguments: int) -> int:
            nonlocal process, calls
            calls += 1
            for _ in range(ATTEMPTS):
                try:
                    process.call(arguments)
                except KernelNotReachedError:
                    process = started()
                else:
                    return 0
            raise SystemExit(f"{program.name} failed {ATTEMPTS} times")

        run.function = replayed  # a cached property, which every call of the kernel reads
        found = digest(Bundle.open(bundle))
    sys.stdout.write(f"{found} {calls}\n")


class WindowsProcess:
    """A process of `replay.c`, which has blocks of this process's memory, each in a slot.

    Their contents here and there are in mapped files, which are no memory that would have to be sent.
    """

    def __init__(self, command: Sequence[str], directory: Path) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._here, self._there = (
            np.memmap(directory / name, np.int64, "w+", shape=(SLOTS, BLOCK // 8)).view(np.ndarray)
            for name in ("here", "there")
        )
        self._slots: dict[int, int] = {}
        self._addresses = np.zeros(SLOTS, np.int64)
        self._free = [*range(SLOTS - 1, -1, -1)]

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()

    def call(self, arguments: Sequence[int]) -> None:
        """Run the kernel there, and change the words of this process's memory that it has changed.

        Raises:
            KernelNotReachedError: the process has ended before it called the kernel.
        """
        assert self._process.stdin is not None
        mappings = [*_mappings()]
        try:
            self._send([len(arguments), *arguments])
            self._send_places({address for first, last in mappings for address in range(_block(first), last, BLOCK)})
            self._read(mappings)
            self._send_contents()
            self._process.stdin.flush()
            reached = self._answers(1)[0]
        except (BrokenPipeError, EOFError):
            raise KernelNotReachedError from None
        assert reached == RUNS
        try:
            while (slot := int(self._answers(1)[0])) != END:
                self._take(slot, self._answers(BLOCK // 8))
        except EOFError:
            raise SystemExit(f"the process ended with {self._process.wait():#x} in the kernel") from None

    def _send(self, numbers: Sequence[int]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(np.array(numbers, np.int64).tobytes())

    def _send_places(self, addresses: set[int]) -> None:
        """Tell which blocks are gone and which are new."""
        gone = [self._slots.pop(address) for address in self._slots.keys() - addresses]
        self._send([len(gone), *gone])
        for contents in (self._here, self._there):
            contents[gone] = 0
        self._free += gone
        new = [(self._free.pop(), address) for address in sorted(addresses - self._slots.keys())]
        for slot, address in new:
            self._slots[address], self._addresses[slot] = slot, address
        self._send([len(new), *(number for each in new for number in each)])

    def _read(self, mappings: Sequence[tuple[int, int]]) -> None:
        """Copy the contents of all blocks to `_here`; what is not mapped, or cannot be read, is 0.

        The allocator may have returned pages to the system since `mappings` was read: no kernel reads those.
        """
        for first, last in mappings:
            for address in (first, last - 1):  # a part of their blocks may not be mapped
                self._here[self._slots[_block(address)]] = 0
        with Path("/proc/self/mem").open("rb", buffering=0) as memory:
            for first, last in mappings:
                for start in range(_block(first), last, BLOCK):
                    content = self._here[self._slots[start]].data.cast("B")
                    place, stop = max(first - start, 0), min(last - start, BLOCK)
                    while place < stop:
                        memory.seek(start + place)
                        try:
                            place += memory.readinto(content[place:stop])
                        except OSError:
                            content[place : place + PAGE] = bytes(PAGE)
                            place += PAGE

    def _send_contents(self) -> None:
        """Send the blocks whose contents are others there."""
        assert self._process.stdin is not None
        stop, changed = max(self._slots.values()) + 1, list[int]()
        for first in range(0, stop, 64):
            part = slice(first, min(first + 64, stop))
            differs = (self._here[part] != self._there[part]).any(axis=1)
            changed += (first + np.flatnonzero(differs)).tolist()
        self._send([len(changed)])
        for slot in changed:
            self._send([slot])
            self._process.stdin.write(self._here[slot].data)
            self._there[slot] = self._here[slot]

    def _take(self, slot: int, content: Int64Array) -> None:
        """Change the words of a block that are others there now."""
        start = int(self._addresses[slot])
        for index in np.flatnonzero(content != self._there[slot]).tolist():
            ctypes.c_int64.from_address(start + 8 * index).value = int(content[index])
        self._there[slot] = content

    def _answers(self, count: int) -> Int64Array:
        """The next numbers that the process writes."""
        assert self._process.stdout is not None
        found = self._process.stdout.read(8 * count)
        if len(found) < 8 * count:
            raise EOFError
        return np.frombuffer(found, np.int64)


def _block(address: int) -> int:
    """The address of the block that an address is in."""
    return address // BLOCK * BLOCK


def _mappings() -> Iterator[tuple[int, int]]:
    """First and last address of the heap, of anonymous memory, and of the files that kernels read."""
    for line in Path("/proc/self/maps").read_text("utf-8").splitlines():
        addresses, rights, _, _, _, *name = line.split(maxsplit=5)
        is_memory = rights.startswith("rw") and (not name or name[0] == "[heap]")
        if is_memory or (rights.startswith("r") and name and Path(name[0]).suffix in FILES):
            first, last = (int(word, 16) for word in addresses.split("-"))
            yield first, last


if __name__ == "__main__":
    main()
