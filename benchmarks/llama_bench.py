"""llama.cpp's llama-bench, asked for single forwards."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any


class LlamaBench:
    """A program, a GGUF file and a number of threads; `version` and `model` are as printed by the program."""

    name = "llama.cpp"

    def __init__(self, program: Path, gguf: Path, threads: int) -> None:
        """
        Raises:
            SystemExit: the program does not run, or cannot read the file.
        """
        self._command = [str(program), "--model", str(gguf), "--threads", str(threads), "--output", "json"]
        self._command += ["--n-gen", "0"]
        found = self._run([1], context=0, times=1, every_logit=False)[0]
        self.version: str = found["build_commit"]
        self.model = f"{found['model_type']}, {found['model_size'] / 1e9:.2f} GB"

    def seconds(self, rows: Iterable[int], context: int, times: int, *, every_logit: bool) -> dict[int, list[float]]:
        """Forwards of each of these numbers of rows, up to 512, after `context` tokens; warmed up by the program.

        A prompt's forward computes the logits of its last token alone. With `every_logit` it computes those of all, as
        a verification must: asked for embeddings, llama.cpp counts every token as an output (`llama_context::decode`)
        and multiplies every output by the head.
        """
        tests = self._run(rows, context, times, every_logit=every_logit)
        return {test["n_prompt"]: [taken / 1e9 for taken in test["samples_ns"]] for test in tests}

    def _run(self, rows: Iterable[int], context: int, times: int, *, every_logit: bool) -> list[dict[str, Any]]:
        options = {
            "--n-prompt": ",".join(map(str, rows)),
            "--n-depth": context,
            "--repetitions": times,
            "--embeddings": int(every_logit),
        }
        command = [*self._command, *(str(word) for option in options.items() for word in option)]
        try:
            found = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            raise SystemExit(f"{self._command[0]}: {error.strerror}: give the path of llama-bench") from error
        if found.returncode:
            last = (found.stderr.strip().splitlines() or ["it gives no reason"])[-1]
            raise SystemExit(f"{' '.join(command)} failed with exit code {found.returncode}: {last}")
        tests: list[dict[str, Any]] = json.loads(found.stdout)
        return tests
