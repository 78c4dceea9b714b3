"""The benchmark of several sequences, over the toy engine: what it measures and what it prints."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmarks import batch
from benchmarks.batch import Batch, FirstToken, first_token, measure, report
from benchmarks.llama_batched_bench import BatchedBench, speeds_of
from tests.model_made import model_over, write_bundle
from tests.toy_engine import ToyEngine


def test_it_measures_all_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "COUNTS", (1, 3))
    engine = ToyEngine(before=lambda _: time.sleep(0.002))
    with model_over(engine, write_bundle(tmp_path), max_sequences=4, cache_bytes=0) as model:
        one, three = measure(model, tokens=10, repeats=2)
        request = first_token(model, tokens=5)
    assert (one.sequences, three.sequences) == (1, 3)
    assert three.tokens_per_s > 1.2 * one.tokens_per_s
    assert one.fairness == 1.0
    assert 0 < three.fairness <= 1.0
    assert min(request.alone_s, request.usual_s, request.longest_s) > 0
    assert request.beside_s > request.usual_s
    assert any(len(rows) == 4 for rows in engine.batches)


def test_the_report_sets_everything_in_relation_to_one_sequence() -> None:
    facts = {
        "bundle": "toy", "weights": "int4", "engine": "simd", "threads": 2, "processor": "a CPU", "system": "an OS",
        "versions": {"numpy": "2"}, "tokens": 40, "repeats": 3,
    }  # fmt: skip
    batches = [Batch(1, 20.0, 1.0), Batch(4, 70.0, 0.97)]
    text = report(batches, FirstToken(0.5, 0.75, 0.05, 0.15), {1: 10.0, 4: 18.8}, facts)
    assert (
        "|         4 |     70.0 |  3.50x |           0.97 |               18.8 |      1.88x |             3.72 |"
        in text
    )
    assert "first token after 0.50 s alone and 0.75 s while 3 others decode" in text
    assert "50 ms between tokens, and 150 ms at worst" in text
    assert "llama.cpp" not in report(batches, FirstToken(0.5, 0.75, 0.05, 0.15), {}, facts)


def test_what_llama_batched_bench_prints() -> None:
    output = 'log\n{"pl": 1, "speed_tg": 17.1, "speed_pp": 9}\n{"pl": 4, "speed_tg": 32.1}\n'
    assert speeds_of(output) == {1: 17.1, 4: 32.1}


def test_a_program_that_does_not_run(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="give the path of llama-batched-bench"):
        BatchedBench(tmp_path / "nothing", tmp_path / "none.gguf", 1).tokens_per_s((1, 2), 8, 8)
    with pytest.raises(SystemExit, match="failed with exit code"):
        BatchedBench(Path("/bin/false"), tmp_path / "none.gguf", 1).tokens_per_s((1, 2), 8, 8)
