"""The MTP drafter: the model's own multi-token-prediction drafter (Gemma4AssistantForCausalLM), one step per token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from ondevice.arrays import Float32Array
from ondevice.engines.protocol import Outputs, Session
from ondevice.generate.drafters.acceptance import Calibration, PositionAcceptance, Tally
from ondevice.generate.drafters.protocol import ROOT, Draft, DraftRequest, Forecast, GuessedTree
from ondevice.generate.sampling import Guess

BRANCHES = 3
"""Children that a token of a draft may have. On the reference pair at temperature 1 a token at depth 1 is accepted in
0.70 of the rounds, with chains in 0.52 (`benchmarks/coupling.py`)."""

SIBLING = 0.1
"""Prior probability that the target takes the second child. On the reference pair it is 0.18 at temperature 1, 0.12 at
0.7, and 0.01 at 0 (`benchmarks/coupling.py`: acceptance at depth 1 of a tree less that of a chain)."""

SIBLING_WEIGHT = 3.0
"""Weight of the prior in events: after a dozen rounds without a second child the probability is 0.02."""

MIN_SIBLING_SHARE = 0.5
"""Siblings are guessed only where the probability of a second child is at least this share of the request's floor, the
survival at which a row just pays. Below, hardly any is worth its row: at temperature 0 siblings took time on the
reference pair, and gained nothing."""

SIBLING_INTERVAL = 8
"""Every so many drafts siblings are guessed in any case, so that their probability follows the text."""

KEEP = 0.97
"""Weight of the second children's earlier events after a new one; remembers about 30."""


class MtpDrafter:
    """Drafts trees from the hidden state of the last verified token, drawing with the target's noise (`Sampler.guess`).

    Every step of a round attends to the same verified KV at the same position (`Session.draft_step`), so a draft
    depends only on the verified tokens and the noise of its positions: after a rejection it equals the draft of a fresh
    prefill. The matching rule keeps it lossless under sampling too, which transformers' ratio test of an argmax draft
    with the drafter's raw softmax is not.
    """

    name = "mtp"

    def __init__(self, hidden_size: int, vocab_size: int, branches: int = BRANCHES) -> None:
        """
        Args:
            hidden_size: size of the target's hidden states.
            vocab_size: number of token ids.
            branches: children of a token at most; 1 drafts chains.
        """
        self._vocab_size = vocab_size
        self._branches = branches
        self._grows_trees = False
        self._session: Session | None = None
        self._acceptance = PositionAcceptance()
        self._second = Tally(SIBLING_WEIGHT * SIBLING, SIBLING_WEIGHT)
        self._without_siblings = 0
        """Drafts since siblings were last guessed."""
        self._calibrations = Calibration(), Calibration()
        """Calibration of first children, and of their siblings."""
        self._newest: int | None = None
        self._hidden = np.zeros(hidden_size, np.float32)
        self._tree: GuessedTree | None = None
        """The last draft, until its verdict is observed."""

    def begin(self, prompt_ids: Sequence[int], session: Session) -> None:
        self._session, self._newest = session, None
        self._grows_trees = self._branches > 1 and session.exact_trees
        self._tree = None

    def forget(self) -> None:
        self._session, self._newest, self._tree = None, None, None

    def forecast(self, nodes: int) -> Forecast:
        """The chain of first children, and a second child next to each of them."""
        if not self._grows_trees:
            return Forecast(self._acceptance.survival(nodes), self.name)
        survival = self._acceptance.survival_with_siblings(nodes, self._second.rate())
        return Forecast(survival, self.name)

    def draft(self, request: DraftRequest) -> Draft:
        """Grow a tree, likeliest token first. A step is run from a token when its child is the likeliest to be next."""
        self._tree = None
        if self._newest is None or self._session is None or not request.nodes:
            return Draft.empty()
        self._tree = tree = GuessedTree()
        branches = self._branching(request)
        expected = self._acceptance.conditional(request.nodes).tolist()
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
                    chance = self._calibrations[rank > 0].probability(guess.share)
                    heappush(frontier, (-node.survival * chance, entries + rank, (guess.token, chance), index))
                nodes[index] = Node(node.token, hidden, node.survival)
            else:
                if not request.pays_row(len(tree.tokens), -negative):
                    break
                new = tree.add(index, *added)
                nodes[new] = Node(added[0], node.hidden, -negative)
                heappush(frontier, (negative * expected[len(tree.paths[index])], entries, None, new))
        return tree.draft(self.name)

    def observe(self, emitted: Sequence[int], outputs: Outputs, path: Sequence[int]) -> None:
        if self._tree is None:
            self._acceptance.pass_by(len(emitted))
        else:
            self._learn(self._tree, emitted)
            self._tree = None
        self._newest = emitted[-1]
        self._hidden[:] = outputs.hidden[path[-1]]

    def _branching(self, request: DraftRequest) -> int:
        """Children that a token of this draft may have."""
        if not (self._grows_trees and request.trees):
            return 1
        self._without_siblings += 1
        if self._second.rate() < MIN_SIBLING_SHARE * request.row_floor(0) and self._without_siblings < SIBLING_INTERVAL:
            return 1
        self._without_siblings = 0
        return self._branches

    def _step(
        self, session: Session, node: Node, path: Sequence[int], request: DraftRequest, most: int
    ) -> tuple[Float32Array, list[Guess]]:
        """Run one step from a node: the next hidden state, and the guesses for what follows. No guesses where they are
        not valid tokens: a damaged drafter may cost speed, but no reply.
        """
        step = session.draft_step(node.token, node.hidden)
        guesses = request.sampler.guess(step.logits, step.candidates, request.context, path, most)
        valid = all(0 <= guess.token < self._vocab_size for guess in guesses)
        return step.hidden.copy(), guesses if valid else []

    def _learn(self, tree: GuessedTree, emitted: Sequence[int]) -> None:
        """Learn from the guesses along the target's path, drafted or not."""
        firsts = []
        for guesses, token in tree.judged(emitted):
            for rank, guess in enumerate(guesses):
                self._calibrations[rank > 0].observe(guess.share, guess.token == token)
            if len(guesses) > 1:
                self._second.fade(KEEP)
                self._second.add(guesses[1].token == token)
            firsts.append(guesses[0].token == token)
        self._acceptance.observe_places(firsts)


@dataclass(frozen=True)
class Node:
    """A drafted token, or the newest one, from which the tree may grow.

    hidden : float32[H], input of the step from this token: the hidden state from the step that proposed it
    survival : probability that the target accepts it and all before it
    """

    token: int
    hidden: Float32Array
    survival: float
