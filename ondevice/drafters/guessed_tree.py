"""A draft that grows token by token, and what was guessed to follow each of its tokens, drafted or not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ondevice.decoding.sampling import Guess
from ondevice.drafters.protocol import ROOT, Draft


class GuessedTree:
    """
    Attributes:
        tokens, parents, confidence: as in a `Draft`.
        guesses: what was guessed to follow each drafted token, or ROOT, that was looked beyond.
        paths: the drafted tokens up to each one, itself included.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.confidence: list[float] = []
        self.guesses: dict[int, list[Guess]] = {}
        self.paths: dict[int, list[int]] = {ROOT: []}
        self._children: dict[tuple[int, int], int] = {}

    def add(self, parent: int, token: int, chance: float) -> int:
        """Draft a token behind another, with its chance given that one; returns its number."""
        new = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self.confidence.append(chance)
        self.paths[new] = [*self.paths[parent], token]
        self._children[parent, token] = new
        return new

    def draft(self, source: str) -> Draft:
        """As it is now."""
        return Draft(
            np.array(self.tokens, np.int64),
            np.array(self.parents, np.int64),
            np.array(self.confidence, np.float32),
            None,
            source,
        )

    def judged(self, emitted: Sequence[int]) -> Iterator[tuple[list[Guess], int]]:
        """Along the target's path: what was guessed for a place, and the token there, as far as anything was."""
        node = ROOT
        for token in emitted:
            if not (guesses := self.guesses.get(node)):
                return
            yield guesses, token
            if (node, token) not in self._children:
                return
            node = self._children[node, token]
