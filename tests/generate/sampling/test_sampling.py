from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from ondevice.errors import BundleCorruptError, UsageError
from ondevice.generate.request import LogitsProcessor, SamplingOptions
from ondevice.generate.sampling import gumbel
from ondevice.generate.sampling.row_draw import RowDraw
from ondevice.generate.sampling.sampler import Sampler
from tests.fixtures.pairwise import pairwise
from tests.generate.sampling.noise import gumbel_at

VOCAB = 300

WARPERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"temperature": 1.7, "top_k": 1},
    {"top_k": 40},
    {"top_k": 10_000},
    {"top_p": 0.5},
    {"top_p": 1e-6},
    {"top_p": 0.0},
    {"top_p": 1.0},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"temperature": 1.5, "top_p": 0.7, "min_p": 0.02},
    {"repetition_penalty": 1.4},
    {"temperature": 1.3, "top_k": 50, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 0.7},
    {"temperature": 0.6, "top_k": 64, "top_p": 0.95},
]


def rows(count: int, vocab_size: int = VOCAB, seed: int = 0) -> np.ndarray:
    return (3.0 * np.random.default_rng(seed).standard_normal((count, vocab_size))).astype(np.float32)


def transformers_distribution(options: SamplingOptions, logits: np.ndarray, context: list[int]) -> np.ndarray:
    import torch
    from transformers.generation import logits_process as hf

    steps: list[hf.LogitsProcessor] = [hf.RepetitionPenaltyLogitsProcessor(options.repetition_penalty)]
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


@pytest.mark.needs("oracle")
@pytest.mark.parametrize("chosen", WARPERS, ids=str)
def test_distribution_equals_that_of_transformers(chosen: dict[str, Any]) -> None:
    options = SamplingOptions(**chosen)
    context = [3, 7, 7, 299, 0]
    for logits in rows(20):
        expected = transformers_distribution(options, logits, context)
        actual = Sampler(options).distribution(logits, context)
        np.testing.assert_array_equal(actual > 0, expected > 0)
        np.testing.assert_allclose(actual, expected, rtol=1e-6)


@pytest.mark.needs("oracle")
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


@pytest.mark.parametrize("top_p", [0.3, 0.7, 0.99])
@pytest.mark.parametrize("spread", [0.001, 0.01, 1.0, 3.0, 30.0])
def test_top_p_is_right_to_a_millionth_over_a_large_vocabulary_however_flat(spread: float, top_p: float) -> None:
    logits = spread * rows(1, 20_000)[0]
    probs = np.exp(logits.astype(np.float64) - float(logits.max()))
    probs /= probs.sum()
    order = np.argsort(-probs, kind="stable")
    held = np.cumsum(probs[order])
    kept = np.flatnonzero(Sampler(SamplingOptions(top_p=top_p)).distribution(logits, []))
    assert kept.tolist() == sorted(order[: len(kept)].tolist())
    assert held[len(kept) - 1] >= top_p - 1e-6
    assert len(kept) == 1 or held[len(kept) - 2] < top_p + 1e-6


def test_greedy_takes_the_lowest_id_of_a_tie() -> None:
    sampler = Sampler(SamplingOptions(temperature=0, seed=5))
    assert sampler.choose(np.array([1, 9, 9, 0], np.float32), []) == 1
    assert sampler.distribution(np.array([1, 9, 9, 0], np.float32), []).tolist() == [0, 1, 0, 0]


def reference_distribution(options: SamplingOptions, logits: np.ndarray) -> np.ndarray:
    """As one would write it down: sort everything, drop what each option drops."""
    scaled = (logits.astype(np.float64) - logits.max()) / options.temperature
    order = np.argsort(-scaled, kind="stable")
    if options.top_k is not None:
        order = order[scaled[order] >= scaled[order[: options.top_k]].min()]
    weights = np.exp(scaled[order])
    kept = weights > 0
    if options.top_p is not None and options.top_p < 1:
        kept &= np.concatenate([[0.0], weights[:-1]]).cumsum() < max(options.top_p, 1e-300) * weights.sum()
    if options.min_p is not None:
        kept &= weights >= options.min_p
    probs = np.zeros(len(logits))
    probs[order[kept]] = weights[kept] / weights[kept].sum()
    return probs


def peaked(logits: np.ndarray) -> np.ndarray:
    return np.where(np.arange(logits.shape[1]) % 997 == 5, 12 + logits / 10, logits - 9)


def bfloat16(logits: np.ndarray) -> np.ndarray:
    return (logits.view(np.uint32) & 0xFFFF0000).view(np.float32)


def allow_few(logits: np.ndarray) -> np.ndarray:
    return np.where(np.arange(logits.shape[1]) % 1000 == 7, logits, np.float32(-np.inf))


SHAPES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "normal": lambda logits: logits,
    "peaked": peaked,
    "flat": lambda logits: logits / 1000,
    "steep": lambda logits: 100 * logits,
    "repeated": bfloat16,
    "tied": np.round,
    "equal": np.zeros_like,
    "masked": allow_few,
}


@pairwise(
    chosen=[one for one in WARPERS if "repetition_penalty" not in one],
    vocab_size=[8, 5000, 40_001],
    shape=list(SHAPES),
)
def test_every_shape_of_row_gives_what_sorting_it_gives(chosen: dict[str, Any], vocab_size: int, shape: str) -> None:
    options = SamplingOptions(**chosen)
    for logits in SHAPES[shape](rows(2, vocab_size)).astype(np.float32):
        expected = reference_distribution(options, logits)
        actual = Sampler(options).distribution(logits, [])
        np.testing.assert_array_equal(actual > 0, expected > 0)
        np.testing.assert_allclose(actual, expected, rtol=1e-10)


@pytest.mark.parametrize(
    ("chosen", "vocab_size"), [(chosen, (VOCAB, 5000)[number % 2]) for number, chosen in enumerate(WARPERS)], ids=str
)
def test_a_draw_is_the_likeliest_with_the_noise_of_its_place(chosen: dict[str, Any], vocab_size: int) -> None:
    sampler = Sampler(SamplingOptions(**chosen, seed=11))
    for length, logits in enumerate(rows(20, vocab_size)):
        context = [1, 2][: min(length, 2)] + [3] * max(length - 2, 0)
        with np.errstate(divide="ignore"):
            log_chances = np.log(sampler.distribution(logits, context))
        gumbels = [gumbel_at(gumbel.key_of(11), length, token) for token in range(vocab_size)]
        assert sampler.choose(logits, context) == int((log_chances + gumbels).argmax())


def test_a_draw_depends_on_seed_and_place_alone() -> None:
    options = SamplingOptions(top_k=40, seed=11)
    logits = rows(60)[0]
    forwards = [Sampler(options).choose(logits, [0] * length) for length in range(60)]
    sampler = Sampler(options)
    backwards = [sampler.choose(logits, [0] * length) for length in reversed(range(60))]
    assert backwards[::-1] == forwards
    assert len(set(forwards)) > 5
    assert forwards != [
        Sampler(SamplingOptions(top_k=40, seed=12)).choose(logits, [0] * length) for length in range(60)
    ]


def test_without_a_seed_every_generation_draws_its_own() -> None:
    logits = np.zeros(10_000, np.float32)
    assert len({Sampler(SamplingOptions()).choose(logits, []) for _ in range(8)}) > 1


@pytest.mark.parametrize("chosen", [*WARPERS, {"temperature": 0.0}], ids=str)
def test_a_guess_from_the_target_s_own_logits_is_its_choice(chosen: dict[str, Any]) -> None:
    """Over the whole vocabulary, and over candidates in any order that hold all that could be chosen."""
    random = np.random.default_rng(1)
    sampler = Sampler(SamplingOptions(**chosen, seed=11))
    for logits in rows(20):
        context, path = [1, 2, 3], [4, 2]
        choice = sampler.choose(logits, context + path)
        candidates = random.permutation(VOCAB)
        for names, scores in ((None, logits), (candidates, logits[candidates])):
            guesses = sampler.guess(scores, names, context, path, 3)
            assert guesses[0].token == choice
            assert len({guess.token for guess in guesses}) == len(guesses)
            assert 0 < guesses[-1].share <= guesses[0].share <= 1


@pytest.mark.parametrize("kept", [1, 2, 3])
@pytest.mark.parametrize("filters", [{"min_p": 0.5}, {"top_p": 0.9}], ids=str)
def test_shares_are_those_of_the_tokens_that_the_filters_keep(kept: int, filters: dict[str, Any]) -> None:
    """Where they keep fewer than a guess is compared with, the rest of its memory counts for nothing."""
    logits = np.full(VOCAB, -50, np.float32)
    logits[:kept] = 50
    for seed in range(20):
        freed = np.full(4, 1e6)
        del freed  # numpy gives this memory to the next array of its size
        guesses = Sampler(SamplingOptions(**filters, seed=seed)).guess(logits, None, [], [], 4)
        assert len(guesses) == kept
        assert sum(guess.share for guess in guesses) == pytest.approx(1)


@pytest.mark.parametrize("chosen", [*WARPERS, {}], ids=str)
@pytest.mark.parametrize("spread", [0.3, 3.0, 30.0])
def test_the_best_of_some_candidates_are_those_with_the_largest_log_weight_and_noise(
    chosen: dict[str, Any], spread: float
) -> None:
    random = np.random.default_rng(4)
    draw = RowDraw(SamplingOptions(**chosen), gumbel.key_of(5))
    for position, count in enumerate([512, 3, 900, 512] * 5):  # its scratch is reused for rows of any length
        scores = (spread * random.standard_normal(count)).astype(np.float32)
        names = random.permutation(4096)[:count]
        kept, weights = (each.copy() for each in draw.kept(scores))
        log_weights = (scores[kept].astype(np.float64) - scores.max()) / chosen.get("temperature", 1.0)
        np.testing.assert_allclose(weights, np.exp(log_weights), rtol=1e-12)
        noise = [gumbel_at(gumbel.key_of(5), position, name) for name in names[kept]]
        order = np.argsort(-(log_weights + noise))[:4]
        tokens, values = draw.best(scores, names, position, 4)
        assert tokens.tolist() == names[kept][order][: len(tokens)].tolist()
        np.testing.assert_allclose(values, (log_weights + noise)[order][: len(tokens)], rtol=1e-12)
        assert len(tokens) == min(4, np.count_nonzero(weights))


def test_a_min_p_alone_keeps_what_it_keeps_behind_a_top_k_of_all() -> None:
    random = np.random.default_rng(6)
    for temperature in (1e-3, 0.7, 1.0, 1e30):
        for logits in (5 * random.standard_normal((20, 300))).astype(np.float32):
            chosen: dict[str, Any] = {"temperature": temperature, "min_p": float(random.uniform(0.001, 1.0))}
            alone = Sampler(SamplingOptions(**chosen)).distribution(logits, [])
            np.testing.assert_array_equal(alone, Sampler(SamplingOptions(**chosen, top_k=300)).distribution(logits, []))


def test_guesses_of_similar_logits_mostly_agree() -> None:
    """More often than by the likeliest token, less often than the best rule could: 1 - the distance of p and q."""
    sampler = Sampler(SamplingOptions(seed=2))
    agreed, likeliest, best = 0, 0.0, 0.0
    for place, (row, error) in enumerate(zip(rows(600, 50), rows(600, 50, seed=1), strict=True)):
        logits, other = row / 2, row / 2 + error / 6
        p, q = sampler.distribution(logits, []), sampler.distribution(other, [])
        context = [0] * place
        agreed += sampler.guess(other, None, context, [])[0].token == sampler.choose(logits, context)
        likeliest += float(p[q.argmax()])
        best += float(np.minimum(p, q).sum())
    assert likeliest + 0.2 * (best - likeliest) < agreed < best + 3 * np.sqrt(600 * 0.25)
    assert agreed > 1.2 * likeliest


@pytest.mark.parametrize("row", [[np.nan] * 4, [9, 8, np.nan, 7], [1, np.inf, 2, 3], [-np.inf] * 4], ids=str)
@pytest.mark.parametrize(
    "chosen",
    [{"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_p": 0.9, "min_p": 0.1}],
    ids=str,
)
@pytest.mark.parametrize("count", [4, 1000])
def test_there_is_no_guess_where_the_logits_make_no_sense(
    chosen: dict[str, float], row: list[float], count: int
) -> None:
    logits = np.full(count, min(row), np.float32)
    logits[:4] = row
    sampler = Sampler(SamplingOptions(**chosen))  # type: ignore[arg-type]
    assert sampler.guess(logits, None, [], []) == []
    with pytest.raises(BundleCorruptError, match="NaN or infinity in place of logits"):
        sampler.choose(logits, [])


@pytest.mark.parametrize("temperature", [0.1, 0.7, 1.0, 3.0])
def test_a_token_with_exactly_the_share_of_min_p_is_kept(temperature: float) -> None:
    """Whatever the rounding of the logit below which no exponential is taken."""
    scores = -np.abs(np.random.default_rng(7).standard_normal(300)).astype(np.float32)
    scores[0] = 0
    _, weights = RowDraw(SamplingOptions(temperature), gumbel.key_of(0)).kept(scores)
    for token, weight in enumerate(weights.tolist()):
        kept, _ = RowDraw(SamplingOptions(temperature, min_p=weight), gumbel.key_of(0)).kept(scores)
        assert token in kept.tolist()


def test_a_row_alone_decides() -> None:
    """Not the rows before it, nor the array that it is a view of."""
    batch = rows(4)
    options = SamplingOptions(temperature=0.9, top_k=20, top_p=0.9)
    alone = [Sampler(options).distribution(np.array(row), [1]) for row in batch]
    sampler = Sampler(options)
    together = [sampler.distribution(row, [1]) for row in batch]
    np.testing.assert_array_equal(together, alone)


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


@pytest.mark.parametrize("chosen", [{"top_k": 1}, {"top_k": 2, "top_p": 0.9}], ids=str)
def test_what_a_processor_returns_may_have_another_type(chosen: dict[str, Any]) -> None:
    sampler = Sampler(SamplingOptions(**chosen), [lambda logits, _: np.array([0.1, 0.2, 0.3])[::-1]])
    assert sampler.distribution(np.zeros(3, np.float32), [])[0] > 0.5


@pytest.mark.parametrize("chosen", [{"temperature": 0.0}, {}, {"top_k": 2}, {"top_p": 0.5}], ids=str)
@pytest.mark.parametrize("row", [[-np.inf] * 4, [np.nan] * 4, [9, 8, np.nan, 7], [1, np.inf, 2, 3]], ids=str)
def test_a_row_that_leaves_nothing_to_choose_is_an_error(chosen: dict[str, Any], row: list[float]) -> None:
    """The model's own, or that of a logits processor; a distribution has the same errors."""
    options, given = SamplingOptions(**chosen), np.array(row, np.float32)
    sampler, changing = Sampler(options), Sampler(options, [lambda logits, _: given])
    for choose in (sampler.choose, sampler.distribution):
        with pytest.raises(BundleCorruptError, match="NaN or infinity in place of logits"):
            choose(given, [])
    for choose in (changing.choose, changing.distribution):
        with pytest.raises(UsageError, match="no token can be chosen"):
            choose(np.zeros(4, np.float32), [])


CHI_SQUARE_19_DF = 43.8
"""Exceeded once in a thousand when 20 cells have the chances they should have."""


@pytest.mark.parametrize("chosen", [{}, {"top_k": 64, "top_p": 0.95}, {"top_p": 0.8}, {"min_p": 0.02}], ids=str)
def test_tokens_are_drawn_as_often_as_the_distribution_says(chosen: dict[str, Any]) -> None:
    logits = rows(1, 5000)[0]
    sampler = Sampler(SamplingOptions(**chosen, seed=3))
    expected = 4000 * sampler.distribution(logits, [])
    drawn = np.bincount([sampler.choose(logits, range(place)) for place in range(4000)], minlength=5000)
    assert not drawn[expected == 0].any()
    common = np.argsort(-expected)[:19]  # and one cell for all others
    observed, expected = (np.append(one[common], 4000 - one[common].sum()) for one in (drawn, expected))
    assert ((observed - expected) ** 2 / expected).sum() < CHI_SQUARE_19_DF


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": None}, "temperature"),
        ({"repetition_penalty": None}, "repetition_penalty"),
        ({"presence_penalty": None}, "presence_penalty"),
        ({"frequency_penalty": None}, "frequency_penalty"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": True}, "top_k"),
        ({"top_k": 2.5}, "top_k"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": 1e300}, "repetition_penalty"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty"),
        ({"seed": -1}, "seed"),
        ({"seed": 0.5}, "seed"),
    ],
)
def test_an_option_that_makes_no_sense_is_one_clear_line(chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=f"^{message} must be .+") as raised:
        SamplingOptions(**chosen)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "processor",
    [
        lambda ids, scores: scores,  # in transformers' order
        lambda logits, context: None,
        lambda logits, context: logits.tolist(),
        lambda logits, context: logits[:-1],
        lambda logits, context: np.append(logits, np.float32(99)),
        lambda logits, context: logits[None],
        lambda logits, context: logits.argsort(),
    ],
)
def test_what_a_processor_returns_must_be_the_row(processor: LogitsProcessor) -> None:
    sampler = Sampler(SamplingOptions(temperature=0), [processor])
    with pytest.raises(UsageError, match=r"a logits processor returned .+ it is called with \(logits, context\)"):
        sampler.choose(np.zeros(3, np.float32), [0, 1, 2])


@pytest.mark.parametrize(
    "chosen", [{"temperature": Fraction(1, 2)}, {"temperature": np.float32(0.5), "top_k": np.int8(2)}]
)
def test_numbers_may_be_of_any_type(chosen: dict[str, Any]) -> None:
    sampler, plain = (
        Sampler(SamplingOptions(**chosen, seed=1)),
        Sampler(SamplingOptions(0.5, chosen.get("top_k"), seed=1)),
    )
    assert sampler.choose(rows(1)[0], []) == plain.choose(rows(1)[0], [])


def test_whole_numbers_may_be_of_any_size() -> None:
    sampler = Sampler(SamplingOptions(top_k=10**400, seed=10**400))
    assert 0 <= sampler.choose(rows(1)[0], []) < VOCAB


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("temperature", [5e-324, 1e-31, 1e-5, 1e308])
def test_extreme_temperatures(temperature: float) -> None:
    probs = Sampler(SamplingOptions(temperature)).distribution(np.array([1, 5, 2], np.float32), [])
    assert probs.sum() == pytest.approx(1)
    assert probs[1] == pytest.approx(1 if temperature < 1 else 1 / 3)


def test_a_top_k_of_0_keeps_every_token_as_in_transformers() -> None:
    logits = rows(1)[0]
    kept = Sampler(SamplingOptions(top_k=0)).distribution(logits, [])
    np.testing.assert_array_equal(kept, Sampler(SamplingOptions()).distribution(logits, []))
