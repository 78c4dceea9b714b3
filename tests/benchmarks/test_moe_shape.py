import numpy as np
import pytest

from benchmarks import e2b_shape, shape
from benchmarks.moe_shape import PREFILL, ROOM, VERIFY, Measured, check_memory, measure, report
from ondevice.engines.protocol import Outputs
from ondevice_export.config import ExpertsConfig

REPORT = """\
| rows | simd ms | its 1 row | experts per layer | llama.cpp ms | its 1 row | llama.cpp / simd |
| ---: | ------: | --------: | ----------------: | -----------: | --------: | ---------------: |
|    1 |    50.0 |      1.00 |               8.0 |        100.0 |      1.00 |             2.00 |
|    4 |   100.0 |      2.00 |              29.5 |        150.0 |      1.50 |             1.50 |"""


class Recorder:
    """An engine that computes nothing, and its one session."""

    def __init__(self):
        self.length = 0
        self.forwards = []
        self.target = type("Target", (), {"vocab_size": 100})()

    def open_session(self):
        return self

    def commit(self, path):
        self.length += len(path)

    def forward(self, batch):
        [rows] = batch
        self.forwards.append((self.length, len(rows.tree), list(rows.wanted)))
        count = len(rows.wanted)
        return [
            Outputs(np.zeros((count, 1), np.float32), np.zeros((count, 1), np.float32), experts=8.0 * len(rows.tree))
        ]


def test_every_number_of_rows_is_measured_behind_the_same_context():
    engine = Recorder()
    found = measure(engine, rounds=2)
    assert {length for length, _, _ in engine.forwards[1:]} == {64}
    assert [rows for rows, each in found.items() if each.seconds] == [*VERIFY, PREFILL]
    assert len(found[1].seconds) == 5 * len(found[PREFILL].seconds) == 10  # and one before each five that is not timed
    assert found[3].experts == [24.0] * 10
    assert {tuple(wanted) for _, rows, wanted in engine.forwards if rows == PREFILL} == {(PREFILL - 1,)}


def test_the_table():
    found = {1: Measured([0.04, 0.05, 0.07], [8.0] * 3), 4: Measured([0.1] * 2, [29.0, 30.0])}
    assert report(found, {1: [0.1], 4: [0.15]}) == REPORT
    assert "llama" not in report(found, None)


def test_memory_that_cannot_hold_the_weights_is_told_with_numbers():
    check_memory(15_000_000_000 + ROOM, 16_200_000_000)
    with pytest.raises(SystemExit, match=r"16\.1 GB of memory: 15\.0 GB of weights.* 16\.0 GB are available here"):
        check_memory(15_000_000_000 + ROOM, 16_000_000_000)


def test_shapes_are_those_of_the_models(tmp_path):
    def weights(model):
        return sum(int(np.prod(each, dtype=np.int64)) for each in model.shapes.values())

    (tmp_path / "own").mkdir()
    assert shape.target_model("E2B", tmp_path).shapes == e2b_shape.target_model(tmp_path / "own").shapes
    model = shape.target_model("26B-A4B", tmp_path)
    assert weights(model) == 25_233_141_790
    assert model.config.layers[0].experts == ExpertsConfig(128, 8, 704)
    assert not any("v_proj" in name for name in model.shapes if name.startswith("model.layers.5."))
    assert shape.drafter_model("26B-A4B", tmp_path).config.centroids is None
