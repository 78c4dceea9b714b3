"""The index of a vocabulary that llguidance makes of the tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from ondevice.generate.request import TokenMask
from ondevice.grammar.response_format import ToolChoice, answer_grammar
from ondevice.grammar.vocabulary import GrammarVocabulary
from ondevice.text.tokenizer import Tokenizer
from tests.grammar.walks import compiler, end_ids, ids_in, matcher
from tests.text.tokenizers_made import KINDS, byte_level, gemma_chat, gemma_like, llama_2, llama_like, metaspace_words

PREFIXED = [llama_2, metaspace_words]
"""These put a space in front of a text."""


@pytest.mark.parametrize("make", [byte_level, gemma_like, gemma_chat, llama_like])
def test_it_equals_the_index_of_the_tokenizer_s_file(make: Callable[[], Tokenizer]) -> None:
    from llguidance import LLTokenizer

    tokenizer = make()
    whole = json.loads(tokenizer._backend.to_str())
    for token in whole["added_tokens"]:
        token["special"] |= token["id"] in tokenizer.control_texts
    size, ends = tokenizer.vocab_size, end_ids(tokenizer)
    expected, found = LLTokenizer(json.dumps(whole), size, ends), GrammarVocabulary(tokenizer, size, ends).index()
    for token in range(size):
        assert found.decode_bytes([token]) == expected.decode_bytes([token])
        assert found.is_special_token(token) == expected.is_special_token(token)
    assert found.eos_tokens == expected.eos_tokens
    for text in ("a", "ab b", " a", '{"a": "é世"}', "def f(x):\n\treturn x\n"):
        assert found.tokenize_str(text) == expected.tokenize_str(text)


@pytest.mark.parametrize("make", [*KINDS, *PREFIXED])
def test_forced_texts_have_the_tokens_of_the_text(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    made = compiler(tokenizer)
    for text in ("ab b", " a", "the fox"):
        constraint = matcher(made, {"type": "choice", "choice": [text, f"{text}!"]})
        said = list[int]()
        while (token := constraint.forced([])) is not None:
            said += [token]
            assert constraint.take([token]) == 1
        assert b"".join(map(tokenizer.token_bytes, said)) == text.encode()
        assert said == tokenizer.encode_inside(text)
    made.close()


@pytest.mark.parametrize("make", [*KINDS, *PREFIXED])
def test_a_begun_answer_is_continued(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    made = compiler(tokenizer)
    answer = answer_grammar({"type": "choice", "choice": ["ab b", "b"]})
    found = made.constraint(answer, ToolChoice.of(None, None), False, [2], begun="ab")
    assert found is not None
    assert {tokenizer.token_bytes(token) for token in allowed(tokenizer, found.mask([]))} == {b" "}
    made.close()


def allowed(tokenizer: Tokenizer, mask: TokenMask) -> list[int]:
    return [token for token in ids_in(mask) if token < tokenizer.vocab_size]


def test_an_interrupt_while_llguidance_calls_the_tokenizer_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = gemma_chat()
    made = compiler(tokenizer)
    constraint = matcher(made, {"type": "choice", "choice": ["ab b"]})
    assert not constraint.finished  # the index is made

    def interrupt(text: str) -> list[int]:
        raise KeyboardInterrupt

    monkeypatch.setattr(tokenizer, "encode_inside", interrupt)
    with pytest.raises(KeyboardInterrupt):
        constraint.forced([])
    made.close()
