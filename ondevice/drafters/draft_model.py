"""Drafts from a second, smaller model with the same vocabulary: speculative decoding as it was first described."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ondevice.decoding.costs import Costs
from ondevice.decoding.prefix_cache import PrefixCache
from ondevice.decoding.sampling import Sampler
from ondevice.decoding.schedule import expected_rate
from ondevice.decoding.trust import Trust
from ondevice.decoding.verify import draw
from ondevice.drafters.acceptance import Calibration, PositionAcceptance
from ondevice.drafters.protocol import Draft, DraftRequest, Forecast
from ondevice.engines.protocol import Engine, Outputs, Rows, Session, TokenTree

if TYPE_CHECKING:
    from ondevice.decoding.limits import Limits

DraftSampling = Literal["coupled", "ratio"]
"""How a draft model draws above temperature 0: with the noise that the target will take, or from its own distribution,
with random numbers of its own, for the ratio rule."""

NEAR = 16
"""Tokens that a draft model may be behind and catches up with in a draft's first forward, at the draft's expense. More
are read for themselves, once, and only where that is expected to pay."""

RETURN = 4.0
"""Times the seconds of reading that drafts must be expected to save before `auto` lets a text be read. A reply is taken
to go on for as long as it has gone on already, so no more than a share of that is lost if it ends, or drafts fail."""

READ_PRIOR = 0.2
"""Of a drafted token's cost, that of one that is only read, until it was measured: rows of a forward share weights."""

NOTHING = np.zeros(0, np.float32)
"""The survival of no tokens."""

OWN_RANDOMNESS = 1
"""Beside the seed: what the ratio rule draws drafts with must be neither the noise nor the rule's own numbers."""


class DraftModel:
    """A second bundle's engine and the sequences it has read; shared by the drafters of all generations."""

    def __init__(self, engine: Engine, name: str, cache_bytes: int, share: float = 1.0) -> None:
        """
        Args:
            engine: closed with this.
            name: of the drafter, in statistics.
            cache_bytes: of keys and values of sequences at rest.
            share: of the target's weights, how many this has: what a token may cost until that was measured.
        """
        self.engine = engine
        self.share = share
        self.name = name
        self.sequences = PrefixCache(engine, cache_bytes)
        self._token_s = 0.0

    def forward(self, session: Session, tokens: Sequence[int]) -> Outputs:
        """Read more tokens, at most `session.max_rows()`; the outputs are the last one's."""
        (outputs,) = self.engine.forward([Rows(session, TokenTree.chain(list(tokens)), [len(tokens) - 1])])
        session.commit(range(session.pending))
        return outputs

    def read(self, session: Session, tokens: Sequence[int]) -> None:
        """`forward`, timed: what reading costs."""
        started = perf_counter()
        self.forward(session, tokens)
        token_s = (perf_counter() - started) / len(tokens)
        self._token_s = (self._token_s + token_s) / 2 if self._token_s else token_s

    def reading_s(self, tokens: int, costs: Costs) -> float:
        """Seconds that reading so many tokens is expected to take."""
        return tokens * (self._token_s or READ_PRIOR * costs.drafts(self.name, 1)[0])

    def close(self) -> None:
        self.sequences.clear()
        self.engine.close()


class Proposal(NamedTuple):
    """A token that may be drafted.

    raw : in [0, 1], how sure the draft model is that the target takes what it proposes here. For the ratio rule it does
        not depend on the token that was drawn: neither may where a draft ends.
    probs : float32[V], what it was drawn from; None where it was drawn as the target will draw
    """

    token: int
    raw: float
    probs: NDArray[np.float32] | None


class DraftModelDrafter:
    """Drafts with a session of its own on a draft model's engine.

    Nothing is computed while nothing is drafted: the text is read when the first draft is made, and what other rounds
    bring is caught up with in the next draft's first forward. Drafted tokens that the target does not take are rewound.

    `coupled` draws with the target's own noise (`Sampler.guess`), and is verified by equality; `ratio` is the rule of
    Leviathan et al. (arXiv 2211.17192), whose texts are distributed as plain ones, and are others.
    """

    def __init__(self, model: DraftModel, costs: Costs, sampling: DraftSampling = "coupled") -> None:
        self.name = model.name
        self._model = model
        self._costs = costs
        costs.assume(model.name, model.share)
        self._sampling = sampling
        self._acceptance = PositionAcceptance()
        self._calibration = Calibration()
        self._limits: Limits | None = None
        self._session: Session | None = None
        self._prompt: Sequence[int] = ()
        self._new = 0
        self._right = 0
        """Tokens of the session, or of what is kept, that the text begins with."""
        self._look_at = 0
        """Tokens generated, before which reading is not considered again."""
        self._proposals: list[Proposal] = []
        self._own: tuple[Sampler, np.random.Generator] | None = None
        self._word = Trust()

    def expect(self, limits: Limits) -> None:
        """What the coming generation's reading must keep to: told before `begin`."""
        self._limits = limits

    def rest(self) -> None:
        """Leave what was read for the next generation that begins like it."""
        self._limits = None
        self._put_back()

    def begin(self, prompt_ids: Sequence[int], session: Session) -> None:
        self._put_back()
        self._prompt, self._new, self._look_at = list(prompt_ids), 0, 0
        self._right = self._model.sequences.shared(self._prompt)
        self._proposals, self._own = [], None

    def forget(self) -> None:
        self._put_back()
        self._model.sequences.clear()
        self._prompt, self._new, self._right, self._proposals, self._own = (), 0, 0, [], None

    def forecast(self, nodes: int) -> Forecast:
        if self._new < self._look_at:  # asked in every round, which takes longer than it should
            return Forecast(NOTHING, self.name)
        nodes = min(nodes, self._model.engine.context_length - self._length)
        forecast = Forecast(self._acceptance.survival(max(nodes, 0)), self.name, steady=True)
        behind = self._length - self._right
        if behind <= NEAR or self._model.reading_s(behind, self._costs) <= self._savings(forecast):
            return forecast
        self._look_at = self._new + max(NEAR, self._new // 4)
        return Forecast(NOTHING, self.name)

    def draft(self, request: DraftRequest) -> Draft:
        self._proposals = []
        if not self._new:
            return Draft.empty()
        started = perf_counter()
        if not self._catch_up(request.context):
            return Draft.empty()
        reading_s, session = perf_counter() - started, self._session
        assert session is not None
        expected = self._acceptance.conditional(request.nodes).tolist()
        path: list[int] = []
        confidence: list[float] = []
        probs: list[NDArray[np.float32]] = []
        survival, coming = 1.0, request.context[session.length :]
        while session.max_rows() >= len(coming):
            row = self._model.forward(session, coming).logits[0]
            if (proposal := self._propose(row, request, path)) is None:
                break
            chance = self._calibration.probability(proposal.raw)
            survival *= chance
            if survival >= request.floor or proposal.probs is None:
                self._proposals.append(proposal)  # what the ratio rule does not look at is not judged
            if survival < request.floor:
                break
            path.append(proposal.token)
            confidence.append(chance)
            if proposal.probs is not None:
                probs.append(proposal.probs)
            if len(path) == request.nodes or survival * expected[len(path)] < request.floor:
                break
            coming = [proposal.token]
        chain = Draft.chain(path, confidence, self.name)
        stacked = np.stack(probs) if probs else None
        return Draft(chain.tokens, chain.parents, chain.confidence, stacked, self.name, reading_s)

    def observe(self, emitted: Sequence[int], outputs: Outputs, path: Sequence[int]) -> None:
        hits = judged = 0
        for proposal, token in zip(self._proposals, emitted, strict=False):
            judged += 1
            self._calibration.observe(proposal.raw, proposal.token == token)
            if proposal.token != token:
                break
            hits += 1
        self._acceptance.learn(judged, hits, len(emitted))
        session = self._session
        if session is not None and session.length > self._right:
            right = min(session.length, self._length + hits)
            self._right = session.rewind(right) if right < session.length else right
        self._new += len(emitted)
        self._proposals = []

    @property
    def _length(self) -> int:
        """Tokens of the text."""
        return len(self._prompt) + self._new

    def _put_back(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.rewind(session.length)  # an interrupt may have come while rows moved
            self._model.sequences.keep(session)

    def _savings(self, forecast: Forecast) -> float:
        """Seconds that may be spent on reading."""
        if not (rate := expected_rate(forecast, self._costs, self._word)):
            return 0.0
        left = self._new
        if self._limits is not None:
            left = min(left, self._limits.max_new_tokens - self._new)
        return left * max(self._costs.forwards(1)[0] - 1.0 / rate, 0.0) / RETURN

    def _catch_up(self, context: Sequence[int]) -> bool:
        """Where the session is far behind, read all but the newest token.

        False where that was cancelled, or there is no room.
        """
        if self._session is None:
            self._session = self._model.sequences.take(context)
            self._right = self._session.length
        session, limits = self._session, self._limits
        last, prompt = len(context) - 1, len(self._prompt)
        if last - session.length < min(NEAR, session.max_rows()):
            return True
        while session.length < last:
            if not session.max_rows() or (limits is not None and limits.cancelled()):
                return False
            stop = min(prompt if session.length < prompt else last, session.length + session.max_rows())
            self._model.read(session, context[session.length : stop])
            if stop == prompt:
                session.snapshot()
            if limits is not None:
                limits.on_prefill(stop, last)
        return True

    def _propose(self, row: NDArray[np.float32], request: DraftRequest, path: Sequence[int]) -> Proposal | None:
        """What follows a row's token; None where it makes no sense: a damaged model may cost speed, never a reply."""
        if self._sampling == "coupled" or request.sampler.greedy:
            guesses = request.sampler.guess(row, None, request.context, path)
            return Proposal(guesses[0].token, guesses[0].share, None) if guesses else None
        if not np.isfinite(row.max()):
            return None
        sampler, rng = self._own_sampler(request.sampler)
        probs = sampler.distribution(row, request.context, path).astype(np.float32)
        return Proposal(draw(probs.astype(np.float64), rng), float(probs.max()), probs)

    def _own_sampler(self, sampler: Sampler) -> tuple[Sampler, np.random.Generator]:
        """The target's sampler without its processors, and the random numbers of this text."""
        if self._own is None:
            seed = sampler.options.seed
            rng = np.random.default_rng(None if seed is None else [seed, OWN_RANDOMNESS])
            self._own = sampler.without_processors(), rng
        return self._own
