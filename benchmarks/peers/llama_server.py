"""llama.cpp's llama-server: replies to prompts of token ids, with a kind of speculative decoding or none."""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

PLAIN, NGRAM, MTP = "plain", "ngram", "mtp"

START_S = 300
"""A server that is not ready after this time is given up."""


@dataclass(frozen=True)
class Completion:
    """A reply.

    seconds : from the first token to the last
    rounds : forwards of the target after the first token
    drafted, accepted : tokens of drafts; llama-server does not tell them by position
    """

    tokens: int
    seconds: float
    rounds: int
    drafted: int
    accepted: int

    @classmethod
    def of(cls, timings: Mapping[str, Any]) -> Completion:
        """The reply that an answer to `/completion` has these `timings` of."""
        accepted = timings.get("draft_n_accepted", 0)
        return cls(
            tokens=timings["predicted_n"],
            seconds=timings["predicted_ms"] / 1e3,
            rounds=max(timings["predicted_n"] - 1 - accepted, 1),
            drafted=timings.get("draft_n", 0),
            accepted=accepted,
        )


class LlamaCpp:
    """A process of llama.cpp with one model; a context manager that ends it."""

    def __init__(self, command: Sequence[str], **streams: Any) -> None:
        """`streams` are those of `subprocess.Popen`; llama.cpp's log, on standard error, is not shown."""
        self._process = subprocess.Popen(command, stderr=subprocess.DEVNULL, **streams)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


class LlamaServer(LlamaCpp):
    """A running server with one slot."""

    def __init__(self, program: Path, gguf: Path, threads: int, options: Sequence[str] = ()) -> None:
        """
        Args:
            options: further arguments, such as those of `speculative`.

        Raises:
            SystemExit: the program does not run, or cannot read the file.
        """
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        command = [str(program), "--model", str(gguf), "--threads", str(threads), "--port", str(port)]
        command += ["--ctx-size", "4096", "--parallel", "1", "--no-webui", *options]
        try:
            super().__init__(command, stdout=subprocess.DEVNULL)
        except OSError as error:
            raise SystemExit(f"{program}: {error.strerror}: give the path of llama-server") from error
        try:
            self._wait(" ".join(command))
        except BaseException:
            self.close()
            raise

    def complete(self, token_ids: Sequence[int], options: dict[str, Any]) -> Completion:
        """Reply to a prompt of token ids; nothing of an earlier prompt is used.

        Args:
            options: fields of the request, such as `n_predict`, `temperature` and `seed`.
        """
        fields = {"prompt": list(token_ids), "cache_prompt": False, **options}
        return Completion.of(self._post("/completion", fields)["timings"])

    def _wait(self, command: str) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if (code := self._process.poll()) is not None:
                raise SystemExit(f"{command} ended with exit code {code}")
            try:
                with urlopen(f"{self._url}/health", timeout=5):
                    return
            except (URLError, OSError):  # not listening yet, or still loading: HTTP status 503
                time.sleep(0.2)
        raise SystemExit(f"{command} was not ready after {START_S} s")

    def _post(self, path: str, fields: dict[str, Any]) -> Any:
        request = Request(self._url + path, json.dumps(fields).encode(), {"Content-Type": "application/json"})
        try:
            with urlopen(request, timeout=600) as answer:
                return json.load(answer)
        except HTTPError as error:
            raise SystemExit(
                f"llama-server answered {error.code}: {error.read(300).decode(errors='replace')}"
            ) from error


def speculative(mtp_gguf: Path | None, drafts: int) -> dict[str, list[str]]:
    """The arguments of plain decoding, of drafts by n-grams, and of MTP drafts if there is a file of the drafter.

    Args:
        drafts: MTP tokens of a draft.
    """
    ways = {PLAIN: [], NGRAM: ["--spec-type", "ngram-simple"]}
    if mtp_gguf is not None:
        model = ["--spec-draft-model", str(mtp_gguf), "--spec-draft-n-max", str(drafts)]
        ways[f"{MTP} {drafts}"] = ["--spec-type", "draft-mtp", *model]
    return ways


def add_llama_server(parser: argparse.ArgumentParser) -> None:
    """The options that name the program and its files."""
    parser.add_argument("--llama-server", type=Path, metavar="PROGRAM", help="llama.cpp's llama-server")
    parser.add_argument(
        "--gguf",
        type=Path,
        metavar="FILE",
        help="what it runs, or xllamacpp without the program",
    )
    parser.add_argument("--mtp-gguf", type=Path, metavar="FILE", help="its MTP drafter")
    parser.add_argument("--mtp-drafts", type=int, default=3, metavar="N", help="MTP tokens of a draft (default: 3)")


def version(program: Path) -> str:
    """The program's own name and version."""
    found = subprocess.run([os.fspath(program), "--version"], capture_output=True, text=True, check=False)
    lines = [line for line in (found.stderr + found.stdout).splitlines() if line.startswith("version")]
    return lines[0].removeprefix("version: ") if lines else "unknown"
