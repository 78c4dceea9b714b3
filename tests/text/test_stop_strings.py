import random

import pytest

from ondevice.errors import UsageError
from ondevice.text.reply_stream import ReplyStream, StopStrings
from tests.text.tokenizers_made import KINDS, byte_level, random_ids


def naive(pieces: list[str], stops: list[str]) -> tuple[str, int]:
    """Character by character over the whole text: the kept text, and how many pieces it needs."""
    text = "".join(pieces)
    kept = next(
        (
            min(text[:end].rfind(stop) for stop in stops if text[:end].endswith(stop))
            for end in range(1, len(text) + 1)
            if text[:end].endswith(tuple(stops))
        ),
        None,
    )
    if kept is None:
        return text, len(pieces)
    within = max(count for count in range(len(pieces) + 1) if len("".join(pieces[:count])) <= kept)
    return text[:kept], within + (len("".join(pieces[:within])) < kept)


def test_random_streams_agree_with_the_naive_search():
    rng = random.Random(3)
    for _ in range(5000):
        pieces = ["".join(rng.choices("ab", k=rng.randrange(4))) for _ in range(rng.randrange(12))]
        stops = ["".join(rng.choices("ab", k=rng.randrange(1, 6))) for _ in range(rng.randrange(1, 4))]
        stream = StopStrings(stops)
        text = "".join(map(stream.push, pieces)) + stream.finish()
        assert (text, stream.final_tokens) == naive(pieces, stops), (pieces, stops)


def test_tokens_are_final_one_after_the_other_and_never_given_back():
    """Whatever was final before a stop string was found belongs to the reply."""
    rng = random.Random(4)
    for _ in range(2000):
        pieces = ["".join(rng.choices("ab", k=rng.randrange(4))) for _ in range(rng.randrange(12))]
        stops = ["".join(rng.choices("ab", k=rng.randrange(2, 6)))]
        stream, seen, given = StopStrings(stops), [0], ""
        for piece in pieces:
            given += stream.push(piece)
            seen.append(stream.final_tokens)
            assert len("".join(pieces[: stream.final_tokens])) <= len(given) or stream.found is not None
        given += stream.finish()
        seen.append(stream.final_tokens)
        assert seen == sorted(seen)


def test_text_that_cannot_become_a_stop_string_is_given_at_once():
    stream = StopStrings("\n\n")
    assert [stream.push(piece) for piece in ["a", "b\n", "c", "\n", "\n", "d"]] == ["a", "b", "\nc", "", "", ""]
    assert stream.found is not None
    assert stream.final_tokens == 3


def test_a_token_that_is_only_partly_kept_counts():
    stream = StopStrings(["XY"])
    assert stream.push("abX") == "ab"
    assert stream.push("Y") == ""
    assert stream.final_tokens == 1


def test_the_end_gives_up_what_was_held():
    stream = StopStrings("stop")
    assert stream.push("a st") == "a "
    assert stream.finish("op") == ""
    assert stream.found is not None
    stream = StopStrings("stop")
    assert stream.push("a st") == "a "
    assert stream.finish() == "st"


@pytest.mark.parametrize("stops", [[""], ["a", ""], [3]])
def test_a_stop_string_must_have_characters(stops):
    with pytest.raises(UsageError, match="non-empty"):
        StopStrings(stops)


@pytest.mark.parametrize("make", KINDS)
def test_batches_change_nothing(make):
    tokenizer = make()
    rng = random.Random(11)
    for _ in range(100):
        ids = random_ids(tokenizer, rng, 30)
        stops = [text for text in ("a", " a", "é\ufffd", "世") if rng.random() < 0.4]
        one = ReplyStream(tokenizer, stops)
        text = "".join(one.feed([token_id]).text for token_id in ids) + one.finish().text
        many = ReplyStream(tokenizer, stops)
        cut = rng.randrange(30)
        assert many.feed(ids[:cut]).then(many.feed(ids[cut:])).then(many.finish()).text == text
        assert (many.stopped, many.final_tokens) == (one.stopped, one.final_tokens)
        assert text == naive([tokenizer.decode(ids)], stops)[0] if stops else tokenizer.decode(ids)


def test_a_stop_string_inside_a_drafted_batch_cuts_the_rest_of_it():
    tokenizer = byte_level()
    ids = tokenizer.encode("one two\n\nthree", add_special_tokens=False)
    stream = ReplyStream(tokenizer, ["\n\n"])
    assert stream.feed(ids).then(stream.finish()).text == "one two"
    assert stream.stopped
    assert tokenizer.decode(ids[: stream.final_tokens]) == "one two"
