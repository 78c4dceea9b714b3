"""An application's own say in which token comes next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ondevice.errors import UsageError

Floats = NDArray[np.float32]


class LogitsProcessor(Protocol):
    """Changes a row of logits before a token is chosen, for a grammar say; -inf forbids a token."""

    def __call__(self, logits: Floats, context: Sequence[int]) -> Floats:
        """The changed row, float32[V].

        Args:
            logits: float32[V], the processor's own to write to.
            context: every token before the one to be chosen, the draft path included.
        """
        ...


def checked_row(processor: LogitsProcessor, scores: object, vocab_size: int) -> Floats:
    """What a processor returned, as float32[V].

    Raises:
        UsageError: it is something else, such as the context: in transformers that comes first.
    """
    if isinstance(scores, np.ndarray) and scores.shape == (vocab_size,) and scores.dtype.kind == "f":
        return np.ascontiguousarray(scores, np.float32)
    found = f"{scores.dtype}{list(scores.shape)}" if isinstance(scores, np.ndarray) else type(scores).__name__
    raise UsageError(
        f"a logits processor returned {found} and not the row of {vocab_size} floats that it was given: "
        "it is called with (logits, context), in this order"
    )
