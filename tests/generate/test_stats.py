"""The sums over a generation's rounds, compared with a count by hand."""

from __future__ import annotations

from ondevice.generate.stats import DraftCounts, ForwardCost, Round, Stats

PREFILL = Round((7,), rows=12, seconds=0.5)
CHAIN = Round(
    (1, 2, 3),
    drafted=4,
    accepted=2,
    corrected=True,
    depth=4,
    source="mtp",
    rows=5,
    seconds=0.25,
    draft_seconds=0.0625,
    control_seconds=0.03125,
    target_seconds=0.125,
    forward=ForwardCost(rows=5, wanted=5, seconds=0.25, experts=3.0),
    threads=2,
)
TREE = Round((4, 5), drafted=3, accepted=1, depth=2, source="ngram", rows=4, seconds=0.25, threads=1)
PLAIN = Round((6,), rows=1, seconds=0.5, idle="no_match", threads=2)
LAST = Round((8,), drafted=1, accepted=1, depth=1, source="mtp", rows=2, seconds=0.5, finish_reason="length")


def counted(*rounds: Round) -> Stats:
    stats = Stats(prompt_tokens=12, cached_tokens=2, threads=4)
    for each in rounds:
        stats.count(each)
    return stats


def test_drafts_are_counted_in_all_and_by_source() -> None:
    stats = counted(PREFILL, CHAIN, TREE, PLAIN, LAST)
    assert stats.by_source == {
        "mtp": DraftCounts(2, 5, 3, [2, 1, 1, 1], [2, 1, 0, 0]),
        "ngram": DraftCounts(1, 3, 1, [1, 1], [1, 0]),
    }
    assert stats.draft_figures() == {
        "num_drafts": 3,
        "num_draft_tokens": 8,
        "num_accepted_tokens": 4,
        "num_drafts_per_pos": [3, 2, 1, 1],
        "num_accepted_tokens_per_pos": [3, 1, 0, 0],
        "draft_acceptance_rate": 0.5,
        "mean_acceptance_length": 1 + 4 / 3,
    }
    assert (stats.rounds_without_draft, stats.fallbacks) == (1, {"no_match": 1})
    assert (stats.drafted, stats.accepted) == (8, 4)


def test_times_and_rates() -> None:
    stats = counted(PREFILL, CHAIN, TREE, PLAIN, LAST)
    assert stats.prompt_read
    assert (stats.prefill_s, stats.decode_s, stats.target_s) == (0.5, 1.5, 0.125)
    assert (stats.draft_s, stats.control_s) == (0.0625, 0.03125)
    assert (stats.new_tokens, stats.target_forwards) == (8, 4)
    assert (stats.tokens_per_round, stats.decode_tokens_per_s) == (7 / 4, 7 / 1.5)
    assert stats.experts_per_round == 3.0 / 4
    assert (stats.threads_ran, stats.usual_threads) == ([1, 2], 2)
    assert stats.timings() == {
        "cache_n": 2,
        "prompt_n": 10,
        "prompt_ms": 500.0,
        "prompt_per_token_ms": 50.0,
        "prompt_per_second": 20.0,
        "predicted_n": 8,
        "predicted_ms": 1500.0,
        "predicted_per_token_ms": 1500 / 7,
        "predicted_per_second": 7 / 1.5,
        "draft_n": 8,
        "draft_n_accepted": 4,
    }


def test_nothing_was_drafted_nor_decoded() -> None:
    stats = counted(PREFILL, Round((), rows=0, seconds=9.0, finish_reason="cancelled"))
    assert (stats.new_tokens, stats.decode_s, stats.target_forwards) == (1, 0.0, 0)
    assert (stats.draft_acceptance_rate, stats.mean_acceptance_length) == (0.0, 1.0)
    assert (stats.tokens_per_round, stats.decode_tokens_per_s, stats.experts_per_round) == (0.0, 0.0, 0.0)
    assert (stats.threads_ran, stats.usual_threads) == ([], 4)
    assert stats.timings()["predicted_per_token_ms"] == 0.0


def test_a_prompt_that_was_not_read() -> None:
    stats = counted(Round((), rows=0, seconds=0.5, finish_reason="cancelled"))
    assert not stats.prompt_read
    assert (stats.prefill_s, stats.new_tokens) == (0.5, 0)


def test_a_prompt_that_was_in_the_cache() -> None:
    timings = Stats(prompt_tokens=4, cached_tokens=4).timings()
    assert (timings["prompt_n"], timings["prompt_per_token_ms"], timings["prompt_per_second"]) == (0, 0.0, 0.0)
