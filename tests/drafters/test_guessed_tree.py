"""A growing draft, and how far its guesses can be judged by what the target took."""

import pytest

from ondevice.engines.protocol import ROOT
from ondevice.generate.drafters.trees import GuessedTree
from ondevice.generate.sampling.sampler import Guess


def grown() -> GuessedTree:
    """7 or 8; after 7 a 9, after which nothing was guessed."""
    tree = GuessedTree()
    tree.guesses[ROOT] = [Guess(7, 0.6), Guess(8, 0.3)]
    first, second = tree.add(ROOT, 7, 0.6), tree.add(ROOT, 8, 0.3)
    tree.guesses[first] = [Guess(9, 0.5), Guess(4, 0.1)]
    tree.add(first, 9, 0.5)
    assert tree.paths[second] == [8]
    return tree


def test_a_draft_is_what_was_added() -> None:
    draft = grown().draft("mtp")
    assert draft.tokens.tolist() == [7, 8, 9]
    assert draft.parents.tolist() == [ROOT, ROOT, 0]
    assert draft.confidence.tolist() == pytest.approx([0.6, 0.3, 0.5])
    assert draft.source == "mtp"


def test_guesses_are_judged_along_the_targets_path() -> None:
    def judged(*emitted: int) -> list[tuple[list[int], int]]:
        return [([guess.token for guess in guesses], token) for guesses, token in grown().judged(emitted)]

    assert judged(7, 9, 5) == [([7, 8], 7), ([9, 4], 9)]
    assert judged(7, 4, 5) == [([7, 8], 7), ([9, 4], 4)]  # guessed and not drafted
    assert judged(8, 1) == [([7, 8], 8)]  # nobody looked beyond 8
    assert judged(5, 9) == [([7, 8], 5)]
