"""What a caller may choose of how tokens are drawn."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real

from ondevice.errors import UsageError

MOST_PENALTY = 1e6
"""Beyond this, and below one over this, a logit of float32 could become infinite."""


@dataclass(frozen=True)
class SamplingOptions:
    """How to choose a token. The names and their meaning are those of transformers' `GenerationConfig`.

    temperature : 0 chooses the likeliest token, always
    top_k, top_p, min_p : None keeps every token, and so do 0, 1 and 0
    repetition_penalty : 1.0 changes nothing
    presence_penalty, frequency_penalty : taken from the logits of tokens that were generated, once and for each time;
        0.0 changes nothing. OpenAI's names, and so is the next
    logit_bias : added to logits, by token id, before all else
    seed : of the noise that tokens are drawn with; None takes one from the operating system, for one generation

    Raises:
        UsageError: a value that makes no sense.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name == "logit_bias":
                object.__setattr__(self, name, _biases(value))
            elif value is not None:
                object.__setattr__(self, name, _number(name, value, whole=name in ("top_k", "seed")))
        if not self.temperature >= 0:
            raise UsageError(f"temperature must be 0 (always the likeliest token) or more, not {self.temperature}")
        if self.top_k is not None and self.top_k < 0:
            raise UsageError(f"top_k must be at least 1, or 0 to keep every token, not {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UsageError(f"top_p must be over 0 and at most 1, not {self.top_p}")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise UsageError(f"min_p must be between 0 and 1, not {self.min_p}")
        if not 1 / MOST_PENALTY <= self.repetition_penalty <= MOST_PENALTY:
            raise UsageError(
                f"repetition_penalty must be over 0 and at most {MOST_PENALTY:.0f}, not {self.repetition_penalty}; "
                "1 changes nothing"
            )
        for name in ("presence_penalty", "frequency_penalty"):
            if not abs(getattr(self, name)) <= MOST_PENALTY:
                raise UsageError(
                    f"{name} must be between {-MOST_PENALTY:.0f} and {MOST_PENALTY:.0f}, not {getattr(self, name)}; "
                    "0 changes nothing"
                )
        if self.seed is not None and self.seed < 0:
            raise UsageError(f"seed must be 0 or more, not {self.seed}")

    def check_tokens(self, vocab_size: int) -> None:
        """Raises UsageError for a bias of a token that is outside the vocabulary."""
        for token in self.logit_bias or {}:
            if token >= vocab_size:
                raise UsageError(f"logit_bias names the token {token}: this model has ids 0 to {vocab_size - 1}")


def _biases(given: object) -> dict[int, float] | None:
    """Raises UsageError for anything but a mapping of token ids to numbers."""
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise UsageError(f"logit_bias must be a mapping of token ids to numbers, not {given!r:.99}")
    biases = {int(_number("a token id in logit_bias", token, whole=True)): bias for token, bias in given.items()}
    for token, bias in biases.items():
        if token < 0:
            raise UsageError(f"a token id in logit_bias must be 0 or more, not {token}")
        if not abs(_number(f"the logit_bias of token {token}", bias, whole=False)) <= MOST_PENALTY:
            raise UsageError(f"the logit_bias of token {token} must be at most {MOST_PENALTY:.0f}, not {bias!r:.99}")
    return {token: float(bias) for token, bias in biases.items()}


def _number(name: str, value: object, *, whole: bool) -> float:
    """An option as Python's own int or float."""
    kind = "whole number" if whole else "number"
    if isinstance(value, bool) or not isinstance(value, Integral if whole else Real):
        raise UsageError(f"{name} must be a {kind}, not {value!r:.99}")
    if isinstance(value, Integral) and whole:
        return int(value)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise UsageError(f"{name} must be a finite number, not {value!r:.99}")
    return number
