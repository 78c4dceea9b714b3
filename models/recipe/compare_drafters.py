"""Compare drafters that `train_drafter.py` trained for one target, as Markdown:

    python models/recipe/compare_drafters.py DIR DIR...

The directories have the `figures.json` of each. The difference to the first drafter is that on the same replies, where
both were measured on these. Errors are standard errors over replies: what another training would give, with other
blocks or another start, is not in them.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pair.card import table

from benchmarks.command import run_command

TEXTS = {"replies": "held-out replies", "prompts": "given prompts"}
HEADER = ["", "replies", "tokens a round", "against the first", "first drafts accepted"]


def influence(each: list[list[int]]) -> npt.NDArray[np.float64]:
    """float64[N]: by how much each reply moves the tokens of a round. each : its tokens and its rounds"""
    tokens, rounds = np.array(each, np.float64).T
    moved: npt.NDArray[np.float64] = (tokens - tokens.sum() / rounds.sum() * rounds) / rounds.sum()
    return moved


def error(moved: npt.NDArray[np.float64]) -> float:
    """The standard error of a sum of independent parts, whose mean is zero; NaN of one part, which shows none."""
    if len(moved) < 2:
        return math.nan
    return float(np.sqrt(len(moved) / (len(moved) - 1) * (moved**2).sum()))


def row(found: dict[str, Any], first: dict[str, Any]) -> list[str]:
    """A drafter's figures, and their difference to the first drafter's on the same replies."""
    moved, difference = influence(found["each"]), "-"
    if any(found[name] != first[name] for name in ("replies", "positions")):
        difference = "other replies"
    elif found is not first:
        apart = error(moved - influence(first["each"]))
        difference = f"{found['tokens'] - first['tokens']:+.3f} ± {apart:.3f}"
    tokens = f"{found['tokens']:.3f} ± {error(moved):.3f}"
    return [str(found["replies"]), tokens, difference, f"{found['accepted'][0]:.3f}"]


def compared(directories: list[Path]) -> str:
    """A table with a row per temperature, text and drafter."""
    figures = [json.loads((directory / "figures.json").read_text()) for directory in directories]
    rows = []
    for temperature in "01":
        for key, title in TEXTS.items():
            if all(temperature in each[key] for each in figures):
                found = [each[key][temperature]["all"] for each in figures]
                names = [f"T = {temperature}, {title}, `{directory.name}`" for directory in directories]
                rows += [[name, *row(one, found[0])] for name, one in zip(names, found, strict=True)]
    return table(HEADER, rows)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directories", type=Path, nargs="+")
    print(compared(parser.parse_args().directories))


if __name__ == "__main__":
    run_command(main)
