"""`benchmarks.published`: what pages quote of the measurement of real text is what RESULTS.md has."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks import published
from benchmarks.picture import PICTURE, RESULTS
from benchmarks.published import DRAFTING, README, drafting_text, filled, main, read_settings, readme_text
from benchmarks.real_text import Record
from tests.benchmarks.test_real_text import FACTS

SPEEDS = {"plain": 1, "mtp": 4, "medusa": 1.25, "mtp 2": 2, "mtp 8": 3.125, "ngram": 2, "auto": 5}
LLAMA = {"llama.cpp plain": 0.5, "llama.cpp ngram": 0.8, "llama.cpp mtp 3": 2}


@pytest.mark.parametrize(("page", "text"), [(README, readme_text), (DRAFTING, drafting_text)])
def test_a_page_quotes_the_results(page: Path, text) -> None:
    """`python -m benchmarks.published` writes it anew."""
    written = page.read_text("utf-8")
    assert filled(written, text(read_settings(RESULTS.read_text("utf-8")))) == written


@pytest.fixture
def pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copies of all files that are written."""
    for name, path in (("RESULTS", RESULTS), ("README", README), ("DRAFTING", DRAFTING), ("PICTURE", PICTURE)):
        copy = tmp_path / path.name
        copy.write_text(path.read_text("utf-8"), "utf-8")
        monkeypatch.setattr(published, name, copy)
    return tmp_path


def measurement(path: Path) -> Path:
    """The file of a measurement of two prompts, of which one repeats itself."""
    plain = Record("chat", 0, 0.0, "plain", 95, (10.0, 10.0), rounds=190, drafts=0, taken=0, repeated=0.1)
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


def test_one_command_writes_tables_sentences_and_picture(pages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["published", str(measurement(pages / "found.json"))])
    main()
    results = (pages / "RESULTS.md").read_text("utf-8")
    assert "--limit 2 --turns 3 --tokens 96" in results
    assert "--mtp-drafts 3 " in results
    quoted = " ".join((pages / "README.md").read_text("utf-8").split())
    assert "Over 2 prompts, `ondevice` with drafts decodes 5.0 times as fast" in quoted
    assert "That is 2.5 and 2.5 times the fastest setting of llama.cpp" in quoted
    drafting = " ".join((pages / "drafting.md").read_text("utf-8").split())
    assert "drafts of constantly 2 / 8 tokens give 2.00 / 3.12 times plain decoding" in drafting
    assert "Medusa's heads give 1.25 at temperature 0 and 1.25 at 1" in drafting
    assert (pages / "effect.svg").read_text("utf-8") != PICTURE.read_text("utf-8")
    written = {path.name: path.read_bytes() for path in pages.iterdir()}
    monkeypatch.setattr("sys.argv", ["published"])
    main()  # from RESULTS.md alone
    assert {path.name: path.read_bytes() for path in pages.iterdir()} == written


def test_a_page_without_its_block_is_an_error() -> None:
    with pytest.raises(SystemExit, match="expected one block"):
        filled("no block", "text")
