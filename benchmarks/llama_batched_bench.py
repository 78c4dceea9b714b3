"""llama.cpp's llama-batched-bench: tokens per second of several sequences at once."""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class BatchedBench:
    """The program, a GGUF file and a number of threads."""

    program: Path
    gguf: Path
    threads: int

    def tokens_per_s(self, sequences: Sequence[int], prompt_tokens: int, new_tokens: int) -> dict[int, float]:
        """Decoding speed of all sequences together, by their number.

        Raises:
            SystemExit: the program does not run, or cannot read the file.
        """
        options = {
            "--model": self.gguf,
            "--threads": self.threads,
            "--ctx-size": max(sequences) * (prompt_tokens + new_tokens),
            "-npp": prompt_tokens,
            "-ntg": new_tokens,
            "-npl": ",".join(map(str, sequences)),
            "--output-format": "jsonl",
        }
        command = [str(self.program), *(str(word) for option in options.items() for word in option)]
        try:
            found = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            raise SystemExit(f"{self.program}: {error.strerror}: give the path of llama-batched-bench") from error
        speeds = speeds_of(found.stdout)
        if found.returncode or set(speeds) != set(sequences):
            last = (found.stderr.strip().splitlines() or ["it gives no reason"])[-1]
            raise SystemExit(f"{' '.join(command)} failed with exit code {found.returncode}: {last}")
        return speeds


def add_batched_bench(parser: argparse.ArgumentParser) -> None:
    """The options that name the program and its file."""
    parser.add_argument("--batched-bench", type=Path, metavar="PROGRAM", help="llama.cpp's llama-batched-bench")
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="what it runs: see benchmarks.e2b_gguf")


def batched_benches(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, threads: Sequence[int]
) -> list[BatchedBench]:
    """One `BatchedBench` for each number of threads; none if the options were not given."""
    if (arguments.batched_bench is None) != (arguments.gguf is None):
        parser.error("--batched-bench and --gguf belong together")
    if arguments.gguf is None:
        return []
    return [BatchedBench(arguments.batched_bench, arguments.gguf, count) for count in threads]


def speeds_of(output: str) -> dict[int, float]:
    """The speeds in its JSON lines; other lines are its log."""
    results = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return {result["pl"]: result["speed_tg"] for result in results}
