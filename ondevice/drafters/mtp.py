"""The model's own multi-token-prediction drafter (Gemma4AssistantForCausalLM), run step by step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ondevice.drafters.acceptance import Calibration, PositionAcceptance
from ondevice.drafters.protocol import Draft, Forecast
from ondevice.engines.protocol import Engine, Floats


class MtpDrafter:
    """Drafts greedily from the hidden state of the last verified token.

    Every step of a round attends to the same verified KV at the same position (`Engine.draft_step`), so a draft
    depends on nothing but the verified tokens: after a rejection it equals the draft of a fresh prefill. Greedy, hence
    deterministic: the matching rule keeps it lossless under sampling too, where transformers' ratio test with the
    drafter's raw softmax does not (an argmax draft's true distribution is one-hot).
    """

    name = "mtp"

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._acceptance = PositionAcceptance()
        self._calibration = Calibration()
        self._newest: int | None = None
        self._hidden = np.zeros(engine.target.hidden_size, np.float32)
        self._raw: list[float] = []
        self._drafted: list[int] = []

    def begin(self, prompt_ids: Sequence[int]) -> None:
        self._newest = None
        self._drafted, self._raw = [], []

    def forget(self) -> None:
        self.begin([])

    def forecast(self, k: int) -> Forecast:
        return Forecast(self._acceptance.survival(k), self.name)

    def draft(self, k: int, floor: float = 0.0) -> Draft:
        self._drafted, self._raw = [], []
        if self._newest is None:
            return Draft.empty()
        token, hidden = self._newest, self._hidden
        confidence: list[float] = []
        survival = 1.0
        for _ in range(k):
            step = self._engine.draft_step(token, hidden)
            best = int(step.logits.argmax())
            raw = float(1.0 / np.exp(step.logits - step.logits[best]).sum())
            chance = self._calibration.probability(raw)
            survival *= chance
            if survival < floor:
                break
            token, hidden = int(step.candidates[best]), step.hidden
            self._drafted.append(token)
            self._raw.append(raw)
            confidence.append(chance)
        return Draft.chain(self._drafted, confidence, self.name)

    def observe(self, emitted: Sequence[int], hidden: Floats) -> None:
        self._learn(emitted)
        self._newest = emitted[-1]
        self._hidden = hidden[-1].copy()
        self._drafted, self._raw = [], []

    def _learn(self, emitted: Sequence[int]) -> None:
        """Tokens up to the first miss were judged; later ones, and those after a stop token, say nothing."""
        judged = list(zip(self._drafted, emitted, strict=False))
        accepted = next((i for i, (drafted, taken) in enumerate(judged) if drafted != taken), len(judged))
        reached = judged[: accepted + 1]
        for raw, (drafted, taken) in zip(self._raw, reached, strict=False):
            self._calibration.observe(raw, drafted == taken)
        self._acceptance.observe(len(reached), accepted)
