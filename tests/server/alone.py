"""A server in a process of its own, and a second process that asks for its health every 10 ms.

The test's own process sends large requests meanwhile, in which its threads cannot measure anything.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from tests.conftest import ROOT
from tests.server.served import PATIENCE_S, Client, wait_until

TICKS = os.sysconf("SC_CLK_TCK")


class Health(NamedTuple):
    """The observations of the second process.

    asked : number of requests for the server's health
    longest_s : time until the latest answer
    longest_cpu_s : processor time of the server until the latest answer: what other programs take is not in it
    """

    asked: int
    longest_s: float
    longest_cpu_s: float


class Alone(Client):
    """A server in a process of its own."""

    def __init__(self, process: subprocess.Popen[str], address: str, errors: Path) -> None:
        parts = urlsplit(address)
        super().__init__(parts.hostname or "", parts.port or 0)
        self.pid = process.pid
        self._errors = errors
        self.at_rest = self.memory("VmRSS")
        """Bytes of its memory before its first request."""

    @property
    def errors(self) -> str:
        """Its standard error since its start."""
        return self._errors.read_text("utf-8")

    def memory(self, name: str) -> int:
        """Bytes of its memory: VmRSS is that of now, VmHWM the peak."""
        lines = Path(f"/proc/{self.pid}/status").read_text("utf-8").splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))

    @contextmanager
    def watched(self) -> Iterator[list[Health]]:
        """Ask for its health within the block; the list has one entry at the end."""
        command = [sys.executable, "-m", "tests.server.alone", self.host, str(self.port), str(self.pid)]
        found: list[Health] = []
        with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            process.stdout.readline()  # it has begun
            try:
                yield found
            finally:
                said, _ = process.communicate("\n", PATIENCE_S)
        found.append(Health(*json.loads(said)))


@contextmanager
def served_alone(bundle: Path, directory: Path, *words: str) -> Iterator[Alone]:
    """Run `ondevice serve` within the block, with one thread for computing.

    Args:
        directory: for its standard error.
        words: further options.
    """
    errors = directory / "stderr.txt"
    command = [sys.executable, "-m", "ondevice", "serve", str(bundle), "--port", "0", "--threads", "1", *words]
    with (
        errors.open("wb") as file,
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=file, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            url = json.loads(process.stdout.readline())["url"]
            client = Client(urlsplit(url).hostname or "", urlsplit(url).port or 0)
            wait_until(lambda: client.get("/health").status == 200)
            yield Alone(process, url, errors)
        finally:
            process.terminate()


def watch(host: str, port: int, pid: int) -> Health:
    """Ask for the server's health every 10 ms until a line comes in."""

    def processor_s() -> float:
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    asked, longest_s, longest_cpu_s = 0, 0.0, 0.0
    with closing(HTTPConnection(host, port, timeout=PATIENCE_S)) as connection:
        while True:
            began, cpu = time.perf_counter(), processor_s()
            ask(connection)
            longest_s = max(longest_s, time.perf_counter() - began)
            longest_cpu_s = max(longest_cpu_s, processor_s() - cpu)
            asked += 1
            if asked == 1:
                sys.stdout.write("asking\n")
                sys.stdout.flush()
            if select.select([sys.stdin], [], [], 0.01)[0]:
                return Health(asked, longest_s, longest_cpu_s)


def ask(connection: HTTPConnection) -> None:
    """Ask for the server's health, again where a new connection took the place of this one while it was idle."""
    while True:
        with suppress(ConnectionError):
            connection.request("GET", "/health")
            answer = connection.getresponse()
            answer.read()
            assert answer.status == 200
            return
        connection.close()


if __name__ == "__main__":
    host, port, pid = sys.argv[1:]
    sys.stdout.write(json.dumps(watch(host, int(port), int(pid))))
