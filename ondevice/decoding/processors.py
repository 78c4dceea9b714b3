"""Logits processors that a checkpoint's own generation_config.json asks for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ondevice.decoding.sampling import Floats


class SuppressTokens:
    """Never choose these tokens. Gemma 4 12B lists its image and audio markers as `suppress_tokens`."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = np.asarray(token_ids, np.intp)

    def __call__(self, logits: Floats, context: Sequence[int]) -> Floats:
        logits[self._token_ids] = -np.inf
        return logits
