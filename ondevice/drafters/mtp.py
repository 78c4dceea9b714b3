"""The model's own multi-token-prediction drafter (Gemma4AssistantForCausalLM), run step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from ondevice.decoding.sampling import Guess
from ondevice.drafters.acceptance import Calibration, PositionAcceptance, Tally
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

    path : the drafted tokens up to this one
    hidden : what the step that proposed it said of the text before it
    survival : the chance that the target takes it
    """

    token: int
    hidden: Floats
    path: list[int]
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
        self._guesses: dict[int, list[Guess]] = {}
        """What was guessed to follow each drafted token, or ROOT, that was looked beyond."""
        self._children: dict[tuple[int, int], int] = {}

    def begin(self, prompt_ids: Sequence[int], session: Session) -> None:
        GREEDY.guess(np.zeros(1, np.float32), None, [], [])  # so that its kernel is loaded before tokens wait for it
        self._session, self._newest = session, None
        self._grows_trees = self._branches > 1 and session.exact_trees
        self._clear()

    def forget(self) -> None:
        self._session, self._newest = None, None
        self._clear()

    def forecast(self, nodes: int) -> Forecast:
        """First children, and beside each the second, whose parent the target must take as well."""
        if not self._grows_trees:
            return Forecast(self._acceptance.survival(nodes), self.name, steady=True)
        survival = self._acceptance.survival_with_siblings(nodes, self._second.rate())
        return Forecast(survival, self.name, steady=True)

    def draft(self, request: DraftRequest) -> Draft:
        """Grow a tree, likeliest token first; a token is looked beyond when what follows is the likeliest to pay."""
        self._clear()
        if self._newest is None or self._session is None:
            return Draft.empty()
        branches = self._branching(request)
        expected = self._acceptance.conditional(request.nodes).tolist()
        nodes = {ROOT: Node(self._newest, self._hidden, [], 1.0)}
        tokens: list[int] = []
        parents: list[int] = []
        confidence: list[float] = []
        # A token that may be added, with its chance given its parent, or None and a token to look beyond.
        frontier: list[tuple[float, int, tuple[int, float] | None, int]] = [(-1.0, 0, None, ROOT)]
        entries = 0
        while frontier and len(tokens) < request.nodes:
            negative, _, added, index = heappop(frontier)
            if -negative < request.floor:
                break
            node, entries = nodes[index], entries + branches
            if added is None:
                hidden, guesses = self._beyond(self._session, node, request, branches)
                self._guesses[index] = guesses
                for rank, guess in enumerate(guesses):
                    chance = self._calibrations[rank > 0].probability(guess.share)
                    heappush(frontier, (-node.survival * chance, entries + rank, (guess.token, chance), index))
                nodes[index] = Node(node.token, hidden, node.path, node.survival)
            else:
                token, chance = added
                new = len(tokens)
                nodes[new] = Node(token, node.hidden, [*node.path, token], -negative)
                self._children[index, token] = new
                tokens.append(token)
                parents.append(index)
                confidence.append(chance)
                heappush(frontier, (negative * expected[len(node.path)], entries, None, new))
        return Draft(
            np.array(tokens, np.int64), np.array(parents, np.int64), np.array(confidence, np.float32), None, self.name
        )

    def observe(self, emitted: Sequence[int], outputs: Outputs, path: Sequence[int]) -> None:
        if self._guesses:
            self._learn(emitted)
            self._clear()
        else:
            self._acceptance.pass_by(len(emitted))
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

    def _beyond(self, session: Session, node: Node, request: DraftRequest, most: int) -> tuple[Floats, list[Guess]]:
        """One step: the next hidden state, and what may follow; nothing, where it makes no sense: a damaged drafter may
        cost speed, never a reply.
        """
        step = session.draft_step(node.token, node.hidden)
        guesses = request.sampler.guess(step.logits, step.candidates, request.context, node.path, most)
        sound = all(0 <= guess.token < self._vocab_size for guess in guesses)
        return step.hidden.copy(), guesses if sound else []

    def _learn(self, emitted: Sequence[int]) -> None:
        """From what was guessed along the target's path, drafted or not."""
        index, first, judged, hits = ROOT, True, 0, 0
        for token in emitted:
            guesses = self._guesses.get(index)
            if not guesses:
                break
            for rank, guess in enumerate(guesses):
                self._calibrations[rank > 0].observe(guess.share, guess.token == token)
            if len(guesses) > 1:
                self._second.fade(KEEP)
                self._second.add(guesses[1].token == token)
            if first:
                judged += 1
                first = guesses[0].token == token
                hits += first
            if (index, token) not in self._children:
                break
            index = self._children[index, token]
        self._acceptance.observe(judged, hits)

    def _clear(self) -> None:
        self._guesses, self._children = {}, {}
