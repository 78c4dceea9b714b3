"""The model of a Raspberry Pi: the longer of two times, and cycles from what llvm-mca prints."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from benchmarks.arm_code import TileCode
from benchmarks.arm_model import BLOCK_BYTES, BLOCK_WEIGHTS, BOARDS, CORES, cycles, seconds

PI5 = BOARDS[0]


def test_a_product_takes_the_longer_of_arithmetic_and_memory() -> None:
    blocks = 1_000_000
    by_memory = blocks * BLOCK_BYTES / PI5.bandwidth
    balance = by_memory * CORES * PI5.hertz / blocks
    assert seconds(PI5, blocks * BLOCK_WEIGHTS, balance / 2) == by_memory
    assert seconds(PI5, blocks * BLOCK_WEIGHTS, 2 * balance) == pytest.approx(2 * by_memory)


def test_all_loops_count_as_often_as_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def simulated(command: list[str], **given: Any) -> subprocess.CompletedProcess[str]:
        lines = len(given["input"].splitlines())
        return subprocess.CompletedProcess(command, 0, f"Iterations: 100\nTotal Cycles:      {100 * lines}\n", "")

    monkeypatch.setattr(subprocess, "run", simulated)
    assert cycles("llvm-mca", PI5, TileCode([["sdot", "fmla"], ["sdot"]], 2)) == 6


def test_a_tile_s_instructions_are_counted_by_pattern() -> None:
    code = TileCode([["sdot v0", "sdot v1", "fmla v2"]], 4)
    assert code.count() == 12
    assert code.count("sdot") == 8
