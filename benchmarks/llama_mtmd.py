"""llama.cpp's llama-mtmd-cli: the time that its vision tower takes for a picture."""

from __future__ import annotations

import argparse
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class LlamaMtmd:
    """The program and its files.

    gguf : any text model of the tower's width, such as one of `benchmarks.widened_gguf`
    mmproj : the tower, of `benchmarks.mmproj_gguf`
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
        command = [
            str(self.program), "--model", str(self.gguf), "--mmproj", str(self.mmproj), "--threads", str(self.threads),
            "--image", str(picture), "--prompt", "x", "--predict", "1", "--ctx-size", "4096",
            "--chat-template", "chatml",
        ]  # fmt: skip
        try:
            ended = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        except OSError as error:
            raise SystemExit(f"{self.program}: {error.strerror}: give the path of llama-mtmd-cli") from error
        found = re.findall(r"encoding done in (\d+) ms", ended.stderr + ended.stdout)
        if not found:
            raise SystemExit(f"{' '.join(command)} encoded no picture: exit code {ended.returncode}")
        return int(found[-1]) / 1e3


def add_llama_mtmd(parser: argparse.ArgumentParser) -> None:
    """The options that name the program and its files."""
    parser.add_argument("--llama-mtmd-cli", type=Path, metavar="PROGRAM", help="compare pictures with llama.cpp's")
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="a model for it: benchmarks.widened_gguf")
    parser.add_argument("--mmproj-gguf", type=Path, metavar="FILE", help="its tower: benchmarks.mmproj_gguf")
