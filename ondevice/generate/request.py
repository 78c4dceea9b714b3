"""The request of a generation: how tokens are chosen, when to stop, and what the caller adds to the choice.

`SamplingOptions` and `LogitsProcessor` are public. `Limits` and `Constraint` are what the loop sees of the text layer's
stop conditions and grammars: token ids only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ondevice.arrays import Float32Array
from ondevice.errors import UsageError, shown
from ondevice.progress import Progress, silent

MAX_PENALTY = 1e6
"""Largest penalty and bias; 1 / MAX_PENALTY is the smallest repetition penalty. Beyond, a float32 logit could become
infinite."""


@dataclass(frozen=True)
class SamplingOptions:
    """How a token is chosen. Names and meaning are those of transformers' `GenerationConfig`; presence and frequency
    penalty and logit bias are OpenAI's.

    temperature : 0 always chooses the likeliest token
    top_k, top_p, min_p : filters; None, or 0, 1 and 0 respectively, keeps every token; top_p=0 keeps the likeliest one
    repetition_penalty : 1.0 changes nothing
    seed : seed of the noise that tokens are drawn with; None takes one from the operating system for each generation
    presence_penalty, frequency_penalty : subtracted from the logits of tokens that were generated: presence once,
        frequency for each occurrence; 0.0 changes nothing
    logit_bias : token id to the number added to its logit, before all other changes

    Raises:
        UsageError: a value of the wrong type or outside its range.
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
            elif value is not None or name not in ("top_k", "top_p", "min_p", "seed"):
                object.__setattr__(self, name, _number(name, value, whole=name in ("top_k", "seed")))
        if not self.temperature >= 0:
            raise UsageError(f"temperature must be 0 (always the likeliest token) or more, not {self.temperature}")
        if self.top_k is not None and self.top_k < 0:
            raise UsageError(f"top_k must be at least 1, or 0 to keep every token, not {self.top_k}")
        if self.top_p is not None and not 0 <= self.top_p <= 1:
            raise UsageError(f"top_p must be between 0 (only the likeliest token) and 1, not {self.top_p}")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise UsageError(f"min_p must be between 0 and 1, not {self.min_p}")
        if not 1 / MAX_PENALTY <= self.repetition_penalty <= MAX_PENALTY:
            raise UsageError(
                f"repetition_penalty must be over 0 and at most {MAX_PENALTY:.0f}, not {self.repetition_penalty}; "
                "1 changes nothing"
            )
        for name in ("presence_penalty", "frequency_penalty"):
            if not abs(getattr(self, name)) <= MAX_PENALTY:
                raise UsageError(
                    f"{name} must be between {-MAX_PENALTY:.0f} and {MAX_PENALTY:.0f}, not {getattr(self, name)}; "
                    "0 changes nothing"
                )
        if self.seed is not None and self.seed < 0:
            raise UsageError(f"seed must be 0 or more, not {self.seed}")

    def check_tokens(self, vocab_size: int) -> None:
        """Check that every biased token is in the vocabulary.

        Raises:
            UsageError: a token id of `logit_bias` is not below `vocab_size`.
        """
        for token in self.logit_bias or {}:
            if token >= vocab_size:
                raise UsageError(f"logit_bias names the token {token}: this model has ids 0 to {vocab_size - 1}")


@dataclass(frozen=True)
class Limits:
    """When a generation ends, and the callbacks that it makes on the way.

    max_new_tokens : tokens to generate at most; 0 only reads the prompt
    stop_ids : token ids that end the reply; the stop token is emitted
    cancelled : called before every call of the engine; True ends the generation
    on_prefill : called after every prefill chunk with the prompt's tokens done so far and their total
    """

    max_new_tokens: int
    stop_ids: frozenset[int] = frozenset()
    cancelled: Callable[[], bool] = lambda: False
    on_prefill: Progress = silent


@dataclass(frozen=True)
class SoftTokens:
    """Neighbouring soft tokens of a prompt, for example those of a picture: rows that have an embedding and no id.

    The prompt has negative numbers in their places, which identify the content: see `engines.protocol.Rows`.

    begin : position of the first one in the prompt
    count : their number
    encode : computes their embeddings, float32[count, H]; called when the first one is needed, and so never for what a
        cached sequence holds. Its argument says whether the generation was cancelled; it then returns None soon
    is_block : whether they see each other in sliding layers, so that one forward must have all of them
    """

    begin: int
    count: int
    encode: Callable[[Callable[[], bool]], Float32Array | None]
    is_block: bool = False


class LogitsProcessor(Protocol):
    """A caller's function that changes a row of logits before a token is chosen; -inf forbids a token."""

    def __call__(self, logits: Float32Array, context: Sequence[int]) -> Float32Array:
        """The changed row, float32[V].

        Args:
            logits: float32[V], a copy that the processor may write to.
            context: every token before the one to be chosen, including drafted tokens on the path to it; negative
                for the soft tokens of a picture.
        """
        ...


TokenMask = NDArray[np.uint32]
"""uint32[at least V / 32]: bit t % 32 of word t // 32 is set where token t is allowed. Tokens beyond the last word are
not allowed."""


class Constraint(Protocol):
    """The tokens that a reply may consist of, as a grammar has it.

    An answer depends on the tokens before it and on nothing else: neither on earlier calls, nor on how drafts divide
    the reply into rounds. A `path` is a hypothetical continuation of the tokens taken so far. After the end of the
    reply every token is allowed.

    Attributes:
        position: number of tokens taken so far, prompt included.
        finished: whether the reply is complete, so that no token may follow.
    """

    position: int

    @property
    def finished(self) -> bool: ...

    def allows(self, path: Sequence[int]) -> bool:
        """Whether the reply may continue with `path`."""
        ...

    def forced(self, path: Sequence[int]) -> int | None:
        """The only token that may follow `path`; None where there are several, or where only a mask would tell."""
        ...

    def mask(self, path: Sequence[int]) -> TokenMask:
        """The tokens that may follow `path`, none if `path` itself is not allowed; valid until the next call."""
        ...

    def take(self, tokens: Sequence[int]) -> int:
        """Append emitted tokens to the reply.

        Returns:
            How many of them belong to the reply, at least one: it may end before the last one.
        """
        ...


# Checks of `SamplingOptions`.


def _biases(given: object) -> dict[int, float] | None:
    """`logit_bias` with ids as int and biases as float. Raises UsageError for anything else than such a mapping."""
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise UsageError(f"logit_bias must be a mapping of token ids to numbers, not {shown(given)}")
    biases = {int(_number("a token id in logit_bias", token, whole=True)): bias for token, bias in given.items()}
    for token, bias in biases.items():
        if token < 0:
            raise UsageError(f"a token id in logit_bias must be 0 or more, not {token}")
        if not abs(_number(f"the logit_bias of token {token}", bias, whole=False)) <= MAX_PENALTY:
            raise UsageError(f"the logit_bias of token {token} must be at most {MAX_PENALTY:.0f}, not {shown(bias)}")
    return {token: float(bias) for token, bias in biases.items()}


def _number(name: str, value: object, *, whole: bool) -> float:
    """An option as a Python int (`whole`) or float. Raises UsageError for another type, NaN or infinity."""
    kind = "whole number" if whole else "number"
    if isinstance(value, bool) or not isinstance(value, Integral if whole else Real):
        raise UsageError(f"{name} must be a {kind}, not {shown(value)}")
    if isinstance(value, Integral) and whole:
        return int(value)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise UsageError(f"{name} must be a finite number, not {shown(value)}")
    return number
