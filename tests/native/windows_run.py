"""Prints `tests.simd.outputs`' digest of a bundle, with every forward computed by a Windows library under Wine:

    python -m tests.native.windows_run LIBRARY.dll REPLAY.exe BUNDLE

Everything else runs here. A forward is one call of the kernel `run`, which takes addresses; so the memory of this
process is written to a file, `replay.c` maps it at the same addresses in a Windows process and calls the kernel there,
and the words that the kernel changed are copied back. One thread computes. A call takes half a second on an idle core.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

import numpy as np

from ondevice.bundle import Bundle
from ondevice.engines.simd import engine
from ondevice.engines.simd.kernels.contract.entries import run
from tests.simd.outputs import digest

BLOCK = 65536
"""Windows maps memory at multiples of this."""

PAGE = 4096

WAITING = ("wine", "cmd", "/c", "pause")
"""Runs meanwhile: Wine's server ends with its last process, and takes longer to start again than a call."""

FILES = (".pack", ".data", ".onnx")
"""Mapped files that kernels read."""

ATTEMPTS = 3
"""Processes that may end before they run the kernel: Wine may have used an address that a call needs, and another
process has other addresses. A process that ends in the kernel is a failure at once.
"""
RUNS = "the kernel runs"
"""The line `replay.c` prints before it calls the kernel."""


def main() -> None:
    library, program, bundle = map(Path, sys.argv[1:])
    calls = 0

    def replayed(*arguments: int) -> int:
        nonlocal calls
        _replay(library, program, arguments)
        calls += 1
        return 0

    run.function = replayed  # a cached property, which every call of the kernel reads
    real = engine.SimdEngine.__init__

    def with_one_thread(self: engine.SimdEngine, *args: object, **options: object) -> None:
        real(self, *args, **{**options, "threads": 1})  # type: ignore[arg-type]

    engine.SimdEngine.__init__ = with_one_thread  # type: ignore[method-assign]
    with subprocess.Popen(WAITING, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL):
        found = digest(Bundle.open(bundle))
    sys.stdout.write(f"{found} {calls}\n")


def _replay(library: Path, program: Path, arguments: tuple[int, ...]) -> None:
    """Run the kernel on this process's memory, in a Windows process, and copy back what it changed."""
    with tempfile.TemporaryDirectory() as directory:
        with Path(directory, "call").open("wb") as file:
            file.write(np.array([len(arguments), *arguments], np.int64).tobytes())
            mappings = [*_mappings()]
            ranges = _ranges(mappings)
            file.write(np.array([len(ranges), *(number for each in ranges for number in each)], np.int64).tobytes())
            with Path("/proc/self/mem").open("rb", buffering=0) as memory:
                blocks = [block for each in ranges for block in _blocks(memory, mappings, *each)]
            file.write(len(blocks).to_bytes(8, "little"))
            for address, content in blocks:
                file.write(address.to_bytes(8, "little") + content)
        command = ["wine", str(program), str(library.resolve()), run.symbol, "call", "result"]
        for _ in range(ATTEMPTS):
            done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
            if not done.returncode:
                break
            sys.stderr.write(f"{program.name} ended with {done.returncode}: {done.stderr.strip() or 'no message'}\n")
            if RUNS in done.stderr:
                raise SystemExit("the kernel failed")
        else:
            raise SystemExit(f"{program.name} failed {ATTEMPTS} times")
        for address, word in np.fromfile(Path(directory, "result"), np.int64).reshape(-1, 2).tolist():
            ctypes.c_int64.from_address(address).value = word


def _mappings() -> Iterator[tuple[int, int]]:
    """First and last address of the heap, of anonymous memory, and of the files that kernels read."""
    for line in Path("/proc/self/maps").read_text("utf-8").splitlines():
        addresses, rights, _, _, _, *name = line.split(maxsplit=5)
        is_memory = rights.startswith("rw") and (not name or name[0] == "[heap]")
        if is_memory or (rights.startswith("r") and name and Path(name[0]).suffix in FILES):
            first, last = (int(word, 16) for word in addresses.split("-"))
            yield first, last


def _ranges(mappings: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Start and size of the ranges that cover these mappings, in blocks."""
    found: list[tuple[int, int]] = []
    for first, last in sorted(mappings):
        start, stop = first // BLOCK * BLOCK, -(-last // BLOCK) * BLOCK
        if found and start <= sum(found[-1]):
            start = found.pop()[0]
        found.append((start, stop - start))
    return found


def _blocks(memory: FileIO, mappings: list[tuple[int, int]], start: int, size: int) -> Iterator[tuple[int, bytes]]:
    """Addresses and contents of a range's blocks, but those that hold only zeros.

    The allocator may have returned pages to the system since `mappings` was read: no kernel reads those.
    """
    content = np.zeros(size, np.uint8)
    for first, last in mappings:
        place, stop = first - start, last - start
        while 0 <= place < min(stop, size):
            memory.seek(start + place)
            try:
                place += memory.readinto(content.data[place:stop])
            except OSError:
                place += PAGE
    blocks = content.reshape(-1, BLOCK)
    for index in np.flatnonzero(blocks.view(np.int64).any(axis=1)).tolist():
        yield start + index * BLOCK, blocks[index].tobytes()


if __name__ == "__main__":
    main()
