"""The MTP drafter: the model's own multi-token-prediction drafter (Gemma4AssistantForCausalLM), one step per token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from ondevice.arrays import Float32Array
from ondevice.engines.protocol import ROOT, Session
from ondevice.generate.drafters.protocol import Draft, DraftRequest, Forecast
from ondevice.generate.drafters.trees import GuessedTree, TreeDrafter
from ondevice.generate.sampling import Guess

BRANCHES = 3
"""Children that a token of a draft may have. On the reference pair at temperature 1 a token at depth 1 is accepted in
0.75 of the rounds, with chains in 0.66 (`benchmarks/coupling.py`)."""

SIBLING = 0.1
"""Prior probability that the target takes the second child. On the reference pair it is 0.09 at temperature 1, and 0.03
at 0.7 and at 0 (`benchmarks/coupling.py`: acceptance at depth 1 of a tree less that of a chain)."""

MIN_SIBLING_SHARE = 0.5
"""Siblings are guessed only where the probability of a second child is at least this share of the request's floor, the
survival at which a row just pays. Below, hardly any is worth its row: at temperature 0 siblings took time on the
reference pair, and gained nothing."""

SIBLING_INTERVAL = 8
"""Every so many drafts siblings are guessed in any case, so that their probability follows the text."""


class MtpDrafter(TreeDrafter):
    """Drafts trees from the hidden state of the last verified token, drawing with the target's noise (`Sampler.guess`).

    Every step of a round attends to the same verified KV at the same position (`Session.draft_step`), so a draft
    depends only on the verified tokens and the noise of its positions: after a rejection it equals the draft of a fresh
    prefill. The matching rule keeps it lossless under sampling too, which transformers' ratio test of an argmax draft
    with the drafter's raw softmax is not. Drawing from sharper distributions, 0.85 of the temperature, gave 2.75 tokens
    per round at temperature 1 instead of 2.81 (`benchmarks/coupling.py`).
    """

    name = "mtp"

    def __init__(self, hidden_size: int, vocab_size: int, branches: int = BRANCHES) -> None:
        """
        Args:
            hidden_size: size of the target's hidden states.
            vocab_size: number of token ids.
            branches: children of a token at most; 1 drafts chains.
        """
        super().__init__(hidden_size, vocab_size, branches, [SIBLING])
        self._without_siblings = 0
        """Drafts since siblings were last guessed."""

    def forecast(self, nodes: int) -> Forecast:
        """The chain of first children, and a second child next to each of them."""
        if not self._grows_trees:
            return Forecast(self._acceptance.survival(nodes), self.name)
        survival = self._acceptance.survival_with_siblings(nodes, self._siblings[0].rate())
        return Forecast(survival, self.name)

    def draft(self, request: DraftRequest) -> Draft:
        """Grow a tree, likeliest token first. A step is run from a token when its child is the likeliest to be next."""
        self._tree = None
        if self._newest is None or self._session is None or not request.nodes:
            return Draft.empty()
        self._tree = tree = GuessedTree()
        branches = self._branching(request)
        calibrations, expected = self._calibrations[0], self._acceptance.conditional(request.nodes).tolist()
        nodes = {ROOT: Node(self._newest, self._hidden, 1.0)}
        # By falling survival: either a guess to add (token and its probability given the parent), or None and a node to
        # run a step from, with the expected survival of its child.
        frontier: list[tuple[float, int, tuple[int, float] | None, int]] = [(-1.0, 0, None, ROOT)]
        entries = 0
        while frontier and len(tree.tokens) < request.nodes:
            negative, _, added, index = heappop(frontier)
            node, entries = nodes[index], entries + branches
            if added is None:
                if not request.pays_step(len(tree.tokens), -negative):
                    break
                hidden, guesses = self._step(self._session, node, tree.paths[index], request, branches)
                tree.guesses[index] = guesses
                for rank, guess in enumerate(guesses):
                    chance = calibrations[rank > 0].probability(guess.share)
                    heappush(frontier, (-node.survival * chance, entries + rank, (guess.token, chance), index))
                nodes[index] = Node(node.token, hidden, node.survival)
            else:
                if not request.pays_row(len(tree.tokens), -negative):
                    break
                new = tree.add(index, *added)
                nodes[new] = Node(added[0], node.hidden, -negative)
                heappush(frontier, (negative * expected[len(tree.paths[index])], entries, None, new))
        return tree.draft(self.name)

    def _branching(self, request: DraftRequest) -> int:
        """Children that a token of this draft may have."""
        if not (self._grows_trees and request.trees):
            return 1
        self._without_siblings += 1
        if (
            self._siblings[0].rate() < MIN_SIBLING_SHARE * request.row_floor(0)
            and self._without_siblings < SIBLING_INTERVAL
        ):
            return 1
        self._without_siblings = 0
        return self._branches

    def _step(
        self, session: Session, node: Node, path: Sequence[int], request: DraftRequest, most: int
    ) -> tuple[Float32Array, list[Guess]]:
        """Run one step from a node: the next hidden state, and the guesses for what follows."""
        step = session.draft_step(node.token, node.hidden)
        guesses = request.sampler.guess(step.logits, step.candidates, request.context, path, most)
        return step.hidden.copy(), self._valid(guesses)


@dataclass(frozen=True)
class Node:
    """A drafted token, or the newest one, from which the tree may grow.

    hidden : float32[H], input of the step from this token: the hidden state from the step that proposed it
    survival : probability that the target accepts it and all before it
    """

    token: int
    hidden: Float32Array
    survival: float
