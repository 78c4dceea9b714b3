"""Drafts that grow token by token: how one grows while it pays, and what is learnt from the target's verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush

import numpy as np

from ondevice.engines.protocol import Outputs, Session
from ondevice.generate.drafters.acceptance import Calibration, PositionAcceptance, Tally
from ondevice.generate.drafters.protocol import ROOT, Draft, DraftRequest
from ondevice.generate.sampling.sampler import Guess

SIBLING_WEIGHT = 3.0
"""Weight of the prior probability of a further child in events: after a dozen rounds in which the target did not take
the second child, its probability falls from 0.1 to 0.02."""

KEEP = 0.97
"""Weight of the further children's earlier events after a new one; remembers about 30."""


class TreeDrafter:
    """Grows a draft guess by guess, and learns from the target's verdict on each. A chain is a tree of one branch.

    Subclasses make the forecast, and in `draft` call `_grow` with a function that guesses what follows a node.
    """

    def __init__(
        self,
        vocab_size: int,
        branches: int = 1,
        siblings: Sequence[float] = (),
        *,
        positions: int = 1,
        acceptance: PositionAcceptance | None = None,
    ) -> None:
        """
        Args:
            vocab_size: number of token ids.
            branches: children of a token at most; 1 drafts chains.
            siblings: prior probability that the target takes the second child, the third, and so on.
            positions: number of positions whose guesses are calibrated apart; the last one counts for all later ones.
            acceptance: of first children, by position; its prior by default.
        """
        self._vocab_size = vocab_size
        self._branches = branches
        self._grows_trees = False
        self._session: Session | None = None
        self._acceptance = acceptance or PositionAcceptance()
        self._siblings = [Tally(SIBLING_WEIGHT * chance, SIBLING_WEIGHT) for chance in siblings]
        self._calibrations = [(Calibration(), Calibration()) for _ in range(positions)]
        """By position, calibration of first children, and of their siblings."""
        self._newest: int | None = None
        """The last verified token of this generation, chosen from the row whose hidden state is `_hidden`."""
        self._hidden = np.zeros(0, np.float32)
        self._tree: GuessedTree | None = None
        """The last draft, until its verdict is observed."""
        self._learnt = 0
        """Tokens that are still to be observed, of drafts whose verdicts are known."""

    def begin(self, prompt_ids: Sequence[int], session: Session) -> None:
        self._session, self._newest, self._tree, self._learnt = session, None, None, 0
        self._grows_trees = self._branches > 1 and session.exact_trees

    def forget(self) -> None:
        self._session, self._newest, self._tree = None, None, None

    def observe(self, emitted: Sequence[int], outputs: Outputs, path: Sequence[int]) -> None:
        self._judge(emitted)
        self._newest = emitted[-1]
        self._hidden = outputs.hidden[path[-1]].copy()

    def _grow(
        self, request: DraftRequest, guess: Guesser, *, step_runs: bool, one_per_depth: bool = False
    ) -> GuessedTree:
        """Grow a draft, likeliest token first, until it has `request.nodes` tokens or the next does not pay its row.

        Args:
            guess: guesses what follows a node.
            step_runs: whether `guess` runs a draft step. Then it is called when the expected first child of a node is
                the likeliest token to be next, and the draft ends where the step does not pay. Otherwise it is called
                as soon as the node is added.
            one_per_depth: whether `guess` is called for one node of each depth at most, the likeliest: its steps leave
                something after that the steps of later depths read.
        """
        self._tree = tree = GuessedTree()
        expected = self._acceptance.conditional(request.nodes + 1).tolist()
        # By falling survival, then by age: a token that may be added below a node, with its probability given the node;
        # or None, for a node whose guesses are still to be made, at the expected survival of its first child.
        frontier: list[tuple[float, int, int, int | None, float]] = []
        age, node, expanded = 0, ROOT, not step_runs or request.pays_step(0, 1.0)
        while True:
            if expanded:
                tree.guesses[node] = guess(tree, node)
                calibrations = self._calibrations[min(len(tree.paths[node]), len(self._calibrations) - 1)]
                for rank, (token, share) in enumerate(tree.guesses[node]):
                    chance = calibrations[rank > 0].probability(share)
                    heappush(frontier, (-tree.survival[node] * chance, age := age + 1, node, token, chance))
            if not frontier or len(tree.tokens) == request.nodes:
                return tree
            negative, _, node, added, chance = heappop(frontier)
            if added is None:
                expanded = not one_per_depth or len(tree.paths[node]) == len(tree.guesses)
                if not expanded:
                    continue
                if not request.pays_step(len(tree.tokens), -negative, len(tree.guesses)):
                    return tree
            else:
                expanded = not step_runs
                if not request.pays_row(len(tree.tokens), -negative):
                    return tree
                node = tree.add(node, added, chance)
                if step_runs:
                    likely = negative * expected[len(tree.paths[node])]
                    heappush(frontier, (likely, age := age + 1, node, None, 0.0))

    def _judge(self, emitted: Sequence[int]) -> int:
        """Learn from the last draft's guesses along the target's path, drafted or not.

        Returns:
            the number of positions, from the first on, at which the first guess was right.
        """
        tree, self._tree = self._tree, None
        firsts: list[bool] = []
        for position, (guesses, token) in enumerate(() if tree is None else tree.judged(emitted)):
            calibrations = self._calibrations[min(position, len(self._calibrations) - 1)]
            for rank, guess in enumerate(guesses):
                calibrations[rank > 0].observe(guess.share, guess.token == token)
                if 0 < rank <= len(self._siblings):
                    self._siblings[rank - 1].add(guess.token == token, KEEP)
            firsts.append(guesses[0].token == token)
        hits = firsts.index(False) if False in firsts else len(firsts)
        self._acceptance.learn(len(firsts), hits, len(emitted) - self._learnt)
        self._learnt = 0
        return hits

    def _valid(self, guesses: list[Guess]) -> list[Guess]:
        """The guesses; none if they are not valid tokens: a damaged model may cost speed, but no reply."""
        return guesses if all(0 <= guess.token < self._vocab_size for guess in guesses) else []


class GuessedTree:
    """A draft that grows token by token, and the guesses for what follows each of its tokens, drafted or not. A drafter
    learns its acceptance from both: see `judged`.

    Attributes:
        tokens, parents, confidence: as in a `Draft`.
        guesses: by drafted token, or ROOT, the guesses for what follows it, where they were made.
        paths, survival: by drafted token, the drafted tokens up to it, itself included, and the probability that the
            target accepts all of them.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.confidence: list[float] = []
        self.guesses: dict[int, list[Guess]] = {}
        self.paths: dict[int, list[int]] = {ROOT: []}
        self.survival: dict[int, float] = {ROOT: 1.0}
        self._children: dict[tuple[int, int], int] = {}

    def add(self, parent: int, token: int, chance: float) -> int:
        """Add a token below `parent`, with its probability given that one; returns its index in the draft."""
        new = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self.confidence.append(chance)
        self.paths[new] = [*self.paths[parent], token]
        self.survival[new] = self.survival[parent] * chance
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


Guesser = Callable[[GuessedTree, int], list[Guess]]
"""Guesses what follows a node of a draft, likeliest first; nothing where it cannot."""
