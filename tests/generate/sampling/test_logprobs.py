import numpy as np
import pytest

from ondevice.generate.sampling.sampler import Logprobs


@pytest.mark.parametrize("vocab_size", [5, 4096])
def test_they_are_those_of_a_softmax(vocab_size: int) -> None:
    row = (3.0 * np.random.default_rng(0).standard_normal(vocab_size)).astype(np.float32)
    expected = row.astype(np.float64) - np.log(np.exp(row.astype(np.float64)).sum())
    found = Logprobs(7).of(row, 3)
    assert found.token_id == 3
    assert found.logprob == pytest.approx(expected[3])
    order = np.argsort(-row)[:7]
    assert [token for token, _ in found.top] == order.tolist()
    np.testing.assert_allclose([logprob for _, logprob in found.top], expected[order])


def test_the_lowest_ids_of_a_tie_come_first() -> None:
    found = Logprobs(3).of(np.array([0, 2, 1, 2, 1, 1], np.float32), 0)
    assert [token for token, _ in found.top] == [1, 3, 2]


def test_a_token_that_cannot_be_and_large_logits() -> None:
    found = Logprobs(1).of(np.array([-np.inf, 3e38, 0], np.float32), 0)
    assert found.logprob == -np.inf
    assert found.top == ((1, 0.0),)
    assert Logprobs().of(np.array([1, 2], np.float32), 1).top == ()
