"""The table and the picture of docs/quality.md, and figures that llama-perplexity prints."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ET
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.publish import pages
from benchmarks.publish.quality import draw, page_table, publish
from benchmarks.quality.formats import Result, _llama_result

PRINTED = """
chunk             PPL               ln(PPL(Q)/PPL(base))          KL Divergence              Δp RMS            Same top p
   1      20.1234 ±    1.2345       0.01000 ±    0.00100       0.01000 ±    0.00100     1.000 ±  0.100 %    96.000 ±  0.500 %
   2      21.1234 ±    1.2345       0.01000 ±    0.00100       0.01000 ±    0.00100     1.000 ±  0.100 %    96.000 ±  0.500 %

====== Perplexity statistics ======
Mean PPL(Q)                   :  21.500000 ±   0.900000
Mean PPL(base)                :  21.000000 ±   0.800000
Mean PPL(Q)/PPL(base)         :   1.023810 ±   0.001000

====== KL divergence statistics ======
Mean    KLD:   0.012345 ±   0.000678
Same top p: 95.123 ± 0.456 %
"""  # noqa: E501


def test_what_llama_perplexity_prints_is_read() -> None:
    found = _llama_result(Path("model.gguf"), "Q4_0", 1234, PRINTED)
    assert (found.tokens, found.kl, found.kl_error) == (2 * 255, 0.012345, 0.000678)
    assert found.same_top == pytest.approx(0.95123)
    assert (found.perplexity, found.reference_perplexity) == (21.5, 21.0)
    assert math.isnan(found.bits)


def test_a_figure_that_is_missing_is_an_error() -> None:
    with pytest.raises(SystemExit, match="no 'Mean    KLD'"):
        _llama_result(Path("model.gguf"), "Q4_0", 1234, "nothing")


def results() -> list[Result]:
    ours = [
        Result("m", "ondevice", name, size, bits, 1530, kl, kl / 50, 0.9, 0.01, 20.0, 19.0)
        for name, size, bits, kl in (("int4", 90_000_000, 4.5, 0.28), ("int8", 140_000_000, 8.5, 0.004))
    ]
    return [*ours, Result("m", "llama.cpp", "Q4_0", 91_000_000, math.nan, 1530, 0.3, 0.01, 0.7, 0.01, 30.0, 19.0)]


def test_the_table_has_a_line_per_format() -> None:
    lines = page_table(results()).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    assert cells[0] == ["m", "MB", "bits per weight", "KL divergence", "same top token", "perplexity"]
    assert [row[0] for row in cells[2:]] == ["int8", "int4", "Q4_0"]
    assert cells[3] == ["int4", "90", "4.50", "0.2800 ± 0.0056", "90.0%", "20.00"]
    assert cells[4][2] == ""
    assert "1530 tokens; perplexity of the file's own weights 19.00." in lines


def test_the_picture_has_a_dot_per_result() -> None:
    root = ET.fromstring(draw(results()))
    dots = [each for each in root.iter() if each.tag.endswith("circle")]
    assert sorted(dot.get("class") or "" for dot in dots) == ["llamacpp", "simd", "simd"]
    heights = {dot.get("class"): float(dot.get("cy") or 0) for dot in dots}
    assert heights["llamacpp"] < heights["simd"]  # a larger loss is higher


def test_three_pages_and_a_picture_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("QUALITY", "FIRST_PAGE"):
        page = getattr(pages, name)
        monkeypatch.setattr(pages, name, tmp_path / page.name)
        (tmp_path / page.name).write_text(page.read_text("utf-8"), "utf-8")
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "quality.md").write_text((pages.RESULTS / "quality.md").read_text("utf-8"), "utf-8")
    monkeypatch.setattr(pages, "RESULTS", tmp_path / "results")
    found = tmp_path / "found.json"
    found.write_text(json.dumps([asdict(each) for each in results()]), "utf-8")
    publish([found])
    line = "| int4 |  90 |            4.50 | 0.2800 ± 0.0056 |          90.0% |      20.00 |"
    for name in ("quality.md", "RESULTS.md", "results/quality.md"):
        assert (tmp_path / name).read_text("utf-8").count(line) == 1
    assert (tmp_path / "quality.svg").exists()
