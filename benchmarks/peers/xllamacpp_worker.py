"""llama.cpp in a process of its own, through the package `xllamacpp`: requests and answers are lines of JSON.

`python -m benchmarks.peers.xllamacpp_worker FILE.gguf THREADS SPECULATION` reads `{"prompt": [ids], "n_predict": N,
...}`, the fields of llama-server's completion, and prints its `timings` and the number of bytes that the process has
needed so far. SPECULATION is JSON: the fields of `Speculation`. `LlamaProcess` starts and asks it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

CONTEXT = 2048


@dataclass(frozen=True)
class Speculation:
    """How llama.cpp drafts: fields of its `common_params_speculative`.

    type : name of a `common_speculative_type`, such as NGRAM_SIMPLE or DRAFT_MTP
    drafter : path of the GGUF file of a drafter, for types that have one; the fields below are for those only
    n_max : most tokens of a draft
    p_min : a draft ends before a token that the drafter finds less probable than this
    probabilistic : tokens are drawn from the drafter's distribution and verified by rejection sampling; otherwise the
        drafter's likeliest tokens are compared with the target's draws
    """

    type: str = "NONE"
    drafter: str = ""
    n_max: int = 3
    p_min: float = 0.0
    probabilistic: bool = False


PLAIN = Speculation()


def mtp_ways(drafter: Path, lengths: Iterable[int], p_min: float) -> dict[str, Speculation]:
    """Drafts of an MTP drafter, by name: for each length a fixed one, one that ends before a token less probable than
    `p_min`, and one with sampled tokens.
    """
    ways = {}
    for length in lengths:
        fixed = Speculation("DRAFT_MTP", str(drafter), length)
        ways[f"mtp {length}"] = fixed
        ways[f"mtp {length}, p_min {p_min:g}"] = replace(fixed, p_min=p_min)
        ways[f"mtp {length}, probabilistic"] = replace(fixed, probabilistic=True)
    return ways


@dataclass(frozen=True)
class Completion:
    """A reply.

    seconds : from the first token to the last
    rounds : forwards of the target after the first token
    drafted, accepted : tokens of drafts; llama.cpp does not tell them by position
    """

    tokens: int
    seconds: float
    rounds: int
    drafted: int
    accepted: int

    @classmethod
    def of(cls, timings: Mapping[str, Any]) -> Completion:
        """The reply whose completion has these `timings`."""
        accepted = timings.get("draft_n_accepted", 0)
        return cls(
            tokens=timings["predicted_n"],
            seconds=timings["predicted_ms"] / 1e3,
            rounds=max(timings["predicted_n"] - 1 - accepted, 1),
            drafted=timings.get("draft_n", 0),
            accepted=accepted,
        )


class LlamaProcess:
    """A process of this module; a context manager that ends it. llama.cpp's log is not shown.

    Attributes:
        version: the version of the package, whose last part is llama.cpp's build number.
        start_s: seconds from its start to the first token of a prompt of one token.
    """

    def __init__(self, gguf: Path, threads: int, speculation: Speculation = PLAIN) -> None:
        """
        Raises:
            SystemExit: xllamacpp is not installed, or llama.cpp cannot read a file.
        """
        command = [sys.executable, "-m", "benchmarks.peers.xllamacpp_worker", str(gguf), str(threads)]
        self._command = [*command, json.dumps(asdict(speculation))]
        pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
        started = time.perf_counter()
        self._process = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, stderr=nowhere, text=True)
        try:
            self.version: str = self._answer()["version"]
            self.ask([1], n_predict=1)
        except BaseException:
            self.close()
            raise
        self.start_s = time.perf_counter() - started

    def ask(self, prompt: Sequence[int], **fields: Any) -> dict[str, Any]:
        """The timings of a completion: `prompt_n` tokens read in `prompt_ms`, `predicted_n` written in
        `predicted_ms`; `peak_bytes` of the process.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompt": list(prompt), "ignore_eos": True, **fields}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def complete(self, token_ids: Sequence[int], options: dict[str, Any]) -> Completion:
        """Reply to a prompt of token ids; nothing of an earlier prompt is used.

        Args:
            options: fields of the request, such as `n_predict`, `temperature` and `seed`.
        """
        return Completion.of(self.ask(token_ids, ignore_eos=False, cache_prompt=False, **options))

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            if find_spec("xllamacpp") is None:
                raise SystemExit("llama.cpp is run by the package xllamacpp: pip install xllamacpp")
            command = " ".join(self._command)
            raise SystemExit(f"{command} ended: can llama.cpp read its files?")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        self._process.terminate()
        self._process.communicate()


def main(gguf: str, threads: str, speculation: str) -> None:
    import xllamacpp

    from ondevice.machine import peak_rss_bytes

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # llama.cpp writes its log to both
    params = xllamacpp.CommonParams()
    params.model.path = gguf
    params.n_ctx, params.n_parallel = CONTEXT, 1
    params.swa_full = True  # else a model with a window reads the whole prompt again after a shared beginning
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(threads)
    way = Speculation(**json.loads(speculation))
    if way != PLAIN:
        kinds, draft = xllamacpp.common_speculative_type, params.speculative.draft
        params.speculative.types = [getattr(kinds, f"COMMON_SPECULATIVE_TYPE_{way.type}")]
        draft.mparams.path, draft.n_max, draft.p_min = way.drafter, way.n_max, way.p_min
        draft.probabilistic = way.probabilistic
        draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = int(threads)
    server = xllamacpp.Server(params)
    print(json.dumps({"version": xllamacpp.__version__}), file=answers, flush=True)
    for line in sys.stdin:
        answer = server.handle_completions(json.loads(line))
        print(json.dumps({**answer["timings"], "peak_bytes": peak_rss_bytes()}), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
