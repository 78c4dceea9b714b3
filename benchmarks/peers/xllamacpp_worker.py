"""llama.cpp in a process of its own, through the package `xllamacpp`: requests and answers are lines of JSON.

`python -m benchmarks.peers.xllamacpp_worker FILE.gguf THREADS SPECULATION` reads `{"prompt": [ids], "n_predict": N,
...}`, the fields of llama-server's completion, and prints its `timings` and the number of bytes that the process has
needed so far. `LlamaProcess` starts and asks it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.llama_server import Completion, LlamaCpp

PLAIN = "NONE"
CONTEXT = 2048


class LlamaProcess(LlamaCpp):
    """A process of this module.

    Attributes:
        version: the version of the package, whose last part is llama.cpp's build number.
        start_s: seconds from its start to the first token of a prompt of one token.
    """

    def __init__(self, gguf: Path, threads: int, speculation: str = PLAIN) -> None:
        """
        Args:
            speculation: a name of llama.cpp's `common_speculative_type`, such as `NGRAM_SIMPLE`.

        Raises:
            SystemExit: xllamacpp is not installed, or llama.cpp cannot read the file.
        """
        command = [sys.executable, "-m", "benchmarks.peers.xllamacpp_worker", str(gguf), str(threads), speculation]
        started = time.perf_counter()
        super().__init__(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        line = self._process.stdout.readline() if self._process.stdout is not None else ""
        if not line:
            self.close()
            raise SystemExit(f"{' '.join(command)} ended at once: is xllamacpp installed?")
        self.version: str = json.loads(line)["version"]
        self.ask([1], n_predict=1)
        self.start_s = time.perf_counter() - started

    def ask(self, prompt: Sequence[int], **fields: Any) -> dict[str, Any]:
        """The timings of a completion: `prompt_n` tokens read in `prompt_ms`, `predicted_n` written in
        `predicted_ms`; `peak_bytes` of the process.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"prompt": list(prompt), "ignore_eos": True, **fields}) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def complete(self, token_ids: Sequence[int], options: dict[str, Any]) -> Completion:
        """Reply to a prompt; as `LlamaServer.complete`."""
        return Completion.of(self.ask(token_ids, ignore_eos=False, cache_prompt=False, **options))


def main(gguf: str, threads: str, speculation: str) -> None:
    import xllamacpp

    from ondevice.machine import peak_rss_bytes

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # llama.cpp writes its log to both
    params = xllamacpp.CommonParams()
    params.model.path = gguf
    params.n_ctx, params.n_parallel = CONTEXT, 1
    params.swa_full = True  # else a model with a window reads the whole prompt again behind a shared beginning
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(threads)
    if speculation != PLAIN:
        params.speculative.types = [
            getattr(xllamacpp.common_speculative_type, f"COMMON_SPECULATIVE_TYPE_{speculation}")
        ]
    server = xllamacpp.Server(params)
    print(json.dumps({"version": xllamacpp.__version__}), file=answers, flush=True)
    for line in sys.stdin:
        answer = server.handle_completions(json.loads(line))
        print(json.dumps({**answer["timings"], "peak_bytes": peak_rss_bytes()}), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
