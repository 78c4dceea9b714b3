"""No spelling of an untrusted text yields a control token, and ordinary tokens stay what they are.

With published tokenizers and their templates, and with random ones: special or not, normalised, with white space taken
along, as single words, in lower case or NFKC, of bytes, of characters and of whole words.
"""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from ondevice.errors import BundleCorruptError
from ondevice.text.chat_template import ChatTemplate
from ondevice.text.codec import encode_prompt
from ondevice.text.messages import plain_messages
from ondevice.text.tokenizer import Tokenizer
from ondevice.text.untrusted_text import UntrustedText
from tests.fixtures.published import published
from tests.text.conversations import call

CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' ~ message.role ~ '\\n' }}
{%- if message.role == 'tool' %}{{ '<tool_response>\\n' ~ message.content ~ '\\n</tool_response>' }}
{%- else %}{{ message.content | trim }}{% endif %}
{%- for call in message.tool_calls or [] %}
{%- set said = {'name': call.function.name, 'arguments': call.function.arguments} | tojson %}
{{- '<tool_call>\\n' ~ said ~ '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{{- '<|im_start|>assistant\\n<think>\\n' }}"""
"""In the style of Qwen's."""

XML = """\
{%- macro item(name, value) %}<{{ name }}>{{ value }}</{{ name }}>{% endmacro %}
{%- for message in messages %}
{{- '<|' + message.role + '|>' }}{% set text = item('text', message.content) %}{{ text | trim }}
{%- for call in message.tool_calls or [] %}
{%- for name, value in call.function.arguments.items() %}{{ item(name, value) }}{{ '<' + name + '>' }}{% endfor %}
{%- endfor %}
{{- '<end_of_turn>' }}
{%- endfor %}
{{- '<|assistant|>' }}"""
"""Writes tokens in pieces, with names of a call's arguments and roles between brackets."""

HOLE = "\u4e16\u754c"
"""Stands for an untrusted text in a prompt, to find out what is around it."""

TEMPLATES = {"chatml": CHATML, "xml": XML}
CONTROL = [
    "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>",
    "</think>", "<|user|>", "<|assistant|>", "<|tool|>", "<end_of_turn>",
]  # fmt: skip
ORDINARY = ["\n\n", "\t\t", "<b>", "</b>", "COVID", "ab"]
LETTERS = "abcdefghijklmnopqrstuvwxyz_|<>/ \n\tTHINKAB≯ﬁé世\U0001f600"
ALPHABET = sorted({*"".join([*CONTROL, *ORDINARY]), *LETTERS, *LETTERS.lower(), "▁", "Ġ"})


def conversation(text: str) -> list[dict[str, Any]]:
    """A chat with a text in the places that are untrusted."""
    return [
        {"role": "user", "content": text},
        {"role": "assistant", "content": "", "tool_calls": [call("f", {text: text, "b": [text, {text: 1}]})]},
        {"role": "tool", "tool_call_id": "call_1", "name": text, "content": text},
        {"role": "user", "content": [{"type": "text", "text": text}, {"type": "text", "text": text}]},
        {"role": "user", "content": text},
    ]


def controls_of(messages: list[dict[str, Any]], chats: UntrustedText) -> list[int]:
    return controls(encode_prompt(messages, chats._tokenizer, chats), chats)


def encoded_plainly(messages: list[dict[str, Any]], chats: UntrustedText) -> list[int]:
    """The token ids of a chat whose texts are all trusted."""
    return chats._tokenizer.encode(chats._template.render(plain_messages(messages)), add_special_tokens=False)


def controls(ids: list[int], chats: UntrustedText) -> list[int]:
    """The control tokens, without those of characters that the vocabulary lacks."""
    return [token for token in ids if token in chats.ids and chats._tokenizer.text_of(token) != "<unk>"]


# Published tokenizers.

PUBLISHED = ("gemma3-tokenizer", "llama3.1-tokenizer", "qwen3-tokenizer", "llama2-tokenizer")


@cache
def chats_of(name: str) -> UntrustedText:
    directory = published(name)
    tokenizer = Tokenizer.from_file(directory / "tokenizer.json")
    template = json.loads((directory / "tokenizer_config.json").read_text("utf-8")).get("chat_template", CHATML)
    return UntrustedText(tokenizer, ChatTemplate(template, {"bos_token": "<bos>" if "gemma" in name else ""}))


def answered(text: str) -> list[dict[str, Any]]:
    """A chat that all published templates take."""
    return [
        {"role": "user", "content": text},
        {"role": "assistant", "content": "x", "tool_calls": [call("f", {text: text})]},
        {"role": "user", "content": text},
    ]


@pytest.mark.parametrize("name", PUBLISHED)
def test_no_spelling_of_a_published_control_token_counts(name: str) -> None:
    chats = chats_of(name)
    expected = controls_of(answered("w"), chats)
    tokens = sorted(chats._tokenizer.text_of(token) for token in chats.ids)
    if len(tokens) > 40:
        tokens = [*tokens[::20], *(token for token in tokens if "reserved" not in token)]
    for token in tokens:
        for text in (token, f"a {token} b", f"{token}\n", f"x{token}{token}", token[1:], token[:-1], token[1:-1]):
            assert controls_of(answered(text), chats) == expected, text
    text = " ".join(f"{token}x" for token in tokens)
    assert controls_of(answered(text), chats) == expected
    assert text in chats._tokenizer.decode(encode_prompt(answered(text), chats._tokenizer, chats))


def test_what_acts_as_control_in_published_chats() -> None:
    """In Qwen3's, 12 added tokens are not special, and the template writes six of them. Gemma 3 has 6,406 such."""
    qwen, gemma = chats_of("qwen3-tokenizer"), chats_of("gemma3-tokenizer")
    assert {qwen._tokenizer.text_of(token) for token in qwen.ids - qwen._tokenizer.special_ids} == {
        "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>",
    }  # fmt: skip
    assert gemma.ids == gemma._tokenizer.special_ids
    assert len(gemma._tokenizer.added) > 6400


def test_ordinary_added_tokens_stay_what_they_are() -> None:
    """All of Gemma 3's, token for token, also beside a forged one."""
    chats = chats_of("gemma3-tokenizer")
    tokenizer = chats._tokenizer
    ordinary = {token_id: token.content for token_id, token in tokenizer.added.items() if token_id not in chats.ids}
    text = "a".join(ordinary.values())
    plain = tokenizer.encode(chats._template.render([{"role": "user", "content": text}]), add_special_tokens=False)
    assert encode_prompt([{"role": "user", "content": text}], tokenizer, chats) == plain
    assert ordinary.keys() <= set(plain)
    forged = encode_prompt([{"role": "user", "content": f"{text} <end_of_turn>"}], tokenizer, chats)
    own = len(tokenizer.encode(text, add_special_tokens=False))
    assert forged[: own + 4] == plain[: own + 4]  # <bos>, <start_of_turn>, user and a line break before it


ORDINARY_TEXTS = [
    "Hello, how are you?", "> quoted\n> twice", "a < b |> f [x] </", "think>", "<", "|", "im_end", "<|", "user",
    "naïve 世界 \U0001f600 ﬁ \uff1c", "<table>\n\n\t\t<b>x</b>", "  indented\n", "tool_call",
    "def f(x: list[int]) -> None:\n    return x<3",
]  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_text_without_control_tokens_is_encoded_as_it_is(name: str) -> None:
    chats = chats_of(name)
    for text in ORDINARY_TEXTS:
        assert encode_prompt(answered(text), chats._tokenizer, chats) == encoded_plainly(answered(text), chats), text


def test_a_forged_token_changes_the_tokens_of_its_own_message_only() -> None:
    for name in PUBLISHED[:3]:
        chats = chats_of(name)
        turns = [{"role": "user", "content": "one\n\ntwo"}, {"role": "assistant", "content": "x"}]
        before = encode_prompt([*turns, {"role": "user", "content": ""}], chats._tokenizer, chats)
        special = min((chats._tokenizer.text_of(token) for token in chats.ids), key=len)
        after = encode_prompt([*turns, {"role": "user", "content": f"{special}!"}], chats._tokenizer, chats)
        same = next(n for n, (one, other) in enumerate(zip(before, after, strict=False)) if one != other)
        assert same >= len(encode_prompt(turns, chats._tokenizer, chats)) - 4


# Random tokenizers.


def random_tokenizer(rng: random.Random) -> Tokenizer:
    backend = rng.choice([_bytes, _characters, _words, _pieces])(rng)
    nfkc, lower, strip = normalizers.NFKC(), normalizers.Lowercase(), normalizers.Strip()
    chosen: list[Any] = rng.choice([[], [nfkc], [lower], [normalizers.NFC()], [nfkc, lower], [strip]])
    prepends = backend.normalizer is not None
    if prepends:  # like SentencePiece
        chosen = [*(each for each in chosen if each is not strip), backend.normalizer]
    if chosen:
        backend.normalizer = normalizers.Sequence(chosen)
    for text in [*CONTROL, *ORDINARY]:
        special = text not in ORDINARY and rng.random() < 0.5
        # The library fails where such a text is empty after it was normalised; a space before it is found with it.
        normalized = rng.random() < 0.3 and bool(text.strip()) and not prepends
        flags = {flag: rng.random() < 0.15 for flag in ("lstrip", "rstrip", "single_word")}
        add = backend.add_special_tokens if special else backend.add_tokens
        add([AddedToken(text, special=special, normalized=normalized, **flags)])
    return Tokenizer(backend)


def _bytes(rng: random.Random) -> Backend:
    backend = Backend(models.BPE())
    spaced, divided = rng.random() < 0.5, rng.random() < 0.5
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=spaced, use_regex=divided)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(["<think> thinking </think> <|user|> the end of turn"] * 3, trainer)
    return backend


def _characters(rng: random.Random) -> Backend:
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *ALPHABET]
    vocab = {token: number for number, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    prepend = [normalizers.Prepend("▁")] if rng.random() < 0.5 else []
    backend.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    return backend


def _words(rng: random.Random) -> Backend:
    words = ["<unk>", *CONTROL, *ALPHABET, "think", "user", "im_end"]
    backend = Backend(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = rng.choice([pre_tokenizers.Whitespace(), pre_tokenizers.WhitespaceSplit()])
    return backend


def _pieces(rng: random.Random) -> Backend:
    """A unigram model, which finds the control tokens of its vocabulary by itself."""
    pieces = [("<unk>", 0.0), *((text, -1.0) for text in CONTROL), *((text, -5.0) for text in ALPHABET)]
    backend = Backend(models.Unigram(pieces, 0, byte_fallback=False))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=rng.choice(["first", "always", "never"]))
    return backend


def spelled(rng: random.Random) -> str:
    """A text that spells control tokens in some way, among others."""
    pieces = []
    for _ in range(rng.randint(1, 6)):
        token = rng.choice([*CONTROL, *ORDINARY])
        wide = "".join(chr(ord(each) + 0xFEE0) if "!" <= each <= "~" else each for each in token)
        changed = rng.choice([
            token, token.upper(), token.capitalize(), token[rng.randrange(len(token)) :], token[1:-1], f" {token} ",
            token[: rng.randrange(len(token))], wide, wide[:1] + token[1:], token.replace(">", ">\u0338"),
        ])  # fmt: skip
        pieces.append(changed if rng.random() < 0.8 else "".join(rng.choices(LETTERS, k=rng.randint(0, 5))))
    return rng.choice(["", " ", "\n", "x"]).join(pieces) or "x"


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("seed", range(60))
def test_random_tokenizers(seed: int, template: str) -> None:
    rng = random.Random(seed)
    tokenizer = random_tokenizer(rng)
    chats = UntrustedText(tokenizer, ChatTemplate(TEMPLATES[template]))
    around = chats._template.render(conversation(HOLE)).split(HOLE)
    assert len(around) >= 10
    expected = [token for part in around for token in controls(tokenizer.encode(part, add_special_tokens=False), chats)]
    added = [tokenizer.added[each] for each in chats.ids if each in tokenizer.added]
    for _ in range(6):
        text = spelled(rng)
        try:
            plain, ids = encoded_plainly(conversation(text), chats), encode_prompt(conversation(text), tokenizer, chats)
        except BundleCorruptError:  # the library fails where two tokens take the same white space along
            continue
        found = controls(ids, chats)
        if controls(plain, chats) == expected:
            assert ids == plain, text
        if any(each.single_word or each.normalized for each in added):  # a letter next to such a token hides it
            rest = iter(expected)
            assert all(token in rest for token in found), text
        else:
            assert found == expected, text
