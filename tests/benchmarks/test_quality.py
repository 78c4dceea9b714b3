"""The tables and the picture of docs/quality.md, figures that llama-perplexity prints, and speeds of formats."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest

import ondevice
from benchmarks.publish import pages
from benchmarks.publish.quality import LARGEST_DOT, LETTER, beside, draw, page_table, publish, same_file_table
from benchmarks.quality import formats
from benchmarks.quality.formats import (
    SPEED_ROUNDS,
    Result,
    _llama_result,
    _Recorded,
    _Recorder,
    with_speeds,
    write_results,
)
from ondevice.engines.protocol import Engine, Outputs, Rows
from ondevice.quality import CHUNK, measure
from tests.fixtures.toy_engine import VOCAB, ToyEngine

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
    found = _llama_result(Path("model.gguf"), "Q4_0", PRINTED, 1234, 4.5)
    assert (found.tokens, found.kl, found.kl_error) == (2 * 255, 0.012345, 0.000678)
    assert found.same_top == pytest.approx(0.95123)
    assert (found.perplexity, found.reference_perplexity) == (21.5, 21.0)
    assert (found.bytes, found.bits) == (1234, 4.5)


def test_a_figure_that_is_missing_is_an_error() -> None:
    with pytest.raises(SystemExit, match="no 'Mean    KLD'"):
        _llama_result(Path("model.gguf"), "Q4_0", "nothing", 1234, 4.5)


def results() -> list[Result]:
    ours = [
        Result("m", "ondevice", name, size, bits, 1530, kl, kl / 50, 0.9, 0.01, 20.0, 19.0, speed)
        for name, size, bits, kl, speed in (
            ("int4", 90_000_000, 4.5, 0.28, 300.0),
            ("int8", 140_000_000, 8.5, 0.004, 200.0),
            ("Q4_0: the same file", 91_000_000, 4.55, 0.31, math.nan),
        )
    ]
    return [*ours, Result("m", "llama.cpp", "Q4_0", 91_000_000, 4.55, 1530, 0.3, 0.01, 0.7, 0.01, 30.0, 19.0)]


def lines() -> list[Result]:
    """The results of the table and the picture."""
    return [each for each in results() if "same file" not in each.format]


def test_the_table_has_a_line_per_format() -> None:
    page = page_table(lines()).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in page if line.startswith("|")]
    assert cells[0] == ["m", "MB", "bits per weight", "KL divergence", "same top token", "perplexity", "tokens/s"]
    assert [row[0] for row in cells[2:]] == ["int8", "int4", "Q4_0"]
    assert cells[3] == ["int4", "90.0", "4.50", "0.2800 ± 0.0056", "90.0%", "20.00", "300"]
    assert cells[4][6] == ""  # not measured
    assert "1530 tokens; perplexity of the file's own weights 19.00." in page
    untimed = [replace(each, tokens_per_second=math.nan) for each in lines()]
    assert "tokens/s" not in page_table(untimed)


def test_files_that_both_ran_have_a_table_of_their_own() -> None:
    line = "| Q4_0 | 0.3000 ± 0.0100 | 0.3100 ± 0.0062 | 70.0% ± 1.0% | 90.0% ± 1.0% | 30.00 | 20.00 |"
    found = [" ".join(line.split()) for line in same_file_table(results()).splitlines()]
    assert line in found
    assert same_file_table(lines()) == ""


def test_the_picture_has_a_dot_per_result() -> None:
    root = ET.fromstring(draw(lines()))
    dots = [each for each in root.iter() if each.tag.endswith("circle")]
    assert sorted(dot.get("class") or "" for dot in dots) == ["llamacpp", "simd", "simd"]
    heights = {dot.get("class"): float(dot.get("cy") or 0) for dot in dots}
    assert heights["llamacpp"] < heights["simd"]  # a larger loss is higher
    areas = {float(dot.get("cx") or 0): float(dot.get("r") or 0) ** 2 for dot in dots if dot.get("class") == "simd"}
    assert areas[min(areas)] / areas[max(areas)] == pytest.approx(300 / 200, rel=0.02)


@pytest.mark.parametrize("seed", range(5))
def test_labels_beside_dots_meet_neither_each_other_nor_a_dot(seed: int) -> None:
    random = np.random.default_rng(seed)
    dots = [
        (float(x), float(y), float(r)) for x, y, r in random.uniform((100, 50, 3), (200, 200, LARGEST_DOT), (12, 3))
    ]
    names = ["x" * int(length) for length in random.integers(3, 25, 12)]
    boxes = [(x - r, x + r, y - r, y + r) for x, y, r in dots]
    for name, (x, y, anchor) in zip(names, beside(dots, names, 60), strict=True):
        left = x - (LETTER * len(name) if anchor == "end" else 0)
        assert left >= 60
        box = left, left + LETTER * len(name), y - 6, y + 6
        assert not any(box[0] < b and a < box[1] and box[2] < d and c < box[3] for a, b, c, d in boxes)
        boxes.append(box)


def test_three_pages_and_a_picture_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("QUALITY", "FIRST_PAGE"):
        page = getattr(pages, name)
        monkeypatch.setattr(pages, name, tmp_path / page.name)
        (tmp_path / page.name).write_text(page.read_text("utf-8"), "utf-8")
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "quality.md").write_text((pages.RESULTS / "quality.md").read_text("utf-8"), "utf-8")
    monkeypatch.setattr(pages, "RESULTS", tmp_path / "results")
    found = tmp_path / "found.json"
    write_results(found, results())
    publish([found])
    line = "| int4 |  90.0 |            4.50 | 0.2800 ± 0.0056 |          90.0% |      20.00 |      300 |"
    for name in ("quality.md", "RESULTS.md", "results/quality.md"):
        assert (tmp_path / name).read_text("utf-8").count(line) == 1
    assert (tmp_path / "quality.svg").exists()


def test_a_speed_is_the_median_of_rounds_in_turns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    turns, exported = list[str](), dict[str, dict[str, object]]()

    def run(model: str) -> float:
        turns.append(model)
        return {"int4": 100.0, "Q4_0": 50.0, "5 bits": 10.0}[model] + len(turns)

    def export(source: Path, place: Path, **options: object) -> str:
        exported[place.name] = options
        return place.name

    monkeypatch.setattr(formats, "export", export)
    # not `setattr`, whose undoing would leave the name, which the package looks up late, in the package
    monkeypatch.setitem(vars(ondevice), "load", lambda bundle, threads: nullcontext(bundle))
    monkeypatch.setattr(formats, "_speed", run)
    monkeypatch.setattr(formats, "_made", lambda path, _make: path)
    monkeypatch.setattr(formats, "decoding_speed", lambda _program, gguf, _threads, _tokens: run(gguf.stem))
    known, *others = (replace(each, tokens_per_second=math.nan) for each in results())
    given = [known, replace(known, format="int4, calibrated"), *others]
    given[2] = results()[1]
    given.append(replace(known, format="5 bits, calibrated"))
    found = with_speeds(Path("m.gguf"), given, tmp_path, tmp_path, 2)
    assert turns == ["int4", "Q4_0", "5 bits"] * SPEED_ROUNDS
    assert exported["5 bits"] == {"drafter": "none", "bits_per_weight": 5}  # calibration changes no speed
    assert [each.tokens_per_second for each in found[:3]] == [107, 107, 200]  # the last one was known
    assert math.isnan(found[3].tokens_per_second)  # the file of another line
    assert [each.tokens_per_second for each in found[4:]] == [58, 19]


class Flatter(ToyEngine):
    """Less sure of everything than the toy."""

    def forward(self, batch: Sequence[Rows]) -> list[Outputs]:
        return [Outputs(np.divide(each.logits, 2, dtype=np.float32), each.hidden) for each in super().forward(batch)]


def test_recorded_logits_are_a_reference(tmp_path: Path) -> None:
    ids = np.random.default_rng(1).integers(3, VOCAB, 2 * CHUNK).tolist()
    model, reference = ToyEngine(CHUNK), Flatter(CHUNK)
    expected = measure(model, reference, ids, None)
    assert expected.kl.value > 0
    path = tmp_path / "logits"
    with path.open("wb") as file:
        assert measure(model, cast(Engine, _Recorder(reference, file)), ids, None) == expected
    with path.open("rb") as file:
        assert measure(model, cast(Engine, _Recorded(file, VOCAB, CHUNK)), ids, None) == expected
        assert file.read() == b""
