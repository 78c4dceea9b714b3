"""What logits are changed by before a token is chosen: biases, suppressed tokens, penalties for what was said."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ondevice.decoding.sampling_options import SamplingOptions

Floats = NDArray[np.float32]
Tokens = NDArray[np.int64]


class Adjustments:
    """Of one generation. A score depends on itself, its token and the context, so that a drafter's few candidates are
    changed as the target's whole row is.

    In this order: bias, repetition penalty (over all of the context, as transformers has it), presence and frequency
    penalty (over what was generated, as OpenAI and vLLM have them).
    """

    def __init__(self, options: SamplingOptions, suppressed: Sequence[int] = (), begins: int = 0) -> None:
        """
        Args:
            options: of these, `logit_bias` and the penalties.
            suppressed: tokens never to be chosen.
            begins: where in a context the generated tokens begin.
        """
        biases = {**(options.logit_bias or {}), **dict.fromkeys(suppressed, -np.inf)}
        self._biased = np.array(sorted(biases), np.int64)
        self._biases = np.array([biases[token] for token in sorted(biases)], np.float32)
        self._repetition = np.float32(options.repetition_penalty)
        self._presence, self._frequency = options.presence_penalty, options.frequency_penalty
        self._begins = begins
        self._any = bool(biases or options.repetition_penalty != 1 or self._presence or self._frequency)

    def __bool__(self) -> bool:
        """Whether anything is changed."""
        return self._any

    def row(self, logits: Floats, context: Sequence[int]) -> Floats:
        """A row of the whole vocabulary, float32[V], changed in a copy."""
        scores = np.array(logits, np.float32)
        scores[self._biased] += self._biases
        if self._repetition != 1:
            seen = np.asarray(context, np.int64)
            seen = seen[seen < len(scores)]
            scores[seen] = self._repeated(scores[seen])  # a token seen twice is written twice, with the same value
        if self._presence or self._frequency:
            said, penalties = self._penalties(context)
            scores[said] -= penalties
        return scores

    def some(self, logits: Floats, tokens: Tokens, context: Sequence[int]) -> Floats:
        """The logits of some tokens, float32[C] of int64[C], changed in a copy."""
        scores = np.array(logits, np.float32)
        scores += _looked_up(tokens, self._biased, self._biases)
        if self._repetition != 1:
            scores = np.where(np.isin(tokens, np.asarray(context, np.int64)), self._repeated(scores), scores)
        if self._presence or self._frequency:
            scores -= _looked_up(tokens, *self._penalties(context))
        return scores

    def _repeated(self, scores: Floats) -> Floats:
        return np.where(scores < 0, scores * self._repetition, scores / self._repetition)

    def _penalties(self, context: Sequence[int]) -> tuple[Tokens, Floats]:
        """The tokens that were generated, ascending, and what each loses."""
        said, counts = np.unique(np.asarray(context[self._begins :], np.int64), return_counts=True)
        return said, (self._presence + self._frequency * counts).astype(np.float32)


def _looked_up(tokens: Tokens, known: Tokens, values: Floats) -> Floats:
    """float32[C]: the values of those tokens that are among the known ones, which are ascending; 0 for others."""
    if not len(known):
        return np.zeros(len(tokens), np.float32)
    at = np.minimum(np.searchsorted(known, tokens), len(known) - 1)
    return np.where(known[at] == tokens, values[at], np.float32(0))
