"""Pages of results: where their tables are, reading tables, and replacing measured blocks.

`benchmarks/RESULTS.md` is the first page, and `benchmarks/results/` has a page per question. In each, the text between
the lines `<!-- measured -->` and `<!-- /measured -->` is written by a command of this folder.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README, DRAFTING, QUALITY = ROOT / "README.md", ROOT / "docs" / "drafting.md", ROOT / "docs" / "quality.md"
FIRST_PAGE = ROOT / "benchmarks" / "RESULTS.md"
RESULTS = ROOT / "benchmarks" / "results"
PICTURE = ROOT / "benchmarks" / "effect.svg"

FORWARDS = "## E2B's shape, compared with other engines"
REAL_TEXT = "## Real text at E2B's cost"
OTHER_CPU = "## Real text on a CPU with less arithmetic"
LLAMA_LENGTHS = "## Every length of llama.cpp's MTP drafts"
TRAINED = "## A published model with a trained drafter"
ROUNDING = "## The loss of each format"
FIRST_REAL_TEXT, FIRST_QUALITY = "## Drafts on real text", "## Quality per byte"
"""Headings of the pages of results and of the first page, below which tables are read or written."""

BLOCK = re.compile(r"(?<=<!-- measured -->\n).*?(?=<!-- /measured -->)", re.DOTALL)


def all_results() -> str:
    """The text of all pages of results; a heading occurs in one of them only."""
    return "\n".join(path.read_text("utf-8") for path in sorted(RESULTS.glob("*.md")))


def read_tables(results: str, heading: str) -> list[list[dict[str, str]]]:
    """The Markdown tables between a heading and the next one of the same level, a dictionary per row.

    Raises:
        SystemExit: there is none.
    """
    below = results.partition(f"\n{heading}\n")[2].partition("\n## ")[0]
    tables = []
    for found in re.findall(r"(?:^\|.*\|\n)+", below, re.MULTILINE):
        titles, _, *rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in found.splitlines()]
        tables.append([dict(zip(titles, row, strict=True)) for row in rows])
    if not tables:
        raise SystemExit(f"no page of results has a table below {heading!r}")
    return tables


def read_interval(cell: str) -> tuple[float, float, float]:
    """Mean and ends of a cell such as `1.52 [1.31, 1.75]`; the mean alone stands for all three, NaN for no number."""
    numbers = [float(number) for number in re.findall(r"[\d.]+", cell)] or [math.nan]
    mean, low, high = numbers if len(numbers) == 3 else 3 * numbers
    return mean, low, high


def filled(page: str, text: str, heading: str = "") -> str:
    """A page with another text in its measured block.

    Args:
        heading: a line of the page; the block is between it and the next heading of the second level. The whole page
            by default.

    Raises:
        SystemExit: there is no such block, or several.
    """
    before, line, below = page.partition(f"{heading}\n") if heading else ("", "", page)
    part, rest, after = below.partition("\n## ") if heading else (below, "", "")
    found, count = BLOCK.subn(lambda _: text, part)
    if count != 1:
        raise SystemExit(f"expected one block <!-- measured -->, found {count}")
    return before + line + found + rest + after


def fill(path: Path, text: str, heading: str = "") -> None:
    """Replace the measured block of a file, as `filled` does."""
    path.write_text(filled(path.read_text("utf-8"), text, heading), "utf-8")
