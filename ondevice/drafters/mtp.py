"""The model's own multi-token-prediction drafter (Gemma4AssistantForCausalLM), run step by step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ondevice.drafters.acceptance import Calibration, PositionAcceptance
from ondevice.drafters.protocol import Draft, DraftRequest, Forecast
from ondevice.engines.protocol import Outputs, Session


class MtpDrafter:
    """Drafts from the hidden state of the last verified token, drawing as the target will (`Sampler.guess`).

    Every step of a round attends to the same verified KV at the same position (`Session.draft_step`), so a draft
    depends on nothing but the verified tokens and the noise of its places: after a rejection it equals the draft of a
    fresh prefill. The matching rule keeps it lossless under sampling too, where transformers' ratio test of an argmax
    draft with the drafter's raw softmax does not.
    """

    name = "mtp"

    def __init__(self, hidden_size: int, vocab_size: int) -> None:
        """
        Args:
            hidden_size: of the target's hidden states.
            vocab_size: above every token id.
        """
        self._vocab_size = vocab_size
        self._session: Session | None = None
        self._acceptance = PositionAcceptance()
        self._calibration = Calibration()
        self._newest: int | None = None
        self._hidden = np.zeros(hidden_size, np.float32)
        self._raw: list[float] = []
        self._drafted: list[int] = []

    def begin(self, prompt_ids: Sequence[int], session: Session) -> None:
        self._session, self._newest = session, None
        self._drafted, self._raw = [], []

    def forget(self) -> None:
        self._session, self._newest = None, None
        self._drafted, self._raw = [], []

    def forecast(self, nodes: int) -> Forecast:
        return Forecast(self._acceptance.survival(nodes), self.name, steady=True)

    def draft(self, request: DraftRequest) -> Draft:
        self._drafted, self._raw = [], []
        if self._newest is None or self._session is None:
            return Draft.empty()
        token, hidden = self._newest, self._hidden
        confidence: list[float] = []
        survival = 1.0
        for _ in range(request.nodes):
            step = self._session.draft_step(token, hidden)
            guesses = request.sampler.guess(step.logits, step.candidates, request.context, self._drafted)
            if not guesses or not 0 <= guesses[0].token < self._vocab_size:
                break  # a damaged drafter may cost speed, never a reply
            proposed, raw = guesses[0]
            chance = self._calibration.probability(raw)
            survival *= chance
            if survival < request.floor:
                break
            token, hidden = proposed, step.hidden
            self._drafted.append(token)
            self._raw.append(raw)
            confidence.append(chance)
        return Draft.chain(self._drafted, confidence, self.name)

    def observe(self, emitted: Sequence[int], outputs: Outputs, path: Sequence[int]) -> None:
        if self._drafted:
            self._learn(emitted)
            self._drafted, self._raw = [], []
        else:
            self._acceptance.observe(0, 0)
        self._newest = emitted[-1]
        self._hidden[:] = outputs.hidden[path[-1]]

    def _learn(self, emitted: Sequence[int]) -> None:
        """Tokens up to the first miss were judged; later ones, and those after a stop token, say nothing."""
        judged = list(zip(self._drafted, emitted, strict=False))
        accepted = next((i for i, (drafted, taken) in enumerate(judged) if drafted != taken), len(judged))
        reached = judged[: accepted + 1]
        for raw, (drafted, taken) in zip(self._raw, reached, strict=False):
            self._calibration.observe(raw, drafted == taken)
        self._acceptance.observe(len(reached), accepted)
