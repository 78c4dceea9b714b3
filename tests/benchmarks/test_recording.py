"""`benchmarks.publish.recording`: the terminal, the times, and the picture."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.conftest import ROOT

if sys.platform == "win32":
    pytest.skip("Windows has no pseudo-terminals of this kind", allow_module_level=True)

from benchmarks.publish import recording
from benchmarks.publish.recording import Piece, Screen, draw, from_first_text, record

SVG = "{http://www.w3.org/2000/svg}"


def written(*outputs: tuple[float, str], columns: int = 20) -> list[Piece]:
    screen = Screen(columns)
    for when, text in outputs:
        screen.write(text, when)
    return screen.pieces()


def test_text_has_the_time_at_which_it_came() -> None:
    assert written((1.0, "def f"), (2.0, "(x):\r\n"), (3.0, "    return x")) == [
        Piece(0, 0, "def f", "", 1.0, None),
        Piece(0, 5, "(x):", "", 2.0, None),
        Piece(1, 4, "return x", "", 3.0, None),
    ]


def test_long_lines_are_wrapped() -> None:
    assert [(piece.row, piece.text) for piece in written((0.0, "abcdefgh\n"), columns=5)] == [(0, "abcde"), (1, "fgh")]


def test_overwritten_text_ends() -> None:
    bar, text = written((1.0, "50 %"), (2.0, "\r\x1b[K"), (3.0, "done"))
    assert (bar.text, bar.begin, bar.end) == ("50 %", 1.0, 2.0)
    assert (text.text, text.column, text.end) == ("done", 0, None)
    up = written((0.0, "a\r\n"), (1.0, "\x1b[A\x1b[?25lb"))
    assert [(piece.text, piece.row, piece.end) for piece in up] == [("a", 0, 1.0), ("b", 0, None)]


def test_colours() -> None:
    plain, green, both = written((0.0, "a\x1b[32mb\x1b[1;35mc\x1b[0m"))
    assert (plain.style, green.style, both.style) == ("", "green", "green bold magenta")


def test_times_begin_at_the_first_text_that_stays() -> None:
    pieces = [
        Piece(0, 0, "loading", "", 1.0, 4.0),
        Piece(0, 0, "text", "", 5.0, None),
        Piece(1, 0, "bar", "", 5.5, 6.0),
    ]
    assert from_first_text(pieces) == [Piece(0, 0, "text", "", 0.0, None), Piece(1, 0, "bar", "", 0.5, 1.0)]


def test_the_picture_shows_every_piece_at_its_time() -> None:
    pieces = [Piece(0, 0, "a < b", "green", 0.0, None), Piece(1, 2, "gone", "", 1.0, 2.0)]
    drawn = draw([("one", ["ondevice", "generate"], pieces), ("two", ["ondevice", "x" * 60, "< y"], pieces[:1])])
    root = ET.fromstring(drawn)
    texts = {text.text: text.attrib["class"] for text in root.iter(f"{SVG}text")}
    assert texts["a < b"] == "t t0 green"
    assert texts["gone"] == "t t1"
    assert {"$ ondevice generate", "$ ondevice \\", "    < y"} < set(texts)
    length = 1.0 + recording.BEGIN_S + recording.END_S
    shares = [f"{100 * (at + recording.BEGIN_S) / length:.2f}%" for at in (1.0, 2.0)]
    assert f"@keyframes t1 {{ 0% {{ opacity: 0 }} {shares[0]} {{ opacity: 1 }} {shares[1]} {{ opacity: 0 }} }}" in drawn
    assert ".t1 { opacity: 0 } }" in drawn  # with reduced motion, what is gone is not shown


def test_a_command_is_recorded(tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("text")
    program = "import sys; print(sys.stdin.read(), sys.stdout.isatty()); print('end', file=sys.stderr)"
    pieces = record([sys.executable, "-c", program], prompt, tmp_path)
    assert " ".join(piece.text for piece in pieces) == "text True end"
    with pytest.raises(SystemExit, match="ended with exit code 3"):
        record([sys.executable, "-c", "print(1); raise SystemExit(3)"], prompt, tmp_path)


def test_both_terminals_of_the_stored_recording_end_with_the_same_text() -> None:
    root = ET.fromstring((ROOT / "docs" / "recording.svg").read_text("utf-8"))
    halves: tuple[list[str], list[str]] = ([], [])
    for text in root.iter(f"{SVG}text"):
        if text.attrib["class"].startswith("t "):
            halves[float(text.attrib["x"]) > recording.WIDTH / 2].append(text.text or "")
    without, with_drafts = (re.sub(r"\s", "", "".join(half)) for half in halves)
    reply, _, summary = without.partition("tokens/s")
    assert summary
    assert with_drafts.startswith(re.sub(r"\d+tokens,[\d.]+$", "", reply))
    assert "tokensequal" in with_drafts
