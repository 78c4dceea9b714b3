"""A drafter that knows the answer and is right as often as it is told to be."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ondevice.drafters.acceptance import PositionAcceptance
from ondevice.drafters.mtp import MtpDrafter
from ondevice.drafters.protocol import Draft, DraftRequest, Forecast
from ondevice.engines.protocol import Engine, Outputs, Session

Luck = NDArray[np.bool_]


class SimulatedDrafter:
    """Replays a known continuation, wrong at places chosen beforehand.

    Whatever a real drafter pays, it pays: where the bundle has an MTP drafter, that one drafts just as many tokens,
    which are then thrown away. And it knows no more than a real one: its forecast is learnt from the verdicts.

    continuation : int64[n], what plain decoding emits after the prompt, whose first token the prefill gives
    luck : bool[n], whether it gets the token at that place right. Every place is judged at most once in a generation,
        so independent places make independent verdicts.
    """

    name = "simulated"

    def __init__(self, engine: Engine, continuation: Sequence[int]) -> None:
        self._continuation = np.asarray(continuation, np.int64)
        self._vocab_size = engine.target.vocab_size
        sizes = engine.target.hidden_size, engine.target.vocab_size
        self._paid = MtpDrafter(*sizes, branches=1) if engine.has_drafter else None
        self._acceptance = PositionAcceptance()
        self._place = 0
        self._drafted: list[int] = []
        self.luck: Luck = np.ones(len(self._continuation), np.bool_)

    def begin(self, prompt_ids: Sequence[int], session: Session) -> None:
        self._place = 0
        self._drafted = []
        if self._paid is not None:
            self._paid.begin(prompt_ids, session)

    def forget(self) -> None:
        self._drafted = []
        if self._paid is not None:
            self._paid.forget()

    def forecast(self, nodes: int) -> Forecast:
        return Forecast(self._acceptance.survival(nodes), self.name)

    def draft(self, request: DraftRequest) -> Draft:
        count = int((self._acceptance.survival(request.nodes) >= request.floor).sum())
        if self._paid is not None:
            # A real one has to draft a token to see that it is not worth submitting.
            self._paid.draft(DraftRequest(min(count + 1, request.nodes)))
        ahead = slice(self._place, self._place + count)
        right = self._continuation[ahead]
        tokens = np.where(self.luck[ahead], right, (right + 1) % self._vocab_size)
        self._drafted = tokens.tolist()
        return Draft.chain(self._drafted, self._acceptance.conditional(len(tokens)).tolist(), self.name)

    def observe(self, emitted: Sequence[int], outputs: Outputs, path: Sequence[int]) -> None:
        judged = [drafted == taken for drafted, taken in zip(self._drafted, emitted, strict=False)]
        accepted = judged.index(False) if False in judged else len(judged)
        self._acceptance.observe(min(len(judged), accepted + 1), accepted)
        self._place += len(emitted)
        self._drafted = []
        if self._paid is not None:
            self._paid.observe(emitted, outputs, path)


def make_luck(count: int, acceptance: float, repeat: int, repeats: int) -> Luck:
    """bool[count]: independent draws that are true with a given probability.

    The draws of repeats lie evenly around the circle of probabilities, so that over all of them a place is right about
    as often as it should be; each repeat by itself is as random as any. The same for every acceptance and length.
    """
    draws = np.random.default_rng(0).random(count)
    luck: Luck = (draws + repeat / repeats) % 1.0 < acceptance
    return luck
