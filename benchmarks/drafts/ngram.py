"""How often are n-gram drafts right, is their confidence calibrated, and what do they cost?

    python -m benchmarks.drafts.ngram [FILE ...]

Reads each file word by word as if it were being generated, guesses the next word before reading it, and prints Markdown
tables. Without files it takes modules of this interpreter's standard library.
"""

from __future__ import annotations

import platform
import random
import re
import sysconfig
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

import ondevice
from benchmarks.command import command_line, run_command
from ondevice.cli.bench.tables import table
from ondevice.engines.protocol import Outputs
from ondevice.generate.drafters.ngram import NgramDrafter, SuffixAutomaton
from ondevice.generate.drafters.protocol import DraftRequest

WORD = re.compile(r"\w+|\s+|[^\w\s]")
NO_SESSION: Any = None
"""The n-gram drafter reads the text only: it uses neither the target's session"""
NO_OUTPUTS = Outputs(np.zeros((1, 0), np.float32), np.zeros((1, 0), np.float32))
"""nor the target's outputs."""


def texts(paths: list[Path]) -> list[list[int]]:
    """Each file as ids of its words, numbered as they first appear in any."""
    ids: dict[str, int] = {}
    words = (WORD.findall(path.read_text(encoding="utf-8", errors="replace")) for path in paths)
    return [[ids.setdefault(word, len(ids)) for word in text] for text in words]


def standard_library(count: int) -> list[Path]:
    modules = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return random.Random(0).sample(modules, count)


def guesses(text: list[int]) -> NDArray[np.float64]:
    """float64[n, 3]: raw confidence of the guess for each next word, calibrated confidence, whether it was right."""
    rows = []
    automaton, drafter = SuffixAutomaton(), NgramDrafter()
    drafter.begin([], NO_SESSION)
    for word in text:
        guess, raw = automaton.continuation(1)
        if len(guess):
            draft = drafter.draft(DraftRequest(1))
            calibrated = float(draft.confidence[0]) if len(draft) else np.nan
            rows.append((float(raw[0]), calibrated, float(guess[0] == word)))
        automaton.extend([word])
        drafter.observe([word], NO_OUTPUTS, [0])
    return np.array(rows).reshape(-1, 3)


def calibration_table(rows: NDArray[np.float64]) -> str:
    lines = []
    for low in np.arange(0, 1, 0.1):
        of_bin = rows[(rows[:, 0] >= low) & (rows[:, 0] < low + 0.1)]
        if len(of_bin):
            drafted = of_bin[~np.isnan(of_bin[:, 1]), 1]
            calibrated = f"{drafted.mean():.2f}" if len(drafted) else "no draft"
            raw, right = of_bin[:, 0].mean(), of_bin[:, 2].mean()
            lines.append([f"{low:.1f} to {low + 0.1:.1f}", str(len(of_bin)), f"{raw:.2f}", calibrated, f"{right:.2f}"])
    titles = ["raw confidence", "guesses", "mean raw", "mean calibrated", "right"]
    return table(titles, lines, left={"raw confidence"})


def cost_table(text: list[int]) -> str:
    """Markdown: time to read a long text at once, and time of the drafter per round."""
    SuffixAutomaton().extend(text)
    started = perf_counter()
    SuffixAutomaton().extend(text)
    per_token = (perf_counter() - started) / len(text)
    drafter = NgramDrafter()
    drafter.begin(text, NO_SESSION)
    rounds = text[:2000]
    started = perf_counter()
    for word in rounds:
        drafter.forecast(16)
        drafter.draft(DraftRequest(16))
        drafter.observe([word], NO_OUTPUTS, [0])
    per_round = (perf_counter() - started) / len(rounds)
    append, draft = f"{per_token * 1e9:.0f}", f"{per_round * 1e6:.0f}"
    titles = ["tokens", "append a token, ns", "forecast, draft of 16 and observe, us"]
    return table(titles, [[str(len(text)), append, draft]], left=())


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    read = texts(parser.parse_args().files or standard_library(40))
    print(calibration_table(np.concatenate([guesses(text) for text in read])), end="\n\n")
    print(cost_table([word for text in read for word in text]), end="\n\n")
    versions = f"ondevice {ondevice.__version__}, numpy {np.__version__}, Python {platform.python_version()}"
    print(f"{len(read)} files; {platform.machine()}, {versions}")


if __name__ == "__main__":
    run_command(main)
