"""Drafts that are trees: a tree that grows token by token, and what the drafters that grow one have in common."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ondevice.engines.protocol import Outputs, Session
from ondevice.generate.drafters.acceptance import Calibration, PositionAcceptance, Tally
from ondevice.generate.drafters.protocol import ROOT, Draft
from ondevice.generate.sampling import Guess

SIBLING_WEIGHT = 3.0
"""Weight of the prior probability of a further child in events: after a dozen rounds in which the target did not take
the second child, its probability falls from 0.1 to 0.02."""

KEEP = 0.97
"""Weight of the further children's earlier events after a new one; remembers about 30."""


class TreeDrafter:
    """Learns from trees of guesses, which grow from the hidden state of the last verified token.

    Subclasses make the draft and the forecast. In `draft` they set `_tree`, whose guesses are then judged.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        branches: int,
        siblings: Sequence[float],
        *,
        positions: int = 1,
        start: float = 0.7,
    ) -> None:
        """
        Args:
            hidden_size: size of the target's hidden states.
            vocab_size: number of token ids.
            branches: children of a token at most; 1 drafts chains.
            siblings: prior probability that the target takes the second child, the third, and so on.
            positions: number of positions whose guesses are calibrated apart; the last one counts for all later ones.
            start: prior probability that the target takes the first child.
        """
        self._vocab_size = vocab_size
        self._branches = branches
        self._grows_trees = False
        self._session: Session | None = None
        self._acceptance = PositionAcceptance(start)
        self._siblings = [Tally(SIBLING_WEIGHT * chance, SIBLING_WEIGHT) for chance in siblings]
        self._calibrations = [(Calibration(), Calibration()) for _ in range(positions)]
        """By position, calibration of first children, and of their siblings."""
        self._newest: int | None = None
        """The last verified token of this generation, whose hidden state is `_hidden`."""
        self._hidden = np.zeros(hidden_size, np.float32)
        self._tree: GuessedTree | None = None
        """The last draft, until its verdict is observed."""

    def begin(self, prompt_ids: Sequence[int], session: Session) -> None:
        self._session, self._newest, self._tree = session, None, None
        self._grows_trees = self._branches > 1 and session.exact_trees

    def forget(self) -> None:
        self._session, self._newest, self._tree = None, None, None

    def observe(self, emitted: Sequence[int], outputs: Outputs, path: Sequence[int]) -> None:
        if self._tree is None:
            self._acceptance.pass_by(len(emitted))
        else:
            self._learn(self._tree, emitted)
            self._tree = None
        self._newest = emitted[-1]
        self._hidden[:] = outputs.hidden[path[-1]]

    def _learn(self, tree: GuessedTree, emitted: Sequence[int]) -> None:
        """Learn from the guesses along the target's path, drafted or not."""
        firsts = []
        for position, (guesses, token) in enumerate(tree.judged(emitted)):
            calibrations = self._calibrations[min(position, len(self._calibrations) - 1)]
            for rank, guess in enumerate(guesses):
                calibrations[rank > 0].observe(guess.share, guess.token == token)
                if 0 < rank <= len(self._siblings):
                    self._siblings[rank - 1].fade(KEEP)
                    self._siblings[rank - 1].add(guess.token == token)
            firsts.append(guesses[0].token == token)
        self._acceptance.observe_places(firsts)

    def _valid(self, guesses: list[Guess]) -> list[Guess]:
        """The guesses; none if they are not valid tokens: a damaged model may cost speed, but no reply."""
        return guesses if all(0 <= guess.token < self._vocab_size for guess in guesses) else []


class GuessedTree:
    """A draft that grows token by token, and the guesses for what follows each of its tokens, drafted or not. A drafter
    learns its acceptance from both: see `judged`.

    Attributes:
        tokens, parents, confidence: as in a `Draft`.
        guesses: by drafted token, or ROOT, the guesses for what follows it, where they were made.
        paths: by drafted token, the drafted tokens up to it, itself included.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.confidence: list[float] = []
        self.guesses: dict[int, list[Guess]] = {}
        self.paths: dict[int, list[int]] = {ROOT: []}
        self._children: dict[tuple[int, int], int] = {}

    def add(self, parent: int, token: int, chance: float) -> int:
        """Add a token below `parent`, with its probability given that one; returns its index in the draft."""
        new = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self.confidence.append(chance)
        self.paths[new] = [*self.paths[parent], token]
        self._children[parent, token] = new
        return new

    def draft(self, source: str) -> Draft:
        """The tokens added so far, as a draft."""
        return Draft(
            np.array(self.tokens, np.int64),
            np.array(self.parents, np.int64),
            np.array(self.confidence, np.float32),
            None,
            source,
        )

    def judged(self, emitted: Sequence[int]) -> Iterator[tuple[list[Guess], int]]:
        """Compare the guesses with the target's verdict: along the path of the emitted tokens, the guesses for each
        position and the token that the target chose there. Ends at the first position without guesses.
        """
        node = ROOT
        for token in emitted:
            if not (guesses := self.guesses.get(node)):
                return
            yield guesses, token
            if (node, token) not in self._children:
                return
            node = self._children[node, token]
