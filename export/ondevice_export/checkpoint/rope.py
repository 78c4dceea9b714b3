"""Rotary frequencies of every `rope_type`, as the numbers that a bundle stores.

Source: `modeling_rope_utils.py` of transformers 5.22.2. Computed in float64 and rounded to float32 at the end: numpy's
float32 power differs by 1 or 2 units of the last place between CPUs with and without AVX-512.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ondevice.errors import CheckpointError
from ondevice_export.checkpoint.json_fields import JsonFields

TYPES = ("default", "linear", "proportional", "llama3", "yarn", "longrope")


class Rotary(NamedTuple):
    """A rotary embedding: frequencies float32[head_dim / 2], and the factor by which cos and sin are multiplied."""

    frequencies: NDArray[np.float32]
    factor: float = 1.0


@np.errstate(all="ignore")  # numbers beyond floats give frequencies that are refused
def rotary(parameters: JsonFields, head_dim: int, context: int, *, longest: int = 0) -> Rotary:
    """The rotary embedding of an entry of `rope_parameters`.

    Args:
        parameters: `rope_type`, `rope_theta`, and what the type needs.
        head_dim: numbers of a head.
        context: `max_position_embeddings` of the model.
        longest: the longest text, in tokens; where it is longer than the original length, `longrope` has other
            frequencies, for all texts.

    Raises:
        CheckpointError: the type or a value is not supported.
    """
    rope_type = parameters.data.get("rope_type", "default")
    if rope_type not in TYPES:
        raise CheckpointError(f"{parameters.origin}: rope_type {rope_type!r:.99} is not supported")
    share = parameters.number("partial_rotary_factor", 1.0, maximum=1.0)
    if rope_type == "proportional":
        return Rotary(_proportional(parameters, head_dim, share))
    if share != 1.0:
        raise CheckpointError(f"{parameters.origin}: partial_rotary_factor {share} is not supported")
    base = np.float64(parameters.number("rope_theta")) ** (np.arange(0, head_dim, 2) / head_dim)
    if rope_type == "linear":
        return Rotary(_rounded(1.0 / base / parameters.number("factor")))
    if rope_type == "llama3":
        return Rotary(_llama3(parameters, 1.0 / base, context))
    if rope_type == "yarn":
        try:
            return _yarn(parameters, base, context)
        except (ArithmeticError, ValueError) as error:  # a logarithm of 0, a quotient beyond floats
            raise CheckpointError(f"{parameters.origin}: yarn cannot be computed: {error}") from error
    if rope_type == "longrope":
        return _longrope(parameters, base, context, longest)
    return Rotary(_rounded(1.0 / base))


def usable_context(parameters: JsonFields, context: int, asked: int | None = None) -> int:
    """The longest text of a bundle, in which all texts are computed alike from their beginning to their end.

    At the original length Ministral 3 begins to scale queries (`llama_4_scaling_beta`), and `longrope` changes its
    frequencies, unless `rotary` gives it those of longer texts from the beginning.

    Args:
        parameters: an entry of `rope_parameters`.
        context: `max_position_embeddings` of the model.
        asked: the length that a user asks for; None for the longest without other frequencies.
    """
    usable = context if asked is None else min(context, asked)
    changes = asked is None and parameters.data.get("rope_type") == "longrope"
    if not changes and "llama_4_scaling_beta" not in parameters.data:
        return usable
    return min(usable, parameters.integer("original_max_position_embeddings", context))


def _rounded(values: NDArray[Any]) -> NDArray[np.float32]:
    return values.astype(np.float32)


def _proportional(parameters: JsonFields, head_dim: int, share: float) -> NDArray[np.float32]:
    """Frequencies that are zero beyond a share of the head."""
    turning = int(share * head_dim // 2)
    exponents = np.arange(0, 2 * turning, 2) / head_dim
    frequencies = np.zeros(head_dim // 2)
    frequencies[:turning] = 1.0 / np.float64(parameters.number("rope_theta")) ** exponents
    return _rounded(frequencies / parameters.number("factor", 1.0))


def _llama3(parameters: JsonFields, plain: NDArray[Any], context: int) -> NDArray[np.float32]:
    """Low frequencies are divided by a factor, high ones are kept, those between interpolated."""
    factor = parameters.number("factor")
    low, high = parameters.number("low_freq_factor"), parameters.number("high_freq_factor")
    if low >= high:
        raise CheckpointError(f"{parameters.origin}: low_freq_factor {low:g} is not below high_freq_factor {high:g}")
    turns = parameters.integer("original_max_position_embeddings", context) * plain / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return _rounded((1 - kept) * plain / factor + kept * plain)


def _yarn(parameters: JsonFields, base: NDArray[Any], context: int) -> Rotary:
    """Pairs that turn often in the original context keep their frequency, slow ones are divided by a factor."""
    original = parameters.integer("original_max_position_embeddings", context)
    factor = parameters.number("factor", context / original)
    theta, pairs = parameters.number("rope_theta"), len(base)

    def pair_of(turns: float) -> float:
        """The pair that makes so many turns in the original context."""
        return pairs * math.log(original / (turns * 2 * math.pi)) / math.log(theta)

    low, high = pair_of(parameters.number("beta_fast", 32.0)), pair_of(parameters.number("beta_slow", 1.0))
    if parameters.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    ramp = np.clip((np.arange(pairs) - low) / (high - low or 0.001), 0.0, 1.0)
    frequencies = _rounded(ramp / (factor * base) + (1 - ramp) / base)
    return Rotary(frequencies, _yarn_factor(parameters, factor))


def _yarn_factor(parameters: JsonFields, factor: float) -> float:
    def growth(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    given = parameters.data
    if given.get("attention_factor") is not None:
        return parameters.number("attention_factor")
    if given.get("mscale") and given.get("mscale_all_dim"):
        return growth(parameters.number("mscale")) / growth(parameters.number("mscale_all_dim"))
    return growth(1.0)


def _longrope(parameters: JsonFields, base: NDArray[Any], context: int, longest: int) -> Rotary:
    """Frequencies that are each divided by a factor of its own, of two lists: of texts up to the original context, or
    of longer ones. llama.cpp chooses by the length of its context too, transformers anew for every text.
    """
    original = parameters.integer("original_max_position_embeddings", context)
    name = "long_factor" if longest > original else "short_factor"
    factor, divisors = parameters.number("factor", context / original), parameters.data.get(name)
    if (
        not isinstance(divisors, list)
        or len(divisors) != len(base)
        or not all(isinstance(each, int | float) and 0 < each < 1e6 for each in divisors)
    ):
        raise CheckpointError(f"{parameters.origin}: {name} is not a list of {len(base)} positive numbers")
    grown = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
    return Rotary(_rounded(1.0 / (np.array(divisors) * base)), parameters.number("attention_factor", grown))
