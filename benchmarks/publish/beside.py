"""Publish `ondevice bench` beside llama.cpp's llama-bench, on the same published file.

    python -m benchmarks.publish.beside LLAMA_BENCH [--threads 2] [--options="--repack 0"]

`LLAMA_BENCH` is the program's path, and the options are further ones for it. The file is SmolLM2-135M-Instruct in Q4_1;
`ondevice` runs an export that keeps its codes. Both programs run the same tests, one after the other, and what they
print goes as it is into docs/compare-latency.md, and into the page of results on published models beside that of other
processors.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.command import add_threads, command_line, run_command
from benchmarks.peers.llama_programs import run_program
from benchmarks.publish.pages import BLOCK, RESULTS, ROOT, fill
from models.published import fetch
from ondevice import machine
from ondevice_export import export

EXAMPLE, EVERY = ROOT / "docs" / "compare-latency.md", RESULTS / "published-models.md"
"""The page with the last run, and the page with the last one of every processor."""

BEGIN = "Both on one published file, "

TESTS = ("-p", "512", "-n", "128", "-pg", "512,128", "-d", "0,2048", "-r", "5")


def publish(program: Path, threads: int, options: Sequence[str] = ()) -> None:
    """Run both, and write what they print.

    Raises:
        NotFetchedError: the file cannot be had.
        SystemExit: a program fails, or is not there.
    """
    gguf = fetch("smollm2", lambda message: print(message, file=sys.stderr))
    with tempfile.TemporaryDirectory() as directory:
        bundle = export(gguf, Path(directory) / "smollm2")
        ours = ["bench", str(bundle), *TESTS, "--drafters", "none", "--threads", str(threads)]
        run_program(sys.executable, "-m", "ondevice", "prepare", bundle)
        own = run_program(sys.executable, "-m", "ondevice", *ours).stdout
    theirs = ["-m", gguf, *TESTS, "-t", threads, *options]
    other = run_program(program, *theirs).stdout
    shown = [
        f"{BEGIN}{gguf.name}, on {machine.processor_name()}, {machine.os_name()}:\n",
        _shown(" ".join(["ondevice", *ours]).replace(str(bundle), "bundles/smollm2"), own),
        _shown(" ".join(map(str, ["llama-bench", *theirs])).replace(str(gguf), gguf.name), other),
    ]
    found = "\n".join(shown)
    fill(EXAMPLE, found)
    known = "".join(BLOCK.findall(EVERY.read_text("utf-8"))).split(BEGIN)[1:]
    others = [f"{BEGIN}{run}" for run in known if machine.processor_name() not in run.partition("\n")[0]]
    fill(EVERY, "\n".join([*(run.rstrip("\n") + "\n" for run in others), found]))


def _shown(command: str, output: str) -> str:
    """A command and what it printed."""
    return f"```\n$ {command}\n{output.strip()}\n```\n"


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("llama_bench", type=Path, metavar="LLAMA_BENCH")
    add_threads(parser)
    parser.add_argument("--options", default="", metavar="WORDS", help="further options of llama-bench")
    arguments = parser.parse_args()
    if shutil.which(arguments.llama_bench) is None:  # before minutes of the other measurement
        raise SystemExit(f"{arguments.llama_bench} is no program: give the path of llama-bench")
    publish(arguments.llama_bench, arguments.threads, arguments.options.split())


if __name__ == "__main__":
    run_command(main)
