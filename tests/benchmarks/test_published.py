"""`benchmarks.publish.real_text`: the figures that pages quote of real text are those of the results."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from shutil import copytree

import pytest

from benchmarks.drafts.real_text_tables import Record
from benchmarks.publish import pages
from benchmarks.publish.pages import FIRST_REAL_TEXT, OTHER_CPU, all_results, filled
from benchmarks.publish.real_text import (
    Setting,
    drafting_text,
    first_page_text,
    lengths_sentence,
    main,
    read_settings,
    readme_text,
    trained_sentences,
)
from tests.benchmarks.test_real_text import FACTS

SPEEDS = {
    "plain": 1, "mtp": 4, "medusa": 1.25, "mtp 2": 2, "mtp 8": 3.125, "mtp chain 2": 1.6, "mtp chain 8": 2.5,
    "ngram": 2, "draft model": 1.5625, "auto+ draft model": 6.25, "auto": 5,
}  # fmt: skip
LLAMA = {"llama.cpp plain": 0.5, "llama.cpp ngram": 0.8, "llama.cpp mtp 3": 2}


def test_the_pages_quote_the_results() -> None:
    """`python -m benchmarks.publish.real_text` writes them anew."""
    results = all_results()
    found, other_cpu = read_settings(results), read_settings(results, OTHER_CPU)
    readme = readme_text(found, other_cpu, lengths_sentence(results), trained_sentences(results))
    first = first_page_text(found, other_cpu)
    for page, text, heading in (
        (pages.README, readme, ""),
        (pages.DRAFTING, drafting_text(other_cpu), ""),
        (pages.FIRST_PAGE, first, FIRST_REAL_TEXT),
    ):
        written = page.read_text("utf-8")
        assert filled(written, text, heading) == written


def test_a_ratio_is_that_of_the_columns_beside_it() -> None:
    """Speed-ups have two digits: of 2.04 and 0.70 the ratio would be 2.91."""
    speeds = {
        "plain": (37.3, 1.0),
        "auto": (76.2, 2.04),
        "llama.cpp plain": (25.1, 0.67),
        "llama.cpp mtp 3": (26.3, 0.70),
    }
    settings = {name: Setting(*figures, varied=1.0, prompts=16) for name, figures in speeds.items()}
    found = dict.fromkeys((0.0, 1.0), settings)
    rows = [line.split("|") for line in first_page_text(found, found).splitlines() if "arithmetic" in line]
    assert [[cell.strip() for cell in row[5:9]] for row in rows] == [["76.2", "26.3", "2.04", "2.90"]] * 4


@pytest.fixture
def copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copies of all files that are written."""
    for name in ("README", "DRAFTING", "PICTURE", "FIRST_PAGE"):
        path = getattr(pages, name)
        copy = tmp_path / path.name
        copy.write_text(path.read_text("utf-8"), "utf-8")
        monkeypatch.setattr(pages, name, copy)
    copytree(pages.RESULTS, tmp_path / "results")
    monkeypatch.setattr(pages, "RESULTS", tmp_path / "results")
    return tmp_path


def measurement(path: Path) -> Path:
    """The file of a measurement of two prompts, of which one repeats itself."""
    plain = Record("chat", 0, 0.0, "plain", 95, (10.0, 10.0), rounds=190, repeated=0.1)
    records = [
        replace(
            plain, setting=name, prompt=prompt, temperature=temperature, repeated=repeated, seconds=(seconds, seconds)
        )
        for name, speed in {**SPEEDS, **LLAMA}.items()
        for prompt, repeated in ((0, 0.1), (1, 0.9))
        for temperature in (0.0, 1.0)
        for seconds in [10.0 / speed]
    ]
    path.write_text(json.dumps({"facts": FACTS, "records": [asdict(record) for record in records]}), "utf-8")
    return path


def test_one_command_writes_tables_sentences_and_picture(copies: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (copies / "effect.svg").read_text("utf-8")
    monkeypatch.setattr("sys.argv", ["published", str(measurement(copies / "found.json"))])
    main()
    results = (copies / "results" / "real-text.md").read_text("utf-8")
    assert "--limit 2 --turns 3 --tokens 96" in results
    assert "--mtp-drafts 3 " in results
    assert "--kinds chat --limit 2" in results
    quoted = " ".join((copies / "README.md").read_text("utf-8").split())
    assert "Over 2 prompts, `ondevice` with drafts decodes 5.0 times as fast" in quoted
    assert "That is 2.5 and 2.5 times the fastest setting of llama.cpp" in quoted
    monkeypatch.setattr("sys.argv", ["published", str(copies / "found.json"), "--other-cpu"])
    main()
    assert (copies / "results" / "real-text.md").read_text("utf-8").count("--limit 2 --turns 3 --tokens 96") == 2
    quoted = " ".join((copies / "README.md").read_text("utf-8").split())
    assert "less arithmetic per byte of memory, drafts give 5.0 and 5.0 times, which is 2.5 and 2.5 times" in quoted
    monkeypatch.setattr("sys.argv", ["published", str(copies / "found.json"), "--llama-lengths"])
    main()
    quoted = " ".join((copies / "README.md").read_text("utf-8").split())
    assert "On a third CPU, with AVX2 alone, `ondevice` was 2.5 and 2.5 times as fast as the best of all" in quoted
    drafting = " ".join((copies / "drafting.md").read_text("utf-8").split())
    assert "constantly 2 / 8 tokens give 2.00 / 3.12 times plain decoding as trees, and 1.60 / 2.50 as" in drafting
    assert "gives 1.56 at temperature 0 and 1.56 at 1, where MTP gives 4.00 and 4.00; `auto` gives 6.25" in drafting
    assert "Medusa's heads give 1.25 at temperature 0 and 1.25 at 1" in drafting
    assert (copies / "effect.svg").read_text("utf-8") != before
    written = {path.name: path.read_bytes() for path in copies.rglob("*") if path.is_file()}
    monkeypatch.setattr("sys.argv", ["published"])
    main()  # from the results alone
    assert {path.name: path.read_bytes() for path in copies.rglob("*") if path.is_file()} == written


def test_a_trained_drafter_has_a_section_two_sentences_and_a_panel(
    copies: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = measurement(copies / "found.json")
    stored = json.loads(found.read_text())
    of_code = [{**each, "kind": "code"} for each in stored["records"]]
    found.write_text(json.dumps({**stored, "records": stored["records"] + of_code}))
    monkeypatch.setattr("sys.argv", ["published", str(found), "--trained-drafter"])
    for _ in range(2):  # the second time it replaces the section
        main()
        results = (copies / "results" / "published-models.md").read_text("utf-8")
        picture = (copies / "effect.svg").read_text("utf-8")
        assert results.count("## A published model with a trained drafter") == 1
        assert "real_text DIR --instructions --gguf FILE.gguf \\\n    --limit 2 --turns 3 --tokens 96 --json" in results
        quoted = " ".join((copies / "README.md").read_text("utf-8").split())
        assert "gives 5.00 times plain decoding at temperature 0 and 5.00 times at 1, over 4 prompts" in quoted
        assert "That is 2.5 and 2.5 times the fastest setting of llama.cpp on the same file." in quoted
        assert [picture.count(f">{kind}</text>") for kind in ("chat", "code", "maths")] == [1, 1, 0]
        assert picture.startswith('<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 880 626"')
    monkeypatch.setattr("sys.argv", ["published", "x", "--trained-drafter", "--other-cpu"])
    with pytest.raises(SystemExit, match="2"):
        main()


def test_a_page_without_its_block_is_an_error() -> None:
    with pytest.raises(SystemExit, match="expected one block"):
        filled("no block", "text")
    page = "## A\n<!-- measured -->\nold\n<!-- /measured -->\n\n## B\n<!-- measured -->\nold\n<!-- /measured -->\n"
    first, second = (filled(page, "new\n", heading).split("\n\n") for heading in ("## A", "## B"))
    assert [part.count("new") for part in first] == [1, 0]
    assert [part.count("new") for part in second] == [0, 1]
    with pytest.raises(SystemExit, match="expected one block"):
        filled(page, "new\n", "## C")
