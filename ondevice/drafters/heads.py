"""Drafts from heads that propose all tokens at once, of one hidden state: what medusa and blockwise have in common."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np

from ondevice.decoding.sampling import Guess
from ondevice.drafters.acceptance import Calibration, PositionAcceptance, Tally
from ondevice.drafters.guessed_tree import GuessedTree
from ondevice.drafters.protocol import GREEDY, ROOT, Draft, DraftRequest, Forecast
from ondevice.engines.protocol import Outputs, Proposals, Session
from ondevice.manifest import HeadsEntry, Target

SIBLING = (0.1, 0.06, 0.05)
"""The chances of a second, third and further child before anything was seen: on the reference pair's heads the target's
likeliest token is that one in 0.10, 0.06 and 0.05 of all first places (models/reference/heads/README.md)."""

SIBLING_WEIGHT = 3.0
"""Events that they are worth."""

KEEP = 0.97
"""Weight of earlier events after a new one: remembers about 30."""

START = 0.3
"""The chance of a first child before anything was seen: heads know none of the tokens behind their state."""


class HeadsDrafter:
    """Grows a tree over the heads' proposals, likeliest token first, or a chain.

    The tree of Medusa's paper is fixed, 64 nodes chosen once by how often each was right. Here a token's chance is
    learnt from what its share of the proposals came to, and the tree is as large as rows pay on this machine: five to
    eight nodes mostly. A place's proposals are the same behind every token, so that one run of the heads, and one guess
    for each place, serve the whole tree.

    The hidden state that they read is that of the last verified row, which the round brought: verification of one draft
    is all that the next one needs (blockwise parallel decoding's merged rounds).
    """

    def __init__(self, heads: HeadsEntry, target: Target, branches: int) -> None:
        """
        Args:
            heads: of the bundle; their kind is the drafter's name.
            target: whose tokens they propose.
            branches: children of a token at most; 1 drafts chains.
        """
        self.name: str = heads.kind
        self._places = heads.offsets
        self._vocab_size = target.vocab_size
        self._branches = branches
        self._grows_trees = False
        self._session: Session | None = None
        self._acceptance = PositionAcceptance(START)
        self._siblings = [
            Tally(SIBLING_WEIGHT * chance, SIBLING_WEIGHT)
            for chance in (*SIBLING, *SIBLING[-1:] * branches)[: branches - 1]
        ]
        self._calibrations = [(Calibration(), Calibration()) for _ in range(self._places)]
        """By place, of first children and of their siblings."""
        self._known = False
        self._hidden = np.zeros(target.hidden_size, np.float32)
        self._tree: GuessedTree | None = None
        """Of the last draft."""

    def begin(self, prompt_ids: Sequence[int], session: Session) -> None:
        GREEDY.guess(np.zeros(1, np.float32), None, [], [])  # so that its kernel is loaded before tokens wait for it
        self._session, self._known = session, False
        self._grows_trees = self._branches > 1 and session.exact_trees
        self._tree = None

    def forget(self) -> None:
        self._session, self._known, self._tree = None, False, None

    def forecast(self, nodes: int) -> Forecast:
        """The likeliest nodes of the tree of first, second and further children, as often as each was right."""
        if not self._grows_trees:
            return Forecast(self._acceptance.survival(min(nodes, self._places)), self.name, steady=True)
        firsts = self._acceptance.conditional(self._places).tolist()
        seconds = [tally.rate() for tally in self._siblings]
        survival: list[float] = []
        frontier = [(-firsts[0], 1.0, 0, 0)]
        while frontier and len(survival) < nodes:
            negative, parent, place, rank = heappop(frontier)
            survival.append(-negative)
            if rank < len(seconds):
                heappush(frontier, (max(negative, -parent * seconds[rank]), parent, place, rank + 1))
            if place + 1 < self._places:
                heappush(frontier, (negative * firsts[place + 1], -negative, place + 1, 0))
        return Forecast(np.array(survival, np.float32), self.name, steady=True)

    def draft(self, request: DraftRequest) -> Draft:
        self._tree = None
        if not self._known or self._session is None or not request.nodes:
            return Draft.empty()
        proposals = self._session.propose(self.name, self._hidden)
        branches = self._branches if self._grows_trees and request.trees else 1
        tree = _ProposedTree(proposals, request, branches, self._vocab_size, self._calibrations)
        tree.grow()
        self._tree = tree
        return tree.draft(self.name)

    def observe(self, emitted: Sequence[int], outputs: Outputs, path: Sequence[int]) -> None:
        if self._tree is None:
            self._acceptance.pass_by(len(emitted))
        else:
            self._learn(self._tree, emitted)
            self._tree = None
        self._known = True
        self._hidden[:] = outputs.hidden[path[-1]]

    def _learn(self, tree: GuessedTree, emitted: Sequence[int]) -> None:
        """From what was guessed along the target's path, drafted or not."""
        firsts = []
        for place, (guesses, token) in enumerate(tree.judged(emitted)):
            for rank, guess in enumerate(guesses):
                self._calibrations[place][rank > 0].observe(guess.share, guess.token == token)
                if rank:
                    self._siblings[rank - 1].fade(KEEP)
                    self._siblings[rank - 1].add(guess.token == token)
            firsts.append(guesses[0].token == token)
        self._acceptance.observe_places(firsts)


class _ProposedTree(GuessedTree):
    """Grown over the proposals of all places, likeliest token first."""

    def __init__(
        self,
        proposals: Proposals,
        request: DraftRequest,
        branches: int,
        vocab_size: int,
        calibrations: Sequence[tuple[Calibration, Calibration]],
    ) -> None:
        super().__init__()
        self._proposals, self._request, self._branches = proposals, request, branches
        self._vocab_size = vocab_size
        self._calibrations = calibrations
        self._at: list[list[Guess]] = []
        """By place: the same behind every token, where a guess does not read the text."""
        self._frontier: list[tuple[float, int, Guess, float, int]] = []
        """A token that may be added: less its survival, a number of its own, its chance given its parent, and that."""

    def grow(self) -> None:
        """Until there are as many nodes as wanted, or the likeliest is too unlikely."""
        request = self._request
        self._look_beyond(ROOT, 1.0)
        while self._frontier and len(self.tokens) < request.nodes:
            negative, _, guess, chance, parent = heappop(self._frontier)
            if -negative < request.floor:
                break
            self._look_beyond(self.add(parent, guess.token, chance), -negative)

    def _look_beyond(self, node: int, survival: float) -> None:
        """Put what may follow a node on the frontier; nothing does behind the last place."""
        path = self.paths[node]
        place = len(path)
        if place == len(self._calibrations):
            return
        if place == len(self._at):
            self._at.append(self._guess(path))
        guesses = self._guess(path) if self._request.sampler.reads_text else self._at[place]
        self.guesses[node] = guesses
        for rank, guess in enumerate(guesses):
            chance = self._calibrations[place][rank > 0].probability(guess.share)
            heappush(
                self._frontier, (-survival * chance, len(self.guesses) * self._branches + rank, guess, chance, node)
            )

    def _guess(self, path: list[int]) -> list[Guess]:
        """What follows; nothing, where the heads are damaged: they may cost speed, never a reply."""
        candidates, logits = self._proposals.candidates[len(path)], self._proposals.logits[len(path)]
        request = self._request
        found = request.sampler.guess(logits, candidates, request.context, path, self._branches)
        return found if all(0 <= guess.token < self._vocab_size for guess in found) else []
