"""The benchmark of a busy machine, over the toy engine: what it starts, measures and prints."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks import busy
from benchmarks.busy import Contender, Speed, busy_processes, contenders, measure, report
from tests.model_made import model_over, write_bundle
from tests.toy_engine import ToyEngine


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    found: list[subprocess.Popen[bytes]] = []

    class Process(subprocess.Popen[bytes]):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            found.append(self)

    monkeypatch.setattr(subprocess, "Popen", Process)
    return found


def test_busy_processes_end_with_the_block(started: list[subprocess.Popen[bytes]]) -> None:
    with busy_processes(2, seconds=60):
        assert [process.poll() for process in started] == [None, None]
    assert all(process.returncode for process in started)


def test_a_busy_process_ends_by_itself(started: list[subprocess.Popen[bytes]]) -> None:
    with busy_processes(1, seconds=0.01):
        assert started[0].wait(timeout=60) == 0


def test_everybody_is_measured_beside_every_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(busy, "WARM_UP_S", 0.01)
    first, second = Contender("simd", 1), Contender("simd", 2, always=True)
    with (
        model_over(ToyEngine(), write_bundle(tmp_path / "a")) as one,
        model_over(ToyEngine(), write_bundle(tmp_path / "b")) as other,
    ):
        speeds = measure({first: one, second: other}, [], counts=(0, 1), seconds=0.02, repeats=1)
    assert {(speed.contender, speed.busy) for speed in speeds} == {
        ("simd, 1", 0), ("simd, 1", 1), ("simd, 2 always", 0), ("simd, 2 always", 1),
    }  # fmt: skip
    assert all(speed.tokens_per_s > 0 and speed.threads == 1 for speed in speeds)


def test_who_takes_part() -> None:
    assert [one.name for one in contenders(["simd", "ort"], 4)] == [
        "simd, 1", "simd, 4", "simd, 4 always", "ort, 1", "ort, 4",
    ]  # fmt: skip
    assert [one.name for one in contenders(["simd"], 1)] == ["simd, 1"]


def test_the_report_sets_the_choice_in_relation_to_what_could_have_been_chosen() -> None:
    facts = {
        "bundle": "toy", "weights": "int4", "engine": "simd", "threads": 2, "processor": "a CPU", "system": "an OS",
        "versions": {"numpy": "2"}, "seconds": 3.0, "repeats": 2,
    }  # fmt: skip
    speeds = [
        Speed("simd, 1", 1, 15.0, 1.0), Speed("simd, 2", 1, 14.7, 1.1), Speed("simd, 2 always", 1, 9.5, 2.0),
        Speed("ort, 1", 1, 11.0, 1.0), Speed("llama.cpp, 2", 1, 6.5, 2.0),
    ]  # fmt: skip
    line = report(speeds, 2, facts).splitlines()[2]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells == ["1", "15.0", "14.7", "9.5", "11.0", "6.5", "1.10", "0.98", "1.34"]
