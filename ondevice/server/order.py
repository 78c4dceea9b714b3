"""What a request asks of the model, whatever API it came by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from ondevice.drafters import registry
from ondevice.engines.protocol import MOST_SESSIONS
from ondevice.options import GenerationKeywords
from ondevice.server.fields import Fields
from ondevice.text.prompt import Prompt

SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "repeat_penalty": "repetition_penalty",  # llama.cpp's name
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}
"""Fields that are numbers, and the options that they are."""


@dataclass(frozen=True)
class Order:
    """
    prompts : each gets its replies
    options : of every generation
    choices : replies to each prompt
    until_end : no number of tokens was named: until the model ends, or the context
    tell_reading : whether the client wants to hear how much of its prompt is read
    """

    prompts: Sequence[Prompt]
    options: GenerationKeywords
    choices: int = 1
    until_end: bool = False
    tell_reading: bool = False


def make_order(
    fields: Fields,
    prompts: Sequence[Prompt],
    max_tokens: int | None,
    *,
    more: GenerationKeywords | None = None,
    stops: str = "stop",
    choices: int = 1,
) -> Order:
    """The order of a request whose prompts are read already.

    Args:
        max_tokens: that it names.
        more: options that its API has a way of its own to say.
        stops: the field with its stop strings.
    """
    options: GenerationKeywords = {**_sampling(fields), **(more or {})}
    if stop := fields.texts(stops):
        options["stop"] = stop
    if max_tokens is not None:
        options["max_new_tokens"] = max_tokens
    # a name and never a path: what lies on this machine's disk is no stranger's business
    if (drafter := fields.choice("drafter", registry.names())) is not None:
        options["drafter"] = drafter
    if "grammar" in fields:
        raise fields.missing_feature(
            "grammar", "GBNF is llama.cpp's alone: use `response_format`, which takes `lark` too"
        )
    if "json_schema" in fields:  # llama.cpp's short form
        options["response_format"] = {
            "type": "json_schema",
            "json_schema": {"schema": dict(fields.inner("json_schema"))},
        }
    if form := dict(fields.inner("response_format")):
        options["response_format"] = form
    return Order(prompts, options, choices, max_tokens is None, fields.flag("return_progress"))


def most_tokens(fields: Fields, *names: str) -> int | None:
    """How many tokens a request asks for at most, by the first of the names that it has; llama.cpp's -1 is no limit."""
    for name in names:
        if fields.get(name) not in (None, -1):
            return fields.whole(name, 1)
    return None


def wants_usage(fields: Fields) -> bool:
    """Whether a stream shall end with its `usage`."""
    return fields.inner("stream_options").flag("include_usage")


def number_of_choices(fields: Fields) -> int:
    return fields.whole("n", 1, MOST_SESSIONS) or 1


def _sampling(fields: Fields) -> GenerationKeywords:
    options = {option: value for name, option in SAMPLING.items() if (value := fields.number(name)) is not None}
    found = cast("GenerationKeywords", options)
    if (top_k := fields.whole("top_k", -1)) is not None:
        found["top_k"] = max(top_k, 0)
    seed = fields.whole("seed", -1)
    if seed is not None and seed >= 0:  # llama.cpp's -1 is a random one
        found["seed"] = seed
    if biases := fields.get("logit_bias"):
        found["logit_bias"] = _biases(fields, biases)
    return found


def _biases(fields: Fields, biases: Any) -> dict[int, float]:
    """OpenAI's object of token ids and biases, or llama.cpp's list of pairs."""
    try:
        return {int(token): bias for token, bias in (biases.items() if isinstance(biases, dict) else biases)}
    except (ValueError, TypeError) as error:
        raise fields.wrong("logit_bias", "an object of token ids and biases") from error
