import random

import pytest

from ondevice.text.reply_stream import WINDOW, Detokenizer, TokenOffsets
from tests.text.tokenizers_made import KINDS, SENTENCES, byte_level, gemma_like, random_ids


@pytest.mark.parametrize("make", KINDS)
def test_random_tokens_stream_to_the_text_of_a_full_decode(make):
    tokenizer = make()
    rng = random.Random(7)
    for _ in range(300):
        ids = random_ids(tokenizer, rng, rng.randrange(1, 60))
        detokenizer = Detokenizer(tokenizer)
        text = "".join(map(detokenizer.feed, ids)) + detokenizer.flush()
        assert text == tokenizer.decode(ids), ids


@pytest.mark.parametrize("make", [byte_level, gemma_like])
def test_what_was_given_is_final(make):
    tokenizer = make()
    ids = tokenizer.encode("".join(SENTENCES))
    detokenizer, text = Detokenizer(tokenizer), ""
    for token_id in ids:
        text += detokenizer.feed(token_id)
        assert "\N{REPLACEMENT CHARACTER}" not in text
        assert tokenizer.decode(ids).startswith(text)


def test_a_character_comes_with_its_last_byte():
    tokenizer = byte_level()
    ids = [tokenizer._backend.token_to_id(piece) for piece in "ðŁĺĢ"]
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.feed(token_id) for token_id in ids if token_id is not None] == ["", "", "", "😀"]


def test_a_byte_run_comes_with_the_token_after_it():
    tokenizer = gemma_like()
    ids = tokenizer.encode("😀a", add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.feed(token_id) for token_id in ids] == ["", "", "", "", "😀a"]


def test_the_model_writing_replacement_characters_does_not_stall_the_stream():
    tokenizer = byte_level()
    ids = tokenizer.encode("\ufffd" * 200, add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer)
    text = "".join(map(detokenizer.feed, ids))
    assert len(text) == 199
    assert len(detokenizer._window) <= WINDOW + 4
    assert detokenizer.flush() == "\ufffd"


@pytest.mark.parametrize("piece", ["<0xE2>", "a"])
def test_cost_does_not_grow_with_the_text(piece, monkeypatch):
    tokenizer = gemma_like()
    token_id = tokenizer._backend.token_to_id(piece)
    assert token_id is not None
    decoded: list[int] = []
    decode = tokenizer.decode

    def counted(ids, *options, **named):
        decoded.append(len(ids))
        return decode(ids, *options, **named)

    monkeypatch.setattr(tokenizer, "decode", counted)
    detokenizer = Detokenizer(tokenizer)
    for _ in range(2_000):
        detokenizer.feed(token_id)
    assert sum(decoded) <= 2_000 * 2 * WINDOW
    assert detokenizer.flush() in ("", "\ufffd" * 2_000)


@pytest.mark.parametrize("make", [byte_level, gemma_like])
@pytest.mark.parametrize(
    "text", ["\r\na", "a\u20ac\U0001d518\U0001d52bb", "\u20ac\u20ac", "\U0001f600 a\u4e16b", "\u16a0" * 99]
)
def test_a_token_begins_where_its_character_does(make, text):
    tokenizer = make()
    ids = tokenizer.encode(text, add_special_tokens=False)
    parts = list(map(tokenizer.token_bytes, ids))
    before = [b"".join(parts[:number]).decode(errors="ignore") for number in range(len(parts))]
    assert TokenOffsets(tokenizer).add(ids) == list(map(len, before))


@pytest.mark.parametrize("make", [byte_level, gemma_like])
def test_a_token_begins_behind_a_character_that_is_never_completed(make):
    tokenizer = make()
    cut = tokenizer.encode("a\U0001d518", add_special_tokens=False)[:-1]
    ids = [*cut, *tokenizer.encode(" x", add_special_tokens=False)]
    before = tokenizer.decode(cut)
    assert before.endswith("\ufffd")
    assert TokenOffsets(tokenizer, 0).add(ids)[len(cut)] == len(before)
