"""List the benchmarks: which question each answers, its command, and the page with its results.

    python -m benchmarks [--markdown]

Question and command are the beginning of each module's docstring. `--markdown` prints benchmarks/README.md.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.command import command_line, run_command

HERE = Path(__file__).parent
FOLDERS = ("speed", "drafts", "memory", "quality", "bundles", "publish", "peers")

INTRODUCTION = """\
# Benchmarks

Each answers a question and prints a Markdown table. The results are in [RESULTS.md](RESULTS.md): a first page, and a
page per question. Commands run in a checkout, after `make test` has set up `.venv`; each explains its options with
`--help`. Measure on an idle machine, and compare only figures of one run.

This page is printed by `python -m benchmarks --markdown`, from the docstrings of the modules.
"""


@dataclass(frozen=True)
class Benchmark:
    """A module that is run as a command.

    question : the first paragraph of its docstring
    command : the least that it is called with
    """

    module: str
    question: str
    command: str

    def results(self) -> list[Path]:
        """The pages with tables that it printed."""
        pattern = re.compile(rf"\b{re.escape(self.module)}\b")
        return [page for page in sorted((HERE / "results").glob("*.md")) if pattern.search(page.read_text("utf-8"))]


def docstring(path: Path) -> str:
    """A module's docstring; the module is not imported, because it may need packages that are not there."""
    return ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""


def benchmarks(folder: str) -> Iterator[Benchmark]:
    """The commands of a folder, the one that is to be read first before the others."""
    first = docstring(HERE / folder / "__init__.py").partition("Read `")[2].partition("`")[0]
    for path in sorted((HERE / folder).glob("*.py"), key=lambda path: (path.name != first, path.name)):
        module, doc = f"benchmarks.{folder}.{path.stem}", docstring(path)
        found = re.search(rf"^    python -m {module}\b.*(?:\n        .*)*", doc, re.MULTILINE)
        if found is not None:
            command = found[0].partition(" # ")[0]
            while "[" in command:  # options that may be left out, from the innermost
                command = re.sub(r"\[[^][]*\]", "", command)
            yield Benchmark(module, " ".join(doc.partition("\n\n")[0].split()), " ".join(command.split()))


def listing() -> str:
    """The text that the command prints."""
    parts = []
    for folder in FOLDERS:
        parts.append(f"{folder}: {_about(folder)}\n")
        for each in benchmarks(folder):
            parts += [textwrap.fill(each.question, 100, initial_indent="  ", subsequent_indent="  ")]
            parts += [f"      {each.command}\n"]
    return "\n".join(parts)


def markdown() -> str:
    """The README of this folder."""
    parts = [INTRODUCTION]
    for folder in FOLDERS:
        parts.append(f"## {folder}\n\n{_about(folder)}\n")
        lines = []
        for each in benchmarks(folder):
            pages = ", ".join(f"[{page.stem}]({page.relative_to(HERE).as_posix()})" for page in each.results())
            lines.append(f"| {each.question} | `{each.command}` | {pages} |")
        if lines:
            title = "question" if "?" in lines[0] else "purpose"
            parts.append("\n".join([f"| {title} | command | results |", "|---|---|---|", *lines, ""]))
    return "\n".join(parts)


def _about(folder: str) -> str:
    return docstring(HERE / folder / "__init__.py").partition("\n\n")[0]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--markdown", action="store_true", help="print benchmarks/README.md")
    print(markdown() if parser.parse_args().markdown else listing(), end="")


if __name__ == "__main__":
    run_command(main)
