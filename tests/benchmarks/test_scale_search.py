from typing import Any

import numpy as np
import pytest

from benchmarks.scale_search import METHODS, Errors, absmax, measure, normal, q4_0, report, searched


class Target:
    """As much of a target as is measured."""

    def __init__(self, tensors):
        self.tensors = tensors
        self.shapes = {name: tensor.shape for name, tensor in tensors.items()}
        self.checkpoint = self

    def rows(self, name, start, stop):
        return self.tensors[name][start:stop]


@pytest.fixture
def weights():
    return np.random.default_rng(1).standard_normal((64, 32), np.float32)


@pytest.mark.parametrize("rival", [absmax, q4_0])
def test_the_rivals_keep_the_peak(rival, weights):
    peaks = np.arange(len(weights)), np.abs(weights).argmax(axis=1)
    assert rival(weights)[peaks] == pytest.approx(weights[peaks], rel=1e-3)


def test_an_empty_block_stays_empty():
    for method in METHODS.values():
        assert not method(np.zeros((1, 32), np.float32)).any()


def test_the_search_is_better_than_both(weights):
    errors = Errors()
    errors.add(weights)
    assert errors.share("search") < errors.share("Q4_0") < errors.share("absmax")
    assert errors.gain("absmax") == pytest.approx(1 - errors.lost["search"] / errors.lost["absmax"])


def test_a_grid_is_found_again():
    codes = np.random.default_rng(2).integers(-8, 8, (16, 32)).astype(np.float32)
    assert np.array_equal(searched(codes * 0.125), codes * 0.125)


def test_kinds_sum_up(weights):
    wide = np.ones((3, 64), np.float32)
    target: Any = Target(
        {
            "model.layers.0.self_attn.q_proj.weight": weights,
            "model.layers.1.self_attn.q_proj.weight": weights,
            "model.embed_tokens.weight": wide,
            "model.norm.weight": np.ones(64, np.float32),
        }
    )
    kinds = measure(target)
    assert {kind: errors.count for kind, errors in kinds.items()} == {
        "q_proj": 2 * weights.size,
        "embed_tokens": wide.size,
        "all": 2 * weights.size + wide.size,
    }
    assert kinds["all"].lost["search"] == pytest.approx(kinds["q_proj"].lost["search"])


def test_the_report():
    errors = Errors(2_000_000, 1000.0, {"absmax": 10.0, "Q4_0": 8.0, "search": 6.0})
    assert report({"q_proj": errors, "all": errors}, "some checkpoint").splitlines()[:4] == [
        "| matrices | million weights | absmax e-3 | Q4_0 e-3 | search e-3 | less than absmax | than Q4_0 |",
        "| -------- | --------------: | ---------: | -------: | ---------: | ---------------: | --------: |",
        "| q_proj   |            2.00 |     10.000 |    8.000 |      6.000 |            40.0% |     25.0% |",
        "| all      |            2.00 |     10.000 |    8.000 |      6.000 |            40.0% |     25.0% |",
    ]


def test_normal_weights_lose_less_by_three_tenths():
    assert normal().gain("absmax") == pytest.approx(0.30, abs=0.02)
