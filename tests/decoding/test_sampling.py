import numpy as np
import pytest

from ondevice.decoding.sampling import Sampler, SamplingOptions, draw
from ondevice.errors import UsageError

VOCAB = 300

WARPERS = [
    {},
    {"temperature": 0.3},
    {"temperature": 1.7, "top_k": 1},
    {"top_k": 40},
    {"top_k": 10_000},
    {"top_p": 0.5},
    {"top_p": 1e-6},
    {"top_p": 1.0},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"repetition_penalty": 1.4},
    {"temperature": 1.3, "top_k": 50, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 0.7},
    {"temperature": 0.6, "top_k": 64, "top_p": 0.95},
]


def rows(count: int, vocab_size: int = VOCAB, seed: int = 0) -> np.ndarray:
    return (3.0 * np.random.default_rng(seed).standard_normal((count, vocab_size))).astype(np.float32)


def transformers_distribution(options: SamplingOptions, logits: np.ndarray, context: list[int]) -> np.ndarray:
    import torch
    from transformers.generation import logits_process as hf

    steps = [hf.RepetitionPenaltyLogitsProcessor(options.repetition_penalty)]
    steps.append(hf.TemperatureLogitsWarper(options.temperature))
    if options.top_k is not None:
        steps.append(hf.TopKLogitsWarper(options.top_k))
    if options.top_p is not None:
        steps.append(hf.TopPLogitsWarper(options.top_p))
    if options.min_p is not None:
        steps.append(hf.MinPLogitsWarper(options.min_p))
    scores = torch.from_numpy(logits.astype(np.float64))[None]
    for step in steps:
        scores = step(torch.tensor([context]), scores)
    return torch.softmax(scores, -1)[0].numpy()


@pytest.mark.parametrize("chosen", WARPERS, ids=str)
def test_distribution_equals_that_of_transformers(chosen: dict[str, float]) -> None:
    options = SamplingOptions(**chosen)
    context = [3, 7, 7, 299, 0]
    for logits in rows(20):
        expected = transformers_distribution(options, logits, context)
        actual = Sampler(options).distribution(logits, context)
        np.testing.assert_array_equal(actual > 0, expected > 0)
        np.testing.assert_allclose(actual, expected, rtol=1e-6)


def test_top_k_keeps_what_ties_with_the_kth_like_transformers() -> None:
    logits = np.array([1, 5, 2, 5, 2, 2], np.float32)
    options = SamplingOptions(top_k=3)
    actual = Sampler(options).distribution(logits, [0])
    np.testing.assert_allclose(actual, transformers_distribution(options, logits, [0]))
    assert np.flatnonzero(actual).tolist() == [1, 2, 3, 4, 5]


def test_top_p_keeps_the_lowest_ids_of_a_tie() -> None:
    kept = Sampler(SamplingOptions(top_p=0.5)).distribution(np.zeros(8, np.float32), [])
    assert np.flatnonzero(kept).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("spread", [0.001, 0.01, 1.0, 30.0])
def test_top_p_is_exact_over_a_large_vocabulary_however_flat(spread: float) -> None:
    logits = spread * rows(1, 20_000)[0]
    probs = np.exp(logits.astype(np.float64) - float(logits.max()))
    probs /= probs.sum()
    order = np.argsort(-probs, kind="stable")
    needed = int(np.searchsorted(np.cumsum(probs[order]), 0.7)) + 1
    kept = np.flatnonzero(Sampler(SamplingOptions(top_p=0.7)).distribution(logits, []))
    assert kept.tolist() == sorted(order[:needed].tolist())


def test_greedy_takes_the_lowest_id_of_a_tie_and_no_random_number() -> None:
    sampler = Sampler(SamplingOptions(temperature=0, seed=5))
    assert sampler.choose(np.array([1, 9, 9, 0], np.float32), []) == 1
    assert sampler.rng.random() == np.random.default_rng(5).random()
    assert sampler.distribution(np.array([1, 9, 9, 0], np.float32), []).tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("chosen", WARPERS, ids=str)
def test_sampling_takes_one_uniform_number_and_inverts_the_cumulative_sum(chosen: dict[str, float]) -> None:
    sampler = Sampler(SamplingOptions(**chosen, seed=11))
    uniforms = np.random.default_rng(11)
    for logits in rows(20):
        token = sampler.choose(logits, [1, 2])
        cumulative = np.cumsum(sampler.distribution(logits, [1, 2]))
        uniform = uniforms.random()
        assert cumulative[token - 1] - 1e-12 <= uniform < cumulative[token] + 1e-12 or token == 0


def test_a_row_alone_decides() -> None:
    """Not the rows before it, nor the array that it is a view of."""
    batch = rows(4)
    options = SamplingOptions(temperature=0.9, top_k=20, top_p=0.9)
    alone = [Sampler(options).distribution(np.array(row), [1]) for row in batch]
    sampler = Sampler(options)
    for row, expected in zip(batch, alone, strict=True):
        np.testing.assert_array_equal(sampler.distribution(row, [1]), expected)


def test_the_engine_s_logits_stay_as_they_are() -> None:
    def forbid_everything_but_seven(logits: np.ndarray, context: object) -> np.ndarray:
        logits[np.arange(len(logits)) != 7] = -np.inf
        return logits

    logits = rows(1)[0]
    before = logits.copy()
    sampler = Sampler(SamplingOptions(repetition_penalty=1.3), [forbid_everything_but_seven])
    assert sampler.choose(logits, [1, 2, 3]) == 7
    np.testing.assert_array_equal(logits, before)


def test_processors_see_penalised_logits_and_the_context() -> None:
    seen = []

    def spy(logits: np.ndarray, context: object) -> np.ndarray:
        seen.append((logits[:3].tolist(), context))
        return logits

    Sampler(SamplingOptions(temperature=0, repetition_penalty=2.0), [spy]).choose(
        np.array([-2, 2, 2], np.float32), [0, 1]
    )
    assert seen == [([-4.0, 1.0, 2.0], [0, 1])]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [-np.inf, np.nan])
def test_a_row_that_leaves_nothing_to_choose_is_an_error(temperature: float, value: float) -> None:
    with pytest.raises(UsageError, match="no token can be chosen"):
        Sampler(SamplingOptions(temperature)).choose(np.full(4, value, np.float32), [])


def test_draw_never_returns_a_weight_of_zero() -> None:
    class Nearly1:
        def random(self) -> float:
            return 1.0 - 2.0**-53

    class Zero:
        def random(self) -> float:
            return 0.0

    weights = np.array([0.0, 0.1, 0.0, 0.2, 1e-300, 0.0])
    assert draw(weights, Zero()) == 1
    assert draw(weights, Nearly1()) == 3


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": 0}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"seed": -1}, "seed"),
    ],
)
def test_an_option_that_makes_no_sense_is_one_clear_line(chosen: dict[str, float], message: str) -> None:
    with pytest.raises(UsageError, match=f"^{message} must be .+") as raised:
        SamplingOptions(**chosen)
    assert "\n" not in str(raised.value)
