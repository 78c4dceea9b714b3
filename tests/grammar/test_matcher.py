"""A constraint's answers depend on the tokens before, and on nothing that was asked."""

from __future__ import annotations

import random

import numpy as np
import pytest

from ondevice.errors import GrammarError, UsageError
from ondevice.grammar.matcher import Compiler, Matcher
from tests.grammar.walks import compiler, end_ids, ids_in, ids_of, matcher, schema_format, walk
from tests.text.tokenizers_made import gemma_chat

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["circle", "square"]},
        "n": {"type": "integer", "maximum": 99},
    },
    "required": ["name", "kind"],
    "additionalProperties": False,
}
TOKENIZER = gemma_chat()
ENDS = end_ids(TOKENIZER)


@pytest.fixture
def constraint(made: Compiler) -> Matcher:
    return matcher(made, schema_format(SCHEMA))


def ids(text: str) -> list[int]:
    return ids_of(TOKENIZER, text)


def named(text: str) -> str:
    """The tokens of a text, named in Lark by their ids."""
    return " ".join(f"<[{token}]>" for token in ids(text))


LARKS = {
    "ids": "start: " + named("é😀世界"),
    "ids and text": f'start: (item ",")+ {named("end")} ";"\nitem: {named("one,two")} | {named("is")} "is" /[a-z]/',
    "control tokens": 'start: <|channel> "thought" <channel|> ("a" <|tool_call> "b" <tool_call|>)+',
    "stop": 'start: text ";" "end"\ntext[stop=";"]: /[a-z]*/',
    "max_tokens": 'start: text ";" text ";"\ntext[max_tokens=3]: /[a-z]*/',
}
"""Grammars after whose tokens llguidance's `rollback` goes to a wrong place, or fails, and some beside these."""


def test_what_only_one_text_can_follow_is_forced(constraint: Matcher) -> None:
    text = ids('{"name": "')
    path: list[int] = []
    while (token := constraint.forced(path)) is not None:
        path.append(token)
    assert path == text[: len(path)]
    assert len(path) >= len(ids('{"name":'))  # the space may yet be a part of a longer token
    for length in range(len(path)):
        assert ids_in(constraint.mask(path[:length])) == [path[length]]


@pytest.mark.parametrize("name", ["schema", *LARKS])
def test_it_says_the_same_whatever_was_asked_before(made: Compiler, name: str) -> None:
    wanted = schema_format(SCHEMA) if name == "schema" else {"type": "lark", "lark": LARKS[name]}
    rng = random.Random(1)
    for seed in range(6):
        reply = walk(matcher(made, wanted), random.Random(seed), ENDS)
        assert reply is not None
        fresh = matcher(made, wanted)
        expected = []
        for token in reply:
            expected.append((fresh.forced([]), fresh.mask([]).copy()))
            fresh.take([token])
        asked = matcher(made, wanted)
        taken = 0
        while taken < len(reply):
            for _ in range(8):  # here and there, right and wrong
                length = rng.randint(0, min(9, len(reply) - taken - 1))
                path = reply[taken : taken + length]
                question = rng.random()
                if question < 0.3:
                    assert asked.allows(path)
                elif question < 0.5:
                    token = rng.randrange(TOKENIZER.vocab_size)
                    asked.allows([*path, token])
                elif question < 0.7:
                    assert asked.forced(path) == expected[taken + length][0]
                else:
                    np.testing.assert_array_equal(asked.mask(path), expected[taken + length][1])
            count = rng.randint(1, 4)
            assert asked.take(reply[taken : taken + count]) == len(reply[taken : taken + count])
            taken += count
            assert asked.position == 1 + min(taken, len(reply))
        assert asked.finished == fresh.finished


def test_fewer_forced_tokens_are_taken_than_were_asked_about(made: Compiler) -> None:
    """As where the controller asks a drafter for fewer tokens than it forecast, which depends on the time."""
    said = ids("é😀世界")
    for asked in range(1, len(said) + 1):
        for taken in range(asked):
            constraint = matcher(made, {"type": "lark", "lark": LARKS["ids"]})
            assert constraint.allows(said[:asked])
            assert constraint.take(said[:taken]) == taken
            assert [constraint.forced(said[taken:end]) for end in range(taken, len(said))] == said[taken:]
            assert constraint.take(said[taken:]) == len(said) - taken
            assert constraint.finished


def test_a_token_is_allowed_that_its_mask_has(constraint: Matcher) -> None:
    start = ids('{"name": "a')
    assert constraint.take(start) == len(start)
    has = set(ids_in(constraint.mask([])))
    for token in range(TOKENIZER.vocab_size):
        assert constraint.allows([token]) == (token in has)
    assert not has & set(ENDS)


def test_a_reply_that_is_over_takes_nothing_more(constraint: Matcher) -> None:
    reply = ids('{"name": "ab", "kind": "circle"}')
    assert constraint.take([*reply, ENDS[0], 9]) == len(reply)
    assert constraint.finished
    assert not constraint.allows([ENDS[0]])
    assert constraint.forced([]) is None
    assert len(ids_in(constraint.mask([]))) >= TOKENIZER.vocab_size


def test_a_token_that_ends_the_reply_is_one_of_it(made: Compiler) -> None:
    constraint = matcher(made, {"type": "regex", "regex": "a+"})
    assert constraint.take(ids("aa")) == 2
    assert not constraint.finished
    assert set(ENDS) <= set(ids_in(constraint.mask([])))
    assert constraint.take([ENDS[1], ENDS[0]]) == 1
    assert constraint.finished


def test_what_is_not_allowed_cannot_be_taken(constraint: Matcher) -> None:
    assert not constraint.allows(ids("x"))
    assert constraint.forced(ids("x")) is None
    assert ids_in(constraint.mask(ids("x"))) == []
    with pytest.raises(GrammarError, match="does not allow"):
        constraint.take(ids("x"))


def test_replies_with_characters_of_several_tokens(made: Compiler) -> None:
    """An emoji is four byte tokens here: no mask may end in the middle of one."""
    constraint = matcher(made, {"type": "choice", "choice": ["😀", "naïve\t\x7f", "世界"]})
    for text in ("😀", "naïve\t\x7f", "世界"):
        assert constraint.allows(ids(text))
    assert not constraint.allows([*ids("😀")[:2], *ids("a")])
    assert constraint.allows(ids("😀")[:2])
    assert not set(ENDS) & set(ids_in(constraint.mask(ids("😀")[:2])))


def test_the_index_is_made_once_and_later(made: Compiler) -> None:
    other = compiler(TOKENIZER)
    vocabulary = other._vocabulary
    assert vocabulary is not None
    assert vocabulary._index is None
    first = matcher(other, {"type": "json_object"})
    assert first.allows(ids("{"))
    index = vocabulary._index
    assert index is not None
    assert matcher(other, {"type": "regex", "regex": "b"}).allows(ids("b"))
    assert vocabulary._index is index
    other.close()


def test_a_model_that_another_thread_has_closed_says_so() -> None:
    other = compiler(TOKENIZER)
    other.close()
    with pytest.raises(UsageError, match="this model is closed"):
        matcher(other, {"type": "json_object"})


def test_a_grammar_that_grows_too_large_is_an_error_of_one_line() -> None:
    class Broken:
        """As llguidance's matcher is where it reached one of its limits."""

        def is_stopped(self) -> bool:
            return False

        def compute_ff_tokens(self) -> list[int]:
            return []

        def unsafe_compute_mask_ptr(self, address: int, size: int) -> None: ...

        def is_error(self) -> bool:
            return True

        def get_error(self) -> str:
            return "parser error: Too many items (limit 50000; mask)\n<state>\nTokens: ..."

    constraint = Matcher(Broken, 1, 300)  # type: ignore[arg-type]
    with pytest.raises(GrammarError, match=r"any further: parser error: Too many items \(limit 50000; mask\)$"):
        constraint.mask([])
