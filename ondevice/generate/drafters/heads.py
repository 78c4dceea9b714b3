"""Heads drafters: `medusa` and `blockwise`, whose heads propose the next few tokens at once from one hidden state.

Medusa (arXiv 2401.10774) has a head for each of the next few tokens and verifies a tree of their proposals. Blockwise
parallel decoding (Stern et al., NeurIPS 2018) makes k proposals from one shared layer and verifies a chain. Both are a
`HeadsDrafter`.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np

from ondevice.bundle_format.model_config import HeadsEntry, Target
from ondevice.engines.protocol import Outputs, Proposals, Session
from ondevice.generate.drafters.acceptance import Calibration, PositionAcceptance, Tally
from ondevice.generate.drafters.protocol import ROOT, Draft, DraftRequest, Forecast, GuessedTree
from ondevice.generate.sampling import Guess

SIBLING = (0.1, 0.06, 0.05)
"""Prior probabilities of a second, third and further child. With the reference pair's heads the target's likeliest
token is that one at 0.10, 0.06 and 0.05 of all first positions (models/reference/heads/README.md)."""

SIBLING_WEIGHT = 3.0
"""Weight of each of these priors in events."""

KEEP = 0.97
"""Weight of the siblings' earlier events after a new one; remembers about 30."""

START = 0.3
"""Prior probability of a first child. It is low because heads know none of the tokens after their hidden state."""


class HeadsDrafter:
    """Grows a tree, or a chain, from the heads' proposals, likeliest token first.

    The tree of Medusa's paper is fixed: 64 nodes, chosen once by how often each was right. Here a token's probability
    is learnt from how often tokens with its share of the proposals were right, and the tree is as large as rows pay on
    this machine, mostly five to eight nodes. The proposals for a position do not depend on the token before it, so one
    run of the heads, and one guess for each position, serve the whole tree.

    The heads read the hidden state of the last verified row, which is an output of the round's forward. So a draft
    needs no other forward than the verification of the previous one (blockwise parallel decoding's merged rounds).
    """

    def __init__(self, heads: HeadsEntry, target: Target, branches: int) -> None:
        """
        Args:
            heads: the bundle's heads; their kind is the drafter's name.
            target: the target of the bundle.
            branches: children of a token at most; 1 drafts chains.
        """
        self.name: str = heads.kind
        self._positions = heads.offsets
        self._vocab_size = target.vocab_size
        self._branches = branches
        self._grows_trees = False
        self._session: Session | None = None
        self._acceptance = PositionAcceptance(START)
        self._siblings = [
            Tally(SIBLING_WEIGHT * chance, SIBLING_WEIGHT)
            for chance in (*SIBLING, *SIBLING[-1:] * branches)[: branches - 1]
        ]
        self._calibrations = [(Calibration(), Calibration()) for _ in range(self._positions)]
        """By position, calibration of first children, and of their siblings."""
        self._has_hidden = False
        """Whether `_hidden` is the state of the last verified row of this generation."""
        self._hidden = np.zeros(target.hidden_size, np.float32)
        self._tree: GuessedTree | None = None
        """The last draft, until its verdict is observed."""

    def begin(self, prompt_ids: Sequence[int], session: Session) -> None:
        self._session, self._has_hidden = session, False
        self._grows_trees = self._branches > 1 and session.exact_trees
        self._tree = None

    def forget(self) -> None:
        self._session, self._has_hidden, self._tree = None, False, None

    def forecast(self, nodes: int) -> Forecast:
        """The likeliest nodes of the tree of first, second and further children, by how often each was right."""
        if not self._grows_trees:
            return Forecast(self._acceptance.survival(min(nodes, self._positions)), self.name)
        firsts = self._acceptance.conditional(self._positions).tolist()
        seconds = [tally.rate() for tally in self._siblings]
        survival: list[float] = []
        frontier = [(-firsts[0], 1.0, 0, 0)]  # -survival, survival of the parent, position, rank among siblings
        while frontier and len(survival) < nodes:
            negative, parent, position, rank = heappop(frontier)
            survival.append(-negative)
            if rank < len(seconds):
                heappush(frontier, (max(negative, -parent * seconds[rank]), parent, position, rank + 1))
            if position + 1 < self._positions:
                heappush(frontier, (negative * firsts[position + 1], -negative, position + 1, 0))
        return Forecast(np.array(survival, np.float32), self.name)

    def draft(self, request: DraftRequest) -> Draft:
        self._tree = None
        if not self._has_hidden or self._session is None or not request.nodes:
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
        self._has_hidden = True
        self._hidden[:] = outputs.hidden[path[-1]]

    def _learn(self, tree: GuessedTree, emitted: Sequence[int]) -> None:
        """Learn from the guesses along the target's path, drafted or not."""
        firsts = []
        for position, (guesses, token) in enumerate(tree.judged(emitted)):
            for rank, guess in enumerate(guesses):
                self._calibrations[position][rank > 0].observe(guess.share, guess.token == token)
                if rank:
                    self._siblings[rank - 1].fade(KEEP)
                    self._siblings[rank - 1].add(guess.token == token)
            firsts.append(guesses[0].token == token)
        self._acceptance.observe_places(firsts)


class _ProposedTree(GuessedTree):
    """A tree that grows from the proposals for all positions, likeliest token first."""

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
        self._by_position: list[list[Guess]] = []
        """Guesses by position, which are the same after every token unless the sampler reads the text."""
        self._frontier: list[tuple[float, int, Guess, float, int]] = []
        """A heap of tokens that may be added: -survival, a unique number, the guess, its probability given its parent,
        and the parent."""

    def grow(self) -> None:
        """Add tokens until there are `request.nodes`, or the survival of the likeliest is below the floor."""
        request = self._request
        self._expand(ROOT, 1.0)
        while self._frontier and len(self.tokens) < request.nodes:
            negative, _, guess, chance, parent = heappop(self._frontier)
            if not request.pays_row(len(self.tokens), -negative):
                break
            self._expand(self.add(parent, guess.token, chance), -negative)

    def _expand(self, node: int, survival: float) -> None:
        """Add the guesses for what follows a node to the frontier; there are none after the last position."""
        path = self.paths[node]
        position = len(path)
        if position == len(self._calibrations):
            return
        if position == len(self._by_position):
            self._by_position.append(self._guess(path))
        guesses = self._guess(path) if self._request.sampler.reads_text else self._by_position[position]
        self.guesses[node] = guesses
        for rank, guess in enumerate(guesses):
            chance = self._calibrations[position][rank > 0].probability(guess.share)
            heappush(
                self._frontier, (-survival * chance, len(self.guesses) * self._branches + rank, guess, chance, node)
            )

    def _guess(self, path: list[int]) -> list[Guess]:
        """The guesses after a path. Empty where they are not valid tokens: damaged heads may cost speed, no reply."""
        candidates, logits = self._proposals.candidates[len(path)], self._proposals.logits[len(path)]
        request = self._request
        found = request.sampler.guess(logits, candidates, request.context, path, self._branches)
        return found if all(0 <= guess.token < self._vocab_size for guess in found) else []


BRANCHES = 8
"""Children that a token of a Medusa draft may have. The paper's static tree has up to ten, for 64 nodes. On the
reference pair 8 drafted tokens gave 1.54 and 1.38 tokens per round at temperature 0 and 1 with 4 children, and 1.59
and 1.42 with 8."""


class MedusaDrafter(HeadsDrafter):
    """Medusa heads. The paper accepts by a threshold on probabilities, which changes the text. Here the target's own
    draw decides, and proposals are drawn with its noise.
    """

    def __init__(self, heads: HeadsEntry, target: Target, branches: int = BRANCHES) -> None:
        super().__init__(heads, target, branches)


class BlockwiseDrafter(HeadsDrafter):
    """Blockwise heads. Acceptance is exact: the paper's looser rules, among the best few or within a distance, change
    the text. The paper's first head is the model itself, and the forward that verifies a block computes the hidden
    state that the next block is made from.
    """

    def __init__(self, heads: HeadsEntry, target: Target) -> None:
        super().__init__(heads, target, branches=1)
