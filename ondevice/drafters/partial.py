"""What drafters have in common that run a part of the target itself, token by token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ondevice.drafters.acceptance import Calibration, PositionAcceptance
from ondevice.drafters.protocol import Draft, DraftRequest, Floats, Forecast, Ids
from ondevice.engines.protocol import Outputs, Session

if TYPE_CHECKING:
    from ondevice.decoding.limits import Limits


START = 0.7
"""The chance of a token to be right before anything was seen."""


class Scores(NamedTuple):
    """What may follow a token.

    logits : float32[C]
    candidates : int64[C], whose they are; None for all of the vocabulary, in order
    """

    logits: Floats
    candidates: Ids | None = None


class PartialDrafter(ABC):
    """Drafts a chain, drawing as the target will (`Sampler.guess`).

    Drafted rows are pending rows of the target's own session: its verification overwrites them, or takes them over.
    """

    def __init__(self, name: str, start: float = START) -> None:
        self.name = name
        self._session: Session | None = None
        self._newest: int | None = None
        self._limits: Limits | None = None
        self._acceptance = PositionAcceptance(start)
        self._calibration = Calibration()
        self._proposed: list[tuple[int, float]] = []
        """Tokens and how sure of them it was."""

    @abstractmethod
    def scores(self, session: Session, tokens: Sequence[int]) -> Scores | None:
        """What follows the last of these tokens, which begin with the newest one; None where there is no saying."""

    def ready(self) -> bool:
        """Whether it can draft at all."""
        return True

    def expect(self, limits: Limits) -> None:
        self._limits = limits

    def rest(self) -> None:
        self._limits = self._session = None

    def begin(self, prompt_ids: Sequence[int], session: Session) -> None:
        self._session, self._newest, self._proposed = session, None, []

    def forget(self) -> None:
        self._session, self._newest, self._proposed = None, None, []

    def forecast(self, nodes: int) -> Forecast:
        return Forecast(self._acceptance.survival(nodes if self.ready() else 0), self.name, steady=True)

    def draft(self, request: DraftRequest) -> Draft:
        self._proposed = []
        if self._newest is None or self._session is None or not self.ready():
            return Draft.empty()
        expected = self._acceptance.conditional(request.nodes).tolist()
        tokens, confidence, survival = [self._newest], list[float](), 1.0
        while len(tokens) <= request.nodes and not self._cancelled():
            if survival * expected[len(tokens) - 1] < request.floor and len(tokens) > 1:
                break
            scores = self.scores(self._session, tokens)
            if scores is None:
                break
            guesses = request.sampler.guess(scores.logits, scores.candidates, request.context, tokens[1:])
            if not guesses:
                break
            token, share = guesses[0]
            self._proposed.append((token, share))
            chance = self._calibration.probability(share)
            survival *= chance
            if survival < request.floor:
                break
            tokens.append(token)
            confidence.append(chance)
        return Draft.chain(tokens[1:], confidence, self.name)

    def observe(self, emitted: Sequence[int], outputs: Outputs, path: Sequence[int]) -> None:
        judged = hits = 0
        for (token, share), taken in zip(self._proposed, emitted, strict=False):
            judged += 1
            self._calibration.observe(share, token == taken)
            if token != taken:
                break
            hits += 1
        self._acceptance.learn(judged, hits, len(emitted))
        self._newest, self._proposed = emitted[-1], []

    def _cancelled(self) -> bool:
        return self._limits is not None and self._limits.cancelled()
