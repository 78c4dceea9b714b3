from collections import Counter

import numpy as np
import pytest

from ondevice.generate.drafters.ngram import NOVELTY, SuffixAutomaton, longest_match

Texts = list[list[int]]


def followers(texts: Texts, context: list[int]) -> Counter[int]:
    """The tokens that follow each occurrence of a context."""
    size = len(context)
    return Counter(
        text[start + size]
        for text in texts
        for start in range(len(text) - size)
        if text[start : start + size] == context
    )


def longest_followed(texts: Texts, context: list[int]) -> list[int]:
    """The longest suffix of a context that something follows somewhere."""
    for start in range(len(context)):
        if followers(texts, context[start:]):
            return context[start:]
    return []


def built(texts: Texts, piece: int = 1000) -> SuffixAutomaton:
    automaton = SuffixAutomaton()
    for index, text in enumerate(texts):
        if index:
            automaton.end_text()
        for start in range(0, len(text), piece):
            automaton.extend(text[start : start + piece])
    return automaton


def match_length(automaton: SuffixAutomaton) -> int:
    """Length of the longest suffix of the current text that occurred before with a token after it."""
    return longest_match(automaton._tables)[1]


def assert_as_searched(texts: Texts, automaton: SuffixAutomaton, most: int = 12) -> None:
    """Match, continuation and counts are those of a search through all texts."""
    context = longest_followed(texts, texts[-1])
    assert match_length(automaton) == len(context)
    tokens, raw = automaton.continuation(most)
    for token, value in zip(tokens.tolist(), raw.tolist(), strict=True):
        counts = followers(texts, context)
        assert counts[token] == max(counts.values())
        assert value == pytest.approx(counts[token] / (counts.total() + NOVELTY * len(counts) / len(context)))
        context = longest_followed(texts, [*context, token])
    assert len(tokens) == most or not context


@pytest.mark.parametrize("alphabet", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(4))
def test_one_text_as_it_grows(alphabet: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    text: list[int] = []
    automaton = SuffixAutomaton()
    while len(text) < 60:
        new = random.integers(0, alphabet, random.integers(1, 5)).tolist()
        automaton.extend(new)
        text += new
        assert_as_searched([text], automaton)
    assert len(automaton) == len(text)


@pytest.mark.parametrize("alphabet", [2, 3, 5])
@pytest.mark.parametrize("seed", range(6))
def test_several_texts(alphabet: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    texts = [random.integers(0, alphabet, random.integers(1, 25)).tolist() for _ in range(4)]
    for count in range(1, len(texts) + 1):
        assert_as_searched(texts[:count], built(texts[:count]))


def test_a_text_that_repeats_an_earlier_one_word_for_word() -> None:
    assert_as_searched([[1, 2, 3, 4, 5], [1, 2, 3]], built([[1, 2, 3, 4, 5], [1, 2, 3]]))


def test_no_match_crosses_a_boundary() -> None:
    assert match_length(built([[1, 2], [3, 4], [1, 2]])) == 0
    assert built([[1, 2], [3, 4], [9, 2, 3]]).continuation(4)[0].tolist() == [4]
    assert match_length(built([[1, 2, 3, 4], [9, 2, 3]])) == 2


def test_nothing_matches_in_a_new_or_unrepetitive_text() -> None:
    for automaton in (SuffixAutomaton(), built([[1, 2, 3]])):
        assert match_length(automaton) == 0
        assert [len(part) for part in automaton.continuation(5)] == [0, 0]


def test_a_cycle_is_continued_beyond_what_was_seen() -> None:
    tokens, raw = built([[1, 2, 3, 1, 2]]).continuation(8)
    assert tokens.tolist() == [3, 1, 2, 3, 1, 2, 3, 1]
    assert ((raw > 0) & (raw < 1)).all()


def test_of_equally_frequent_continuations_the_newest_comes_first() -> None:
    assert built([[1, 7, 5, 1, 8, 6, 1]]).continuation(1)[0].tolist() == [8]


def test_confidence_grows_with_the_match_and_the_counts() -> None:
    def confidence(text: list[int]) -> float:
        return float(built([text]).continuation(1)[1][0])

    once, longer, twice = [1, 2, 9, 1], [0, 1, 2, 9, 0, 1], [1, 2, 9, 1, 2, 8, 1]
    divided = [1, 2, 9, 1, 3, 8, 1]
    assert confidence(divided) < confidence(once) < min(confidence(longer), confidence(twice))


@pytest.mark.parametrize("piece", [1, 7, 4096])
def test_growth_in_any_pieces_gives_the_same_automaton(piece: int) -> None:
    text = np.random.default_rng(0).integers(0, 50, 3000).tolist()
    whole, grown = built([text], 5000), built([text], piece)
    assert match_length(whole) == match_length(grown)
    for one, other in zip(whole.continuation(50), grown.continuation(50), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("period", [1, 2, 100])
def test_a_long_repetitive_text_is_continued_with_certainty(period: int) -> None:
    automaton = built([list(range(period)) * (20_000 // period)])
    tokens, raw = automaton.continuation(200)
    assert tokens.tolist() == (list(range(period)) * 200)[:200]
    assert raw[0] > 0.99


@pytest.mark.parametrize("wrong", [-1, 2**31])
def test_a_token_id_out_of_range_is_refused_before_anything_changes(wrong: int) -> None:
    automaton = built([[1, 2, 1]])
    with pytest.raises(ValueError, match="token ids"):
        automaton.extend([2, wrong])
    assert len(automaton) == 3
    assert automaton.continuation(1)[0].tolist() == [2]


def test_the_largest_token_id() -> None:
    largest = 2**31 - 1
    assert built([[largest, 1, largest]]).continuation(1)[0].tolist() == [1]
