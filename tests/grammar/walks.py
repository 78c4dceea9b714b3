"""Replies that a grammar allows, made without a model: of the tokens that a mask leaves, one at random."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ondevice.grammar.matcher import Compiler, Matcher
from ondevice.grammar.response_format import ToolChoice, answer_grammar
from ondevice.text.reply_parser import ReplyParser, ResponseTemplate
from ondevice.text.reply_stream import ReplyStream
from ondevice.text.tokenizer import Tokenizer
from tests.grammar.schemas import random_schema

ENDS = ("<eos>", "<turn|>", "<|tool_response>", "<|return|>", "<|call|>")


def compiler(tokenizer: Tokenizer, *, tags: bool = False) -> Compiler:
    """For a model that has a few more tokens than its tokenizer."""
    return Compiler(tokenizer, tokenizer.vocab_size + 7, end_ids(tokenizer), tags=tags)


def end_ids(tokenizer: Tokenizer) -> list[int]:
    return [token_id for token_id, text in tokenizer.control_texts.items() if text in ENDS]


def matcher(
    made: Compiler,
    response_format: Any = None,
    *,
    tool_choice: Any = None,
    tools: Sequence[Any] | None = None,
    thinking: bool = False,
    prompt_ids: Sequence[int] = (2,),
) -> Matcher:
    answer, choice = answer_grammar(response_format), ToolChoice.of(tool_choice, tools)
    found = made.constraint(answer, choice, thinking, prompt_ids)
    assert found is not None
    return found


def schema_format(schema: Any, **further: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "test", "schema": schema, **further}}


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def is_whole_reply(tokenizer: Tokenizer, constraint: Matcher, text: str) -> bool:
    """Whether a text may be the whole reply."""
    said = ids_of(tokenizer, text)
    return constraint.allows(said) and constraint.take(said) == len(said) and (
        constraint.finished or constraint.allows(end_ids(tokenizer)[:1])
    )  # fmt: skip


def calls_and_text(tokenizer: Tokenizer, template: Any, token_ids: list[int]) -> tuple[list[tuple[str, Any]], str]:
    """Calls and text of a reply, as its stream tells them apart."""
    stream = ReplyStream(tokenizer, parser=ReplyParser(ResponseTemplate(template, tokenizer)))
    found = stream.feed(token_ids).then(stream.finish())
    return [(each.name, each.arguments) for each in found.tool_calls], found.text


def ids_in(mask: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def function(parameters: Any, name: str = "f") -> dict[str, Any]:
    """The declaration of a function."""
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def drawn_calls(made: Compiler, ends: Sequence[int], seeds: int) -> Iterator[tuple[dict[str, Any], list[int]]]:
    """Random schemas of objects, each with a reply that calls a function `f` of such arguments."""
    for seed in range(seeds):
        rng = random.Random(seed)
        schema = random_schema(rng)
        if schema.get("type") != "object":
            continue
        choice = {"type": "function", "function": {"name": "f"}}
        said = walk(matcher(made, tool_choice=choice, tools=[function(schema)]), rng, ends)
        if said is not None:
            yield schema, said


def walk(constraint: Matcher, rng: random.Random, ends: Sequence[int], most: int = 400) -> list[int] | None:
    """A reply, the token that ended it left out; None where it found no end."""
    said: list[int] = []
    while not constraint.finished:
        if len(said) == most:
            return None
        choices = ids_in(constraint.mask([]))
        over = [token for token in choices if token in ends]
        # Among hundreds of tokens that go on, those that end something are seldom drawn.
        token = rng.choice(over) if over and rng.random() < 0.3 else rng.choice(choices)
        assert constraint.take([token]) == 1
        said.append(token)
    return said[:-1] if said and said[-1] in ends else said
