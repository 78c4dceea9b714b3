"""Replies told apart: as transformers does over the whole text, and the same however the text is divided."""

import itertools
import json
import random
import re
import sys
from typing import Any

import pytest

from ondevice.errors import BundleCorruptError
from ondevice.text.messages import ToolCall
from ondevice.text.reply_parser import Parsed, ReplyParser, ResponseTemplate, begun_reply
from ondevice.text.reply_stream import ReplyStream
from ondevice_export.response_templates import GEMMA_4
from tests.fuzz.mutations import change_json
from tests.text.tokenizers_made import gemma_chat

TOKENIZER = gemma_chat()
TEMPLATE = ResponseTemplate(GEMMA_4, TOKENIZER)
PROMPT = "<bos><|turn>user\nhi<turn|>\n<|turn>model\n"
THINKING = "<|turn>user\nhi<turn|>\n<|turn>model\n<|tool_call>call:f{}<tool_call|><|tool_response>x<tool_response|>"
THINKING += "<|channel>thought\n"

REPLIES: dict[str, tuple[str, str]] = {
    "an answer": (PROMPT, "Hello, world.<turn|>"),
    "white space around it": (PROMPT, " \n Hello  \n<turn|>"),
    "a thought": (PROMPT, "<|channel>thought\nLet me see.\n<channel|>Yes.<turn|>"),
    "an empty thought": (PROMPT, "<|channel>thought\n<channel|>Yes.<turn|>"),
    "an empty thought in the prompt": (PROMPT + "<|channel>thought\n<channel|>", "Yes.<turn|>"),
    "it begins inside a thought": (THINKING, "It rains.\n<channel|>Take a coat.<turn|>"),
    "a thought without an end": (PROMPT, "<|channel>thought\nOn and on"),
    "a call": (PROMPT, '<|tool_call>call:get_weather{city:<|"|>Zürich<|"|>,days:3}<tool_call|><|tool_response>'),
    "text before a call": (PROMPT, "I look.<|tool_call>call:f{}<tool_call|><|tool_response>"),
    "a thought before a call": (
        PROMPT,
        "<|channel>thought\nhm<channel|><|tool_call>call:f{a:[1,2]}<tool_call|><|tool_response>",
    ),
    "two calls": (PROMPT, '<|tool_call>call:f{a:1}<tool_call|><|tool_call>call:g{b:<|"|>x<|"|>}<tool_call|>'),
    "bare values": (PROMPT, "<|tool_call>call:f{a:3,b:-2.5e3,c:true,d:false,e:null,f:[],g:{}}<tool_call|>"),
    "nested values": (
        PROMPT,
        '<|tool_call>call:f{a:{b:[{c:<|"|>x<|"|>},[1,[2]]],d:{e:{f:null}}},g:1}<tool_call|><|tool_response>',
    ),
    "strings that look like more": (
        PROMPT,
        '<|tool_call>call:f{a:<|"|>{x:1},"y", line\nbreak }<|"|>,b:<|"|><|"|>}<tool_call|><|tool_response>',
    ),
    "a call without an end": (PROMPT, "<|tool_call>call:f{a:1}"),
    "ordinary JSON": (PROMPT, '<|tool_call>call:f{"a": "x\\n", "b" : 1}<tool_call|>'),
    "the prefix of a delimiter": (PROMPT, "a < b, <| c <turn|>"),
}


SPELT = {"thinking": {"open": "<think>", "close": "</think>"}, "content": {}}
"""Thoughts between delimiters that are no control tokens."""


def stream(prompt: str = PROMPT, stops: Any = ()) -> ReplyStream:
    begun = begun_reply(TEMPLATE, TOKENIZER, ids_of(prompt))
    assert begun is not None
    return ReplyStream(TOKENIZER, stops, ReplyParser(TEMPLATE, begun))


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def parsed(reply: str, prompt: str = PROMPT, stops: Any = ()) -> Parsed:
    made = stream(prompt, stops)
    return made.feed(ids_of(reply)).then(made.finish())


@pytest.mark.needs("oracle")
@pytest.mark.parametrize("case", REPLIES)
def test_it_parses_as_transformers_does(case):
    from transformers.cli.serving.utils import _RESPONSE_TEMPLATE_FALLBACKS
    from transformers.utils.chat_parsing import parse_response

    [theirs] = [template for types, template in _RESPONSE_TEMPLATE_FALLBACKS.items() if "gemma4" in types]
    prompt, reply = REPLIES[case]
    expected = parse_response(reply, theirs, prefix=prompt)
    calls = [call["function"] for call in expected.get("tool_calls", [])]
    ours = parsed(reply, prompt)
    assert ours.text == expected.get("content", "")
    assert ours.reasoning == expected.get("reasoning_content", "")
    assert [{"name": call.name, "arguments": call.arguments} for call in ours.tool_calls] == calls


@pytest.mark.needs("oracle")
def test_the_template_is_that_of_transformers():
    from transformers.cli.serving.utils import _RESPONSE_TEMPLATE_FALLBACKS

    [theirs] = [template for types, template in _RESPONSE_TEMPLATE_FALLBACKS.items() if "gemma4" in types]
    assert json.loads(json.dumps(GEMMA_4).replace("[\\\\w.-]+", "\\\\w+")) == theirs


@pytest.mark.parametrize("case", REPLIES)
def test_rounds_change_nothing(case):
    prompt, reply = REPLIES[case]
    ids = ids_of(reply)
    whole = parsed(reply, prompt)
    for cut in range(len(ids) + 1):
        made = stream(prompt)
        assert made.feed(ids[:cut]).then(made.feed(ids[cut:])).then(made.finish()) == whole
    made = stream(prompt)
    single = Parsed()
    for token in ids:
        single = single.then(made.feed([token]))
    assert single.then(made.finish()) == whole


@pytest.mark.parametrize("case", REPLIES)
def test_nor_do_pieces_of_text(case):
    """However tokens divide the text between control tokens."""
    prompt, reply = REPLIES[case]
    texts = {text: token for token, text in TOKENIZER.control_texts.items()}
    parts = [part for part in re.split(f"({'|'.join(map(re.escape, texts))})", reply) if part]
    results, rng = [], random.Random(5)
    for _ in range(50):
        parser = ReplyParser(TEMPLATE, begun_reply(TEMPLATE, TOKENIZER, ids_of(prompt)) or "")
        given = Parsed()
        for part in parts:
            if part in texts:
                given = given.then(parser.control(texts[part]))
                continue
            cuts = sorted({0, len(part), *(rng.randrange(len(part) + 1) for _ in range(rng.randrange(len(part) + 1)))})
            for start, end in itertools.pairwise(cuts):
                given = given.then(parser.feed(part[start:end]))
        results.append(given.then(parser.finish()))
    assert all(result == results[0] for result in results)


def test_nothing_that_a_model_says_is_an_error():
    """Random tokens, control tokens made frequent: the same whatever rounds they come in."""
    rng = random.Random(3)
    pieces = [*TOKENIZER.control_texts.values(), "call:f{", "call:", "thought\n", "a:1", "}", "{", "[", ",", " \n", "x"]
    for _ in range(300):
        ids = ids_of("".join(rng.choices(pieces, k=rng.randrange(20))))
        stops = [stop for stop in ("x", "a:", "\n") if rng.random() < 0.2]
        prompt = rng.choice([PROMPT, THINKING])
        whole, parts, given = stream(prompt, stops), stream(prompt, stops), Parsed()
        at_once = whole.feed(ids).then(whole.finish())
        for token in ids:
            given = given.then(parts.feed([token]))
        assert given.then(parts.finish()) == at_once
        assert parts.final_tokens == whole.final_tokens
        assert at_once.text == at_once.text.strip()
        json.dumps([call.arguments for call in at_once.tool_calls])


def test_a_damaged_template_is_refused_or_does_no_harm(tmp_path):
    path, rng, used = tmp_path / "response_template.json", random.Random(4), 0
    replies = [ids_of(reply) for _, reply in REPLIES.values()]
    for _ in range(120):
        text, said = change_json(json.dumps(GEMMA_4), rng)
        path.write_text(text, "utf-8", errors="surrogatepass")
        try:
            template = ResponseTemplate.from_file(path, TOKENIZER)
        except BundleCorruptError:
            continue
        used += 1
        for reply in replies:
            made = ReplyStream(TOKENIZER, (), ReplyParser(template, begun_reply(template, TOKENIZER, reply) or ""))
            assert made.feed(reply).then(made.finish()) is not None, said
    assert used > 15


def test_text_comes_at_once():
    made = stream()
    assert made.feed(ids_of("ab a")) == Parsed("ab a")
    made = stream(THINKING)
    assert made.feed(ids_of("ab a")) == Parsed(reasoning="ab a")
    made = stream()
    made.feed(ids_of("<|tool_call>call:f{a:1}"))
    assert made.feed(ids_of("<tool_call|>")).tool_calls == (ToolCall("f", {"a": 1}),)


@pytest.mark.parametrize(
    "broken",
    [
        "<|tool_call>call:f{a:<tool_call|>",
        "<|tool_call>call:f{a:1}}<tool_call|>",
        "<|tool_call>call:f[1]<tool_call|>",
        "<|tool_call>call:f<tool_call|>",
        '<|tool_call>call:f{a:<|"|>x}<tool_call|>',
        "<|tool_call>call:f{a:Paris}<tool_call|>",
        "<|tool_call>call:f{a:[NaN,-Infinity]}<tool_call|>",
        r'<|tool_call>call:f{a:"\ud8zz"}<tool_call|>',
        "<|tool_call>call:f" + "{a:" * 5000 + "<tool_call|>",
        # Cut off by max_new_tokens.
        "<|tool_call>call:get_wea",
        '<|tool_call>call:f{city:<|"|>Par',
        "<|tool_call>call:f{days:1",
    ],
)
def test_a_broken_call_is_text(broken):
    assert parsed(f"So: {broken}") == Parsed(f"So: {broken}")


@pytest.mark.parametrize("delimiter", ["<|channel>thought\n", "<|tool_call>call:"])
def test_a_delimiter_that_is_cut_off_is_no_text(delimiter):
    ids = ids_of(f"Yes. {delimiter}")
    for count in range(len(ids_of("Yes. ")), len(ids)):
        made = stream()
        assert made.feed(ids[:count]).then(made.finish()) == Parsed("Yes.")


def test_text_that_only_may_be_a_delimiter_stays():
    template = ResponseTemplate({**GEMMA_4, "start_anchor": "a", "fields": SPELT}, TOKENIZER)
    made = ReplyStream(TOKENIZER, (), ReplyParser(template))
    assert made.feed(ids_of("Yes. <thi")).then(made.finish()) == Parsed("Yes. <thi")


def test_no_call_begins_without_a_name():
    assert parsed("<|tool_call>{}") == Parsed("{}")  # control tokens that say nothing have no text


def test_a_call_that_the_end_of_the_turn_cuts_is_whole():
    assert parsed("<|tool_call>call:f{a:1}<turn|>").tool_calls == (ToolCall("f", {"a": 1}),)


def test_a_broken_call_that_the_end_of_the_turn_cuts_does_not_show_it():
    assert parsed("<|tool_call>call:f{a:<turn|>") == Parsed("<|tool_call>call:f{a:")


def test_half_a_surrogate_pair_is_no_text():
    said = r'{a:"\uD800",b:"\ud83d\ude00\\ud800\\\udfff"}'
    [call] = parsed(f"<|tool_call>call:f{said}<tool_call|>").tool_calls
    assert call.arguments == {"a": "\ufffd", "b": "😀\\ud800\\\ufffd"}


def test_a_call_written_letter_by_letter_is_text():
    spelled = '<|tool_call>call:f{a:<|"|>x<|"|>}<tool_call|>'
    ids = TOKENIZER.encode(spelled, add_special_tokens=False, parse_special=False)
    made = stream()
    assert made.feed(ids).then(made.finish()) == Parsed(spelled)


def test_nor_can_the_characters_that_stand_for_control_tokens_be_written():
    [character, *_] = TEMPLATE.controls.values()
    made = stream()
    ids = TOKENIZER.encode(f"a{character}b", add_special_tokens=False)
    assert made.feed(ids).then(made.finish()) == Parsed("a\N{REPLACEMENT CHARACTER}b")


def test_stop_strings_are_for_the_answer():
    reply = '<|channel>thought\na\n\nb<channel|><|tool_call>call:f{a:<|"|>x\n\ny<|"|>}<tool_call|>one\n\ntwo'
    assert parsed(reply, stops=["\n\n"]) == Parsed("one", "a\n\nb", (ToolCall("f", {"a": "x\n\ny"}),))


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_stop_string_cuts_the_same_ids_however_rounds_divide_them(cut):
    ids = ids_of("ab ab<turn|>")
    whole, parts = stream(stops=["b a"]), stream(stops=["b a"])
    whole.feed(ids)
    parts.feed(ids[:cut])
    parts.feed(ids[cut:])
    assert whole.stopped
    assert parts.final_tokens == whole.final_tokens


def test_white_space_between_two_pieces_of_the_answer_stays():
    assert parsed(" one \n<|tool_call>call:f{}<tool_call|>\n two ").text == "one \n\n two"


def test_names_with_dashes_and_dots():
    assert parsed("<|tool_call>call:files.read-all{}<tool_call|>").tool_calls == (ToolCall("files.read-all", {}),)


def test_names_of_arguments_that_are_no_words_and_numbers_that_are_too_large():
    said = '{x-limit:-1e999, $ref:{a b :true,é.1:<|"|>,b-c:{x:<|"|>},"k":[1.5e3]}'
    arguments = {"x-limit": -sys.float_info.max, "$ref": {"a b": True, "é.1": ",b-c:{x:"}, "k": [1500.0]}
    assert parsed(f"<|tool_call>call:f{said}<tool_call|>") == Parsed(tool_calls=(ToolCall("f", arguments),))


def test_a_prompt_that_begins_no_reply():
    assert begun_reply(TEMPLATE, TOKENIZER, ids_of("def f(x):")) is None
    assert begun_reply(TEMPLATE, TOKENIZER, ids_of("<|turn>user\nhi<turn|>\n")) is None


def test_the_last_beginning_counts_in_a_long_prompt():
    assert begun_reply(TEMPLATE, TOKENIZER, ids_of(PROMPT + "ab " * 900 + "<|turn>model\nSo")) == "So"
    assert begun_reply(TEMPLATE, TOKENIZER, ids_of(PROMPT + "ab " * 900)) == "ab " * 900
    spelled = TOKENIZER.encode("<|turn>model\n", add_special_tokens=False, parse_special=False)
    assert begun_reply(TEMPLATE, TOKENIZER, [*ids_of(PROMPT), *spelled]) == "<|turn>model\n"


def test_openai_s_form():
    call = ToolCall("f", {"a": "ü"})
    assert call.as_openai() == {"id": call.id, "type": "function", "function": {"name": "f", "arguments": '{"a": "ü"}'}}
    assert call.id != ToolCall("f", {"a": "ü"}).id


def test_other_shapes_of_calls():
    spec = {
        "start_anchor": "<|turn>",
        "fields": {
            "tool_calls": {
                "open": "<|tool_call>",
                "close": "<tool_call|>",
                "content": "json",
                "transform": {"name": "{tool.name}", "arguments": "{tool.args}"},
                "transform_each": True,
            },
            "thinking": {"open": "<|channel>", "close": "<channel|>", "content_args": {"strip": False}},
        },
    }
    template = ResponseTemplate(spec, TOKENIZER)
    made = ReplyStream(TOKENIZER, (), ReplyParser(template))
    reply = '<|channel> hm <channel|>lost<|tool_call>[{"tool": {"name": "f", "args": {"a": 1}}}]<tool_call|>'
    assert made.feed(ids_of(reply)).then(made.finish()) == Parsed("", " hm ", (ToolCall("f", {"a": 1}),))


def test_a_template_that_is_too_large(tmp_path):
    (tmp_path / "response_template.json").write_text(json.dumps({**GEMMA_4, "defaults": {"x": "x" * (1 << 20)}}))
    with pytest.raises(BundleCorruptError, match="has more than 1048576 bytes"):
        ResponseTemplate.from_file(tmp_path / "response_template.json", TOKENIZER)


def changed(**fields: Any) -> dict[str, Any]:
    return {**GEMMA_4, **fields}


@pytest.mark.parametrize(
    "spec",
    [
        [],
        {},
        changed(version=2),
        changed(more=1),
        changed(fields={}),
        changed(fields=["content"]),
        changed(fields={"content": 5}),
        changed(fields={"content": {"content": "xml-inline"}}),
        changed(fields={"content": {"new": 1}}),
        changed(fields={"content": {}, "thinking": {}}),
        changed(fields={"citations": {"open": "x"}}),
        changed(fields={"content": {"close_pattern": "(?:a+)+"}}),
        changed(start_anchor=None),
        changed(start_anchor=[""]),
    ],
)
def test_a_template_that_is_not_understood(spec, tmp_path):
    (tmp_path / "response_template.json").write_text(json.dumps(spec))
    with pytest.raises(BundleCorruptError, match="is not a response template"):
        ResponseTemplate.from_file(tmp_path / "response_template.json", TOKENIZER)
