"""The list of benchmarks is whole, and the first page of results quotes what the other pages have."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from benchmarks import __main__ as index
from benchmarks.publish.pages import BLOCK, FIRST_PAGE, RESULTS, all_results
from tests.conftest import ROOT

FOLDER = ROOT / "benchmarks"


def test_the_readme_is_the_list() -> None:
    """`python -m benchmarks --markdown > benchmarks/README.md` writes it anew."""
    assert (FOLDER / "README.md").read_text("utf-8") == index.markdown()


def test_every_command_is_listed() -> None:
    commands = {
        f"benchmarks.{path.parent.name}.{path.stem}"
        for path in FOLDER.glob("*/*.py")
        if '__name__ == "__main__"' in path.read_text("utf-8") and path.parent.name != "peers"
    }
    assert {each.module for folder in index.FOLDERS for each in index.benchmarks(folder)} == commands


@pytest.mark.parametrize("folder", index.FOLDERS)
def test_a_folder_says_what_to_read_first(folder: str) -> None:
    files = list((FOLDER / folder).glob("*.py"))
    assert len(files) <= 15
    first = re.search(r"Read `(\w+\.py)`", index.docstring(FOLDER / folder / "__init__.py"))
    assert first is not None
    assert FOLDER / folder / first[1] in files


@pytest.mark.parametrize("folder", ["speed", "drafts", "memory", "quality"])
def test_a_benchmark_answers_a_question(folder: str) -> None:
    found = index.benchmarks(folder)
    assert found
    for each in found:
        assert "?" in each.question, each.module
        assert each.command.startswith(f"python -m {each.module}")


def test_the_command_prints_the_list(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks"])
    index.main()
    printed = capsys.readouterr().out
    assert "How much longer does a forward take" in printed
    assert "      python -m benchmarks.speed.rows BUNDLE\n" in printed


def test_pages_name_commands_that_are_there() -> None:
    pages = [FOLDER / "reference.sh", *FOLDER.rglob("*.md"), *ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    for page in pages:
        for module in re.findall(r"\bbenchmarks\.(\w+\.\w+)\b", page.read_text("utf-8")):
            assert (FOLDER / f"{module.replace('.', '/')}.py").exists(), (page, module)


def rows(page: str) -> list[list[str]]:
    """The cells of a page's table rows."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:1] == "|"]


def is_part(some: list[str], whole: list[str]) -> bool:
    cells = iter(whole)
    return all(cell in cells for cell in some)


def test_the_first_page_quotes_the_others() -> None:
    """But for the blocks that `benchmarks.publish` writes."""
    page, known = BLOCK.sub("", FIRST_PAGE.read_text("utf-8")), rows(all_results())
    figures = [row for row in rows(page) if any(re.fullmatch(r"[\d.]+", cell) for cell in row)]
    assert len(figures) > 20
    assert [row for row in figures if not any(is_part(row, each) for each in known)] == []


def test_the_first_page_leads_to_every_page() -> None:
    first = FIRST_PAGE.read_text("utf-8")
    assert len(first.splitlines()) <= 160
    assert [page.name for page in RESULTS.glob("*.md") if f"(results/{page.name})" not in first] == []


def test_the_list_has_the_pages_with_results(tmp_path: Path) -> None:
    [listed] = [each for each in index.benchmarks("memory") if each.module == "benchmarks.memory.start"]
    assert RESULTS / "memory.md" in listed.results()
