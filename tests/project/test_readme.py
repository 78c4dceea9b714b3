"""The README, which a newcomer reads first, and the pages that it leads to."""

import re
from pathlib import Path

import pytest

import ondevice
from tests.conftest import ROOT

README = (ROOT / "README.md").read_text("utf-8")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RESULTS = sorted((ROOT / "benchmarks").rglob("*.md"))
FIRST_SCREENS = README.partition("## Compared")[0]


def anchors(page: str) -> set[str]:
    """The names that a page's headings are linked by."""
    headings = re.findall(r"^#+ (.+)$", page, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, *RESULTS], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", page.read_text("utf-8")) if "://" not in link]
    for link in links:
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target.read_text("utf-8")), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_import_the_package_that_they_use(page: Path) -> None:
    for example in re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL):
        if re.search(r"\bondevice\.\w+\(", example):
            assert re.search(r"^import ondevice$", example, re.MULTILINE), example


def test_the_readme_leads_to_every_page() -> None:
    assert [page.name for page in PAGES[1:] if f"(docs/{page.name})" not in README] == []


def test_the_first_screens_say_how_to_install_and_what_was_not_run() -> None:
    assert "pip install '.[export]'" in FIRST_SCREENS
    assert "No published Gemma 4 weights have been run yet" in FIRST_SCREENS


def test_installing_says_whose_name_ondevice_is() -> None:
    installing = README.partition("## Installing")[2].partition("\n## ")[0]
    assert "do not `pip install ondevice`" in installing
    assert "ondevice-runtime" in installing


def test_every_public_name_is_in_the_reference() -> None:
    reference = (ROOT / "docs" / "api.md").read_text("utf-8")
    listed = re.findall(r"^::: ondevice\.(\w+)$", reference, re.MULTILINE)
    assert sorted(listed) == sorted(set(ondevice.__all__) - {"__version__"})


def test_the_site_has_every_page() -> None:
    site = (ROOT / "mkdocs.yml").read_text("utf-8")
    results = [f"results/{page.name}" for page in RESULTS if page.parent.name == "results"]
    assert [name for name in [*(page.name for page in PAGES[1:]), *results] if f": {name}\n" not in site] == []


def tables(page: str) -> list[str]:
    """Tables that have a number in a cell of its own."""
    blocks = re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE)
    return [block for block in blocks if re.search(r"\| +\d+(\.\d+)?x?( ±\d+\.\d+)? +\|", block)]


def test_a_measured_table_stands_in_the_results_too() -> None:
    """With its command and the machine that it was printed on."""
    results = [table for page in RESULTS for table in tables(page.read_text("utf-8"))]
    assert results
    assert {table for page in PAGES for table in tables(page.read_text("utf-8"))} <= set(results)


@pytest.mark.needs("llguidance")
def test_the_example_of_a_structured_answer_runs_as_it_is(reference_bundle, monkeypatch, tmp_path, capsys) -> None:
    page = (ROOT / "docs" / "structured-output.md").read_text("utf-8")
    [example] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "bundles").mkdir()
    (tmp_path / "bundles" / "reference").symlink_to(reference_bundle)
    monkeypatch.chdir(tmp_path)
    exec(example, {})
    out = capsys.readouterr().out
    assert out.startswith("{'name': ")
    assert out.endswith("} stop\n")
