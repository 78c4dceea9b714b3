"""The model's own multi-token-prediction drafter (Gemma4AssistantForCausalLM), run step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from ondevice.decoding.sampling import Guess
from ondevice.drafters.acceptance import Calibration, PositionAcceptance, Tally
from ondevice.drafters.guessed_tree import GuessedTree
from ondevice.drafters.protocol import GREEDY, ROOT, Draft, DraftRequest, Forecast
from ondevice.engines.protocol import Floats, Outputs, Session

BRANCHES = 3
"""Children that a token of a draft may have. On the reference pair at temperature 1 a token at depth 1 is taken in 0.70
of the rounds, where a chain has 0.52 (`benchmarks/coupling.py`)."""

SIBLING = 0.1
"""The chance of a second child before anything was seen: on the reference pair 0.18 at temperature 1, 0.12 at 0.7, 0.01
at 0 (`benchmarks/coupling.py`, what a tree's first depth has more than a chain's)."""

SIBLING_WEIGHT = 3.0
"""Events that it is worth: after a dozen rounds without one the chance is 0.02."""

SELDOM = 0.5
"""Share of what a row costs. Where second children are taken less often than that on average, hardly one is worth its
row, and none are guessed: at temperature 0 siblings took time on the reference pair, and brought nothing.
"""

LOOK = 8
"""Drafts of which one guesses siblings nevertheless, for the average to follow the text."""

KEEP = 0.97
"""Weight of earlier events after a new one: remembers about 30."""


@dataclass(frozen=True)
class Node:
    """A token that may be drafted further.

    hidden : what the step that proposed it said of the text before it
    survival : the chance that the target takes it
    """

    token: int
    hidden: Floats
    survival: float


class MtpDrafter:
    """Drafts from the hidden state of the last verified token, drawing as the target will (`Sampler.guess`).

    Every step of a round attends to the same verified KV at the same position (`Session.draft_step`), so a draft
    depends on nothing but the verified tokens and the noise of its places: after a rejection it equals the draft of a
    fresh prefill. The matching rule keeps it lossless under sampling too, where transformers' ratio test of an argmax
    draft with the drafter's raw softmax does not.
    """

    name = "mtp"

    def __init__(self, hidden_size: int, vocab_size: int, branches: int = BRANCHES) -> None:
        """
        Args:
            hidden_size: of the target's hidden states.
            vocab_size: above every token id.
            branches: children of a token at most; 1 drafts chains.
        """
        self._vocab_size = vocab_size
        self._branches = branches
        self._grows_trees = False
        self._session: Session | None = None
        self._acceptance = PositionAcceptance()
        self._second = Tally(SIBLING_WEIGHT * SIBLING, SIBLING_WEIGHT)
        self._since_look = 0
        """Drafts since one with siblings."""
        self._calibrations = Calibration(), Calibration()
        """Of first children, and of their siblings."""
        self._newest: int | None = None
        self._hidden = np.zeros(hidden_size, np.float32)
        self._tree: GuessedTree | None = None
        """Of the last draft."""

    def begin(self, prompt_ids: Sequence[int], session: Session) -> None:
        GREEDY.guess(np.zeros(1, np.float32), None, [], [])  # so that its kernel is loaded before tokens wait for it
        self._session, self._newest = session, None
        self._grows_trees = self._branches > 1 and session.exact_trees
        self._tree = None

    def forget(self) -> None:
        self._session, self._newest, self._tree = None, None, None

    def forecast(self, nodes: int) -> Forecast:
        """First children, and beside each the second, whose parent the target must take as well."""
        if not self._grows_trees:
            return Forecast(self._acceptance.survival(nodes), self.name, steady=True)
        survival = self._acceptance.survival_with_siblings(nodes, self._second.rate())
        return Forecast(survival, self.name, steady=True)

    def draft(self, request: DraftRequest) -> Draft:
        """Grow a tree, likeliest token first; a token is looked beyond when what follows is the likeliest to pay."""
        self._tree = None
        if self._newest is None or self._session is None or not request.nodes:
            return Draft.empty()
        self._tree = tree = GuessedTree()
        branches = self._branching(request)
        expected = self._acceptance.conditional(request.nodes).tolist()
        nodes = {ROOT: Node(self._newest, self._hidden, 1.0)}
        # A token that may be added, with its chance given its parent, or None and a token to look beyond.
        frontier: list[tuple[float, int, tuple[int, float] | None, int]] = [(-1.0, 0, None, ROOT)]
        entries = 0
        while frontier and len(tree.tokens) < request.nodes:
            negative, _, added, index = heappop(frontier)
            if -negative < request.floor:
                break
            node, entries = nodes[index], entries + branches
            if added is None:
                hidden, guesses = self._beyond(self._session, node, tree.paths[index], request, branches)
                tree.guesses[index] = guesses
                for rank, guess in enumerate(guesses):
                    chance = self._calibrations[rank > 0].probability(guess.share)
                    heappush(frontier, (-node.survival * chance, entries + rank, (guess.token, chance), index))
                nodes[index] = Node(node.token, hidden, node.survival)
            else:
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
        """Children that a token may have in this draft."""
        if not (self._grows_trees and request.trees):
            return 1
        self._since_look += 1
        if self._second.rate() < SELDOM * request.floor and self._since_look < LOOK:
            return 1
        self._since_look = 0
        return self._branches

    def _beyond(
        self, session: Session, node: Node, path: Sequence[int], request: DraftRequest, most: int
    ) -> tuple[Floats, list[Guess]]:
        """One step: the next hidden state, and what may follow; nothing, where it makes no sense: a damaged drafter may
        cost speed, never a reply.
        """
        step = session.draft_step(node.token, node.hidden)
        guesses = request.sampler.guess(step.logits, step.candidates, request.context, path, most)
        sound = all(0 <= guess.token < self._vocab_size for guess in guesses)
        return step.hidden.copy(), guesses if sound else []

    def _learn(self, tree: GuessedTree, emitted: Sequence[int]) -> None:
        """From what was guessed along the target's path, drafted or not."""
        firsts = []
        for guesses, token in tree.judged(emitted):
            for rank, guess in enumerate(guesses):
                self._calibrations[rank > 0].observe(guess.share, guess.token == token)
            if len(guesses) > 1:
                self._second.fade(KEEP)
                self._second.add(guesses[1].token == token)
            firsts.append(guesses[0].token == token)
        self._acceptance.observe_places(firsts)
