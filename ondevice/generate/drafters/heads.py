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
from ondevice.engines.protocol import Proposals
from ondevice.generate.drafters.acceptance import PositionAcceptance
from ondevice.generate.drafters.protocol import Draft, DraftRequest, Forecast
from ondevice.generate.drafters.trees import GuessedTree, TreeDrafter
from ondevice.generate.sampling.sampler import Guess

SIBLING = (0.1, 0.06, 0.05)
"""Prior probabilities of a second, third and further child. With the reference pair's heads the target's likeliest
token is that one at 0.10, 0.06 and 0.05 of all first positions (models/reference/heads/README.md)."""

BRANCHES = {"medusa": 8, "blockwise": 1}
"""Children that a token of a draft may have, by kind of heads. The paper's static tree of Medusa has up to ten, for 64
nodes. On the reference pair 8 drafted tokens gave 1.54 and 1.38 tokens per round at temperature 0 and 1 with 4
children, and 1.59 and 1.42 with 8."""

START = 0.3
"""Prior probability of a first child. It is low because heads know none of the tokens after their hidden state."""


class HeadsDrafter(TreeDrafter):
    """Grows a tree, or a chain, from the heads' proposals, likeliest token first.

    The tree of Medusa's paper is fixed: 64 nodes, chosen once by how often each was right. Here a token's probability
    is learnt from how often tokens with its share of the proposals were right, and the tree is as large as rows pay on
    this machine, mostly five to eight nodes. The proposals for a position do not depend on the token before it, so one
    run of the heads, and one guess for each position, serve the whole tree.

    The heads read the hidden state of the last verified row, which is an output of the round's forward. So a draft
    needs no other forward than the verification of the previous one (blockwise parallel decoding's merged rounds).

    Acceptance is exact, by the target's own draw, with whose noise proposals are drawn. The papers' looser rules (a
    threshold on probabilities, among the best few, within a distance) change the text.
    """

    def __init__(self, heads: HeadsEntry, target: Target, branches: int | None = None) -> None:
        """
        Args:
            heads: the bundle's heads; their kind is the drafter's name.
            target: the target of the bundle.
            branches: children of a token at most; 1 drafts chains; None takes that of `BRANCHES`.
        """
        branches = BRANCHES[heads.kind] if branches is None else branches
        siblings = (*SIBLING, *SIBLING[-1:] * branches)[: branches - 1]
        acceptance = PositionAcceptance(START)
        super().__init__(target.vocab_size, branches, siblings, positions=heads.offsets, acceptance=acceptance)
        self.name: str = heads.kind
        self._positions = heads.offsets

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
        """Grow a tree from one run of the heads."""
        if self._newest is None or self._session is None or not request.nodes:
            return Draft.empty()
        proposals = self._session.propose(self.name, self._hidden)
        branches = self._branches if request.trees else 1
        known: dict[int, list[Guess]] = {}

        def guess(tree: GuessedTree, node: int) -> list[Guess]:
            return self._guesses(proposals, request, tree.paths[node], branches, known)

        return self._grow(request, guess, step_runs=False).draft(self.name)

    def _guesses(
        self,
        proposals: Proposals,
        request: DraftRequest,
        path: Sequence[int],
        branches: int,
        known: dict[int, list[Guess]],
    ) -> list[Guess]:
        """The guesses after a path; none after the last position. `known` keeps them by position: they are the same
        after every token unless the sampler reads the text.
        """
        position = len(path)
        if position == self._positions:
            return []
        if request.sampler.reads_text or position not in known:
            candidates, logits = proposals.candidates[position], proposals.logits[position]
            known[position] = self._valid(request.sampler.guess(logits, candidates, request.context, path, branches))
        return known[position]
