import numpy as np
import pytest

from ondevice.generate.sampling.filters import select_top_k
from tests.generate.sampling.noise import peaks_of


def selected(k: int, scores: np.ndarray) -> list[int]:
    kept = np.empty(len(scores), np.intp)
    return kept[: select_top_k(scores, peaks_of(scores), np.empty(min(k, len(scores)), np.float32), kept)].tolist()


def at_least_the_kth(scores: np.ndarray, k: int) -> list[int]:
    return np.flatnonzero(scores >= np.sort(scores)[-k]).tolist()


@pytest.mark.parametrize("k", [1, 2, 63, 64, 999, 1000])
@pytest.mark.parametrize("order", ["random", "ascending", "descending", "tied"])
def test_the_k_largest_wherever_they_lie(k: int, order: str) -> None:
    scores = np.random.default_rng(k).standard_normal(1000).astype(np.float32)
    changed = {"random": scores, "ascending": np.sort(scores), "descending": -np.sort(scores), "tied": scores.round(1)}
    assert selected(k, changed[order]) == at_least_the_kth(changed[order], k)


def test_more_than_there_are_is_all() -> None:
    assert selected(10**9, np.arange(70, dtype=np.float32)) == list(range(70))


def test_forbidden_tokens_do_not_fill_up_the_set() -> None:
    scores = np.full(1000, -np.inf, np.float32)
    assert selected(5, scores) == []
    scores[[3, 500, 999]] = [float(np.finfo(np.float32).min), -2, -1]
    assert selected(5, scores) == [3, 500, 999]
    assert selected(2, scores) == [500, 999]


@pytest.mark.parametrize("place", [0, 64, 513, 999])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_makes_a_row_useless_is_found_wherever_it_is(place: int, value: float) -> None:
    scores = -np.arange(1000, dtype=np.float32)
    scores[place] = value
    assert place in selected(3, scores)
