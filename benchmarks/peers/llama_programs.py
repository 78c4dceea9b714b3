"""llama.cpp's programs llama-bench, llama-batched-bench and llama-mtmd-cli: forwards, several sequences, pictures."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def run_program(*words: object) -> subprocess.CompletedProcess[str]:
    """Run one of llama.cpp's programs.

    Args:
        words: its path, then its arguments.

    Raises:
        SystemExit: it does not run, or fails.
    """
    command = [str(word) for word in words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise SystemExit(f"{command[0]}: {error.strerror}: give the path of {Path(command[0]).name}") from error
    if done.returncode:
        last = ((done.stderr or done.stdout).strip().splitlines() or ["it gives no reason"])[-1]
        raise SystemExit(f"{' '.join(command)} failed with exit code {done.returncode}: {last}")
    return done


def version(program: Path) -> str:
    """The program's own name and version."""
    found = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    lines = [line for line in (found.stderr + found.stdout).splitlines() if line.startswith("version")]
    return lines[0].removeprefix("version: ") if lines else "unknown"


class LlamaBench:
    """llama-bench, a GGUF file and a number of threads; `version` and `model` are as printed by the program."""

    name = "llama.cpp"

    def __init__(self, program: Path, gguf: Path, threads: int) -> None:
        """
        Raises:
            SystemExit: the program does not run, or cannot read the file.
        """
        self._command = [program, "--model", gguf, "--threads", threads, "--output", "json", "--n-gen", 0]
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
        options = ["--n-prompt", ",".join(map(str, rows)), "--n-depth", context, "--repetitions", times]
        found = run_program(*self._command, *options, "--embeddings", int(every_logit))
        tests: list[dict[str, Any]] = json.loads(found.stdout)
        return tests


def decoding_speed(program: Path, gguf: Path, threads: int, tokens: int) -> float:
    """Tokens per second of llama-bench that generates some tokens once, warmed up by the program.

    Raises:
        SystemExit: the program does not run, or cannot read the file.
    """
    options = ["--n-prompt", 0, "--n-gen", tokens, "--repetitions", 1, "--output", "json"]
    found = run_program(program, "--model", gguf, "--threads", threads, *options).stdout
    return float(json.loads(found)[0]["avg_ts"])


@dataclass(frozen=True)
class BatchedBench:
    """llama-batched-bench, a GGUF file and a number of threads."""

    program: Path
    gguf: Path
    threads: int

    def tokens_per_s(self, sequences: Sequence[int], prompt_tokens: int, new_tokens: int) -> dict[int, float]:
        """Decoding speed of all sequences together, by their number.

        Raises:
            SystemExit: the program does not run, or cannot read the file.
        """
        found = run_program(
            self.program, "--model", self.gguf, "--threads", self.threads,
            "--ctx-size", max(sequences) * (prompt_tokens + new_tokens), "-npp", prompt_tokens, "-ntg", new_tokens,
            "-npl", ",".join(map(str, sequences)), "--output-format", "jsonl",
        )  # fmt: skip
        speeds = speeds_of(found.stdout)
        if set(speeds) != set(sequences):
            raise SystemExit(f"{self.program} measured {sorted(speeds)} sequences instead of {sorted(sequences)}")
        return speeds


def speeds_of(output: str) -> dict[int, float]:
    """The speeds in llama-batched-bench's JSON lines; other lines are its log."""
    results = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return {result["pl"]: result["speed_tg"] for result in results}


@dataclass(frozen=True)
class LlamaMtmd:
    """llama-mtmd-cli and its files.

    gguf : any text model of the tower's width, such as `benchmarks.bundles.gguf_files widened` writes
    mmproj : the tower, of `benchmarks.bundles.gguf_files tower`
    """

    program: Path
    gguf: Path
    mmproj: Path
    threads: int

    def seconds(self, picture: Path) -> float:
        """Seconds to encode a picture file, in a process that has warmed up.

        Raises:
            SystemExit: the program does not run, or does not say how long it took.
        """
        ended = run_program(
            self.program, "--model", self.gguf, "--mmproj", self.mmproj, "--threads", self.threads,
            "--image", picture, "--prompt", "x", "--predict", 1, "--ctx-size", 4096, "--chat-template", "chatml",
        )  # fmt: skip
        found = re.findall(r"encoding done in (\d+) ms", ended.stderr + ended.stdout)
        if not found:
            raise SystemExit(f"{self.program} encoded no picture")
        return int(found[-1]) / 1e3


def add_llama_bench(parser: argparse.ArgumentParser) -> None:
    """The options that name llama-bench and its file."""
    parser.add_argument("--llama-bench", type=Path, metavar="PROGRAM", help="measure llama.cpp too")
    _add_gguf(parser, "shape")


def add_batched_bench(parser: argparse.ArgumentParser) -> None:
    """The options that name llama-batched-bench and its file."""
    parser.add_argument("--batched-bench", type=Path, metavar="PROGRAM", help="llama.cpp's llama-batched-bench")
    _add_gguf(parser, "shape")


def add_llama_mtmd(parser: argparse.ArgumentParser) -> None:
    """The options that name llama-mtmd-cli and its files."""
    parser.add_argument("--llama-mtmd-cli", type=Path, metavar="PROGRAM", help="compare pictures with llama.cpp's")
    parser.add_argument("--mmproj-gguf", type=Path, metavar="FILE", help="from benchmarks.bundles.gguf_files tower")
    _add_gguf(parser, "widened")


def _add_gguf(parser: argparse.ArgumentParser, kind: str) -> None:
    parser.add_argument("--gguf", type=Path, metavar="FILE", help=f"from benchmarks.bundles.gguf_files {kind}")


def llama_bench(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> LlamaBench | None:
    """The programs that the options of `add_llama_bench` name; None if they were not given."""
    if (arguments.llama_bench is None) != (arguments.gguf is None):
        parser.error("--llama-bench and --gguf go together")
    return arguments.llama_bench and LlamaBench(arguments.llama_bench, arguments.gguf, arguments.threads)


def batched_benches(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, threads: Sequence[int]
) -> list[BatchedBench]:
    """One `BatchedBench` for each number of threads; none if the options were not given."""
    if (arguments.batched_bench is None) != (arguments.gguf is None):
        parser.error("--batched-bench and --gguf go together")
    if arguments.gguf is None:
        return []
    return [BatchedBench(arguments.batched_bench, arguments.gguf, count) for count in threads]
