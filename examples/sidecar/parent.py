"""A program that starts `ondevice serve` as a child process, sends it requests, and ends it on exit.

    python examples/sidecar/parent.py BUNDLE "Why is the sky blue?"

It needs the Python standard library only; an application in another language can do the same. The server listens on a
free local port and prints its address in its first line of output. It ends when its standard input is closed, which
also happens when the parent crashes.
"""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self


class Sidecar:
    """A server of one bundle, with an API key that only this process knows, so that no other user can use it."""

    def __init__(self, bundle: str) -> None:
        self._key = secrets.token_hex(16)
        with tempfile.TemporaryDirectory() as directory:  # the key is in a file: other users can read command lines
            key_file = Path(directory) / "key"
            key_file.touch(mode=0o600)
            key_file.write_text(self._key)
            # -P: without it Python would import a folder `ondevice` of the current directory
            command = [sys.executable, "-P", "-m", "ondevice", "serve", bundle, "--port", "0", "--exit-with-parent"]
            self._process = subprocess.Popen(
                [*command, "--api-key-file", str(key_file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            assert self._process.stdout is not None
            line = self._process.stdout.readline()
        if not line:
            raise SystemExit(self._process.wait())  # the server has printed the reason
        self.url = json.loads(line)["url"]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def wait_until_ready(self) -> None:
        """Wait until the model is loaded, and show the progress: the first start compiles kernels and packs weights."""
        while self._process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.url}/health"):
                    return
            except urllib.error.HTTPError as loading:
                error = json.load(loading)["error"]
                print(f"\r{error['stage']}: {error['progress']:.0%}", end="", file=sys.stderr)
            time.sleep(0.2)
        raise SystemExit(self._process.returncode)

    def chat(self, messages: list[dict[str, str]], **options: Any) -> Iterator[str]:
        """Stream the pieces of a reply; closing the iterator early cancels the reply."""
        body = json.dumps({"messages": messages, "stream": True, **options}).encode()
        headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/v1/chat/completions", body, headers)
        with urllib.request.urlopen(request) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    yield json.loads(line[len(b"data: ") :])["choices"][0]["delta"].get("content") or ""


def main() -> None:
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    bundle, question = sys.argv[1:]
    with Sidecar(bundle) as sidecar:
        sidecar.wait_until_ready()
        for text in sidecar.chat([{"role": "user", "content": question}]):
            print(text, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
