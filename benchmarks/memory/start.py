"""How long does a process take to its first token, and how much memory does it need?

    python -m benchmarks.memory.start BUNDLE [--engine NAME] [--threads N] [--runs N] [--cold-runs N]
        [--prompt-tokens N]

Every run is a new `python -m ondevice generate`. Cold: no weights are packed and, where no kernel library is shipped,
no kernels are built: the cache is an empty directory. Warm: it is as the last cold run left it. Either way the bundle
itself may lie in the system's page cache, which only root can empty; a first start after booting reads it from the disk
as well.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from tqdm import tqdm

from benchmarks.command import add_threads, command_line, run_command
from benchmarks.memory.watch import Memory, MemoryWatch
from ondevice.bundle import Bundle
from ondevice.cli.bench.tables import setup, setup_line, table, versions_line
from ondevice.native import library


@dataclass(frozen=True)
class Start:
    """One process. `first_token_s` includes the interpreter; `load_s` and `prefill_s` are the program's own figures."""

    engine: str
    first_token_s: float
    load_s: float
    prefill_s: float
    peak_rss_bytes: int
    memory: Memory | None


def main() -> None:
    arguments = _parse()
    manifest = Bundle.open(arguments.bundle).manifest
    threads = arguments.threads
    command = _command(arguments, threads, manifest.target.vocab_size)
    starts: dict[str, list[Start]] = {"cold": [], "warm": []}
    with tempfile.TemporaryDirectory() as root, tqdm(total=arguments.runs + arguments.cold_runs, disable=None) as bar:
        for number in range(arguments.cold_runs):
            with tempfile.TemporaryDirectory(dir=root) as caches:
                starts["cold"].append(start(command, Path(caches)))
                bar.update()
                for _ in range(arguments.runs if number == arguments.cold_runs - 1 else 0):
                    starts["warm"].append(start(command, Path(caches)))
                    bar.update()
    facts = setup(manifest, starts["warm"][0].engine, threads) | {"prompt_tokens": arguments.prompt_tokens}
    print(report(starts, facts))


def start(command: Sequence[str], caches: Path) -> Start:
    """Run the command with its cache in a directory, up to its only line of output, which is a JSON object."""
    environment = {**os.environ, "ONDEVICE_CACHE": str(caches)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its byte code: compiling takes 0.2 s
    started = perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        with MemoryWatch(process.pid) as watch:
            line = process.stdout.readline()
            seconds = perf_counter() - started
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed with exit code {process.returncode}")
    stats = json.loads(line)["stats"]
    names = ("engine", "load_s", "prefill_s", "peak_rss_bytes")
    return Start(**{name: stats[name] for name in names}, first_token_s=seconds, memory=watch.peak)


def report(starts: dict[str, list[Start]], facts: dict[str, Any]) -> str:
    """Markdown: medians of the runs from cold and from warm caches, and the conditions."""
    kernels = "built at a cold start" if library.choice().file is None else "shipped"
    return "\n".join(
        [
            table(
                ["caches", "runs", "first token s", "min to max", "load s", "prefill s", "RSS MB", "anonymous", "file"],
                [_row(state, those) for state, those in starts.items()],
                left={"caches"},
            ),
            "",
            setup_line(facts),
            f"medians; a prompt of {facts['prompt_tokens']} tokens; "
            "RSS is the peak, its parts were sampled when it was largest",
            f"cold: an empty cache; kernels {kernels}; the bundle's files may be in the page cache all the same",
            versions_line(facts),
        ]
    )


def _row(state: str, starts: Sequence[Start]) -> list[str]:
    seconds = [one.first_token_s for one in starts]
    memories = [one.memory for one in starts if one.memory is not None]
    return [
        state,
        str(len(starts)),
        f"{median(seconds):.2f}",
        f"{min(seconds):.2f} to {max(seconds):.2f}",
        f"{median(one.load_s for one in starts):.2f}",
        f"{median(one.prefill_s for one in starts):.2f}",
        f"{median(one.peak_rss_bytes for one in starts) / 1e6:.0f}",
        _megabytes([memory.anonymous for memory in memories]),
        _megabytes([memory.file_backed for memory in memories]),
    ]


def _megabytes(sizes: Sequence[int]) -> str:
    return f"{median(sizes) / 1e6:.0f}" if sizes else "unknown"


def _command(arguments: argparse.Namespace, threads: int, vocab_size: int) -> list[str]:
    ids = ",".join(str((2 + 7 * place) % vocab_size) for place in range(arguments.prompt_tokens))
    command = [sys.executable, "-m", "ondevice", "generate", str(arguments.bundle), "--ids", ids]
    command += ["--max-new-tokens", "1", "--json", "--threads", str(threads)]
    return [*command, "--engine", arguments.engine]


def _parse() -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--engine", default="auto", help="as `ondevice generate` names it (default: auto)")
    add_threads(parser)
    parser.add_argument("--runs", type=int, default=5, metavar="N", help="from warm caches (default: 5)")
    parser.add_argument("--cold-runs", type=int, default=3, metavar="N", help="from empty caches (default: 3)")
    parser.add_argument("--prompt-tokens", type=int, default=16, metavar="N", help="different ones (default: 16)")
    arguments = parser.parse_args()
    if min(arguments.runs, arguments.cold_runs) < 1:
        parser.error("--runs and --cold-runs must be at least 1: warm caches are those that a cold run has filled")
    if arguments.prompt_tokens < 1:
        parser.error("--prompt-tokens must be at least 1")
    return arguments


if __name__ == "__main__":
    run_command(main)
