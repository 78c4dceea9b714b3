"""A drafter that knows the continuation and is right with a given probability."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from ondevice.engines.protocol import Engine, Outputs, Session
from ondevice.generate.drafters.acceptance import PositionAcceptance, Tally
from ondevice.generate.drafters.mtp import SIBLING, MtpDrafter
from ondevice.generate.drafters.protocol import GREEDY, ROOT, Draft, DraftRequest, Forecast
from ondevice.generate.drafters.self_speculative import PartialDrafter
from ondevice.generate.drafters.trees import KEEP, SIBLING_WEIGHT

Luck = NDArray[np.int64]

FIRST, SECOND, NEITHER = range(3)


class SimulatedDrafter:
    """Replays a known continuation, with errors at positions chosen beforehand.

    It has the cost of a real drafter: if the bundle has an MTP drafter, that runs as many steps, and their tokens are
    discarded. And it knows no more than a real one: its forecast is learnt from the verifications.

    continuation : int64[n], the tokens of plain decoding after the prompt; the prefill gives the first one
    trees : whether a token may have a second child
    partial : a drafter whose steps are run instead, on the drafted tokens, because verification reuses their rows
    luck : int64[n], the child that is right at each position: FIRST, SECOND or NEITHER. Every position is verified at
        most once in a generation, so independent positions give independent results.
    """

    name = "simulated"

    def __init__(
        self,
        engine: Engine,
        continuation: Sequence[int],
        *,
        trees: bool = False,
        partial: PartialDrafter | None = None,
    ) -> None:
        self._continuation = np.asarray(continuation, np.int64)
        self._vocab_size = vocab_size = engine.target.vocab_size
        self._branches = 2 if trees else 1
        self._partial = partial
        has_steps = engine.drafter is not None and partial is None
        self._paid = MtpDrafter(vocab_size, branches=1) if has_steps else None
        self._session: Session | None = None
        self._newest = 0
        self._acceptance = PositionAcceptance()
        self._second = Tally(SIBLING_WEIGHT * SIBLING, SIBLING_WEIGHT)
        self._place = 0
        self._firsts = 0
        """Tokens of the draft along first children alone."""
        self.luck: Luck = np.full(len(self._continuation), FIRST)

    def begin(self, prompt_ids: Sequence[int], session: Session) -> None:
        self._place = self._firsts = 0
        self._session = session
        if self._paid is not None:
            self._paid.begin(prompt_ids, session)

    def forget(self) -> None:
        self._firsts = 0
        if self._paid is not None:
            self._paid.forget()

    def forecast(self, nodes: int) -> Forecast:
        if self._branches == 1:
            return Forecast(self._acceptance.survival(nodes), self.name)
        survival, depths = self._acceptance.survival_with_siblings(nodes, self._second.rate())
        return Forecast(survival, self.name, depths)

    def draft(self, request: DraftRequest) -> Draft:
        """The likeliest nodes by its own estimate; a chain if only first children are used."""
        rates = self._acceptance.conditional(request.nodes).tolist()
        chances = (rates, [self._second.rate()] * len(rates))[: self._branches]
        tokens: list[int] = []
        parents: list[int] = []
        expanded = {ROOT}
        # Survival, order, parent, depth, which child, whether its parent is right, whether all before it are firsts.
        frontier = [(-each[0], rank, ROOT, 0, rank, True, True) for rank, each in enumerate(chances) if rates]
        self._firsts, looks_on = 0, True
        while frontier and len(tokens) < request.nodes:
            negative, order, parent, depth, rank, follows, alone = heappop(frontier)
            if parent not in expanded and not request.pays_step(len(tokens), -negative, len(expanded)):
                looks_on = False
                break
            if not request.pays_row(len(tokens), -negative) or self._place + depth >= len(self._continuation):
                break
            right = follows and self.luck[self._place + depth] == rank
            alone = alone and rank == FIRST
            self._firsts += alone
            truth = self._continuation[self._place + depth]
            tokens.append(int(truth if right else (truth + 1 + rank) % self._vocab_size))
            parents.append(parent)
            expanded.add(parent)
            new = len(tokens) - 1
            for child, each in enumerate(chances if depth + 1 < len(rates) else ()):
                chance, later = negative * each[depth + 1], order + 2 * request.nodes + child
                heappush(frontier, (chance, later, new, depth + 1, child, right, alone))
        # A real drafter has to draft a token to see that it is not worth its row.
        steps = min(len(expanded) + (looks_on and len(tokens) < request.nodes), request.nodes)
        if self._paid is not None:
            self._paid.draft(DraftRequest(steps))
        if self._partial is not None and self._session is not None:
            for step in range(min(steps, len(tokens) + 1)):
                scores = self._partial.scores(self._session, [self._newest, *tokens[:step]])
                assert scores is not None
                GREEDY.guess(scores.logits, scores.candidates, request.context, tokens[:step])
        return Draft(np.array(tokens, np.int64), np.array(parents, np.int64), source=self.name)

    def observe(self, emitted: Sequence[int], outputs: Outputs, path: Sequence[int]) -> None:
        judged = self.luck[self._place : self._place + min(self._firsts, len(emitted))] == FIRST
        accepted = len(judged) if judged.all() else int(judged.argmin())
        self._acceptance.learn(min(len(judged), accepted + 1), accepted, len(emitted))
        if self._branches > 1 and self._firsts:
            self._second.add(bool(self.luck[self._place] == SECOND), KEEP)
        self._place += len(emitted)
        self._newest = emitted[-1]
        self._firsts = 0
        if self._paid is not None:
            self._paid.observe(emitted, outputs, path)


def make_luck(count: int, acceptance: float, repeat: int, repeats: int, second: float = 0.0) -> Luck:
    """int64[count]: independent draws, FIRST with the first probability, SECOND with the second one, NEITHER otherwise.

    The draws of the repeats are evenly spaced on the interval of probabilities, so that over all repeats a position is
    right about as often as it should be; each single repeat is random. The same for every acceptance and length.
    """
    draws = (np.random.default_rng(0).random(count) + repeat / repeats) % 1.0
    return np.where(draws < acceptance, FIRST, np.where(draws < acceptance + second, SECOND, NEITHER))
