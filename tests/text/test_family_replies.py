"""Replies of Qwen, Llama, DeepSeek and Mistral: thoughts, calls and answer apart, however the text is divided."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ondevice.text.chat_template import ChatTemplate
from ondevice.text.messages import ToolCall
from ondevice.text.reply_parser import Parsed, ReplyParser, ResponseTemplate, begun_reply
from ondevice.text.reply_stream import ReplyStream
from ondevice.text.tokenizer import Tokenizer
from ondevice_export.response_templates import known_template
from ondevice_export.text_files import adds_bos, read_tokenizer, turn_ends
from tests.fixtures.published import published
from tests.text.tokenizers_made import BOS, byte_level, chat_with, gemma_like

QWEN = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<tool_call>", "</tool_call>"]
THINKING = [*QWEN, "<think>", "</think>"]
LLAMA = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"]
DEEPSEEK = ["<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "<｜end▁of▁sentence｜>"]
MISTRAL = ["[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "</s>"]
MISTRAL_11 = [*MISTRAL, "[ARGS]", "[CALL_ID]"]
MISTRAL_THINKING = [*MISTRAL_11, "[THINK]", "[/THINK]"]

QWEN_PROMPT = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
LLAMA_PROMPT = (
    "<|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
)


def parsed(tokenizer: Tokenizer, prompt: str, reply: str, *, at_once: bool) -> Parsed:
    spec = known_template(tokenizer)
    assert spec is not None
    template = ResponseTemplate(spec, tokenizer)
    begun = begun_reply(template, tokenizer, tokenizer.encode(prompt, add_special_tokens=False))
    assert begun is not None
    stream = ReplyStream(tokenizer, (), ReplyParser(template, begun))
    ids, given = tokenizer.encode(reply, add_special_tokens=False), Parsed()
    for part in [ids] if at_once else [[token] for token in ids]:
        given = given.then(stream.feed(part))
    return given.then(stream.finish())


CALL = ToolCall("get_weather", {"city": "Zürich", "days": [1, {"x": None}]})
ARGUMENTS = json.dumps(CALL.arguments, ensure_ascii=False)

CASES: dict[str, tuple[list[str], str, str, Parsed]] = {
    "an answer": (THINKING, QWEN_PROMPT, "Yes.<|im_end|>", Parsed("Yes.")),
    "a thought": (THINKING, QWEN_PROMPT, "<think>\nHm.\n</think>\n\nYes.<|im_end|>", Parsed("Yes.", "Hm.")),
    "an empty thought in the prompt": (
        THINKING,
        f"{QWEN_PROMPT}<think>\n\n</think>\n\n",
        "Yes.<|im_end|>",
        Parsed("Yes."),
    ),
    "a thought that the prompt begins": (
        THINKING,
        f"{QWEN_PROMPT}<think>\n",
        "Hm.\n</think>\n\nYes.<|im_end|>",
        Parsed("Yes.", "Hm."),
    ),
    "a call after a thought": (
        THINKING,
        QWEN_PROMPT,
        "<think>\nHm.\n</think>\n\n"
        f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call><|im_end|>',
        Parsed("", "Hm.", (CALL,)),
    ),
    "two calls of a model without thoughts": (
        QWEN,
        QWEN_PROMPT,
        f'I look.\n<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call><|im_end|>',
        Parsed("I look.", "", (CALL, ToolCall("f", {}))),
    ),
    "a call that is cut off": (
        QWEN,
        QWEN_PROMPT,
        '<tool_call>\n{"name": "f", ',
        Parsed('<tool_call>\n{"name": "f",'),
    ),
    "Llama's answer": (LLAMA, LLAMA_PROMPT, "Yes.<|eot_id|>", Parsed("Yes.")),
    "Llama's call": (
        LLAMA,
        LLAMA_PROMPT,
        f'{{"name": "get_weather", "parameters": {ARGUMENTS}}}<|eot_id|>',
        Parsed("", "", (CALL,)),
    ),
    "Llama's call that a grammar has ended": (
        LLAMA,
        LLAMA_PROMPT,
        f'{{"name": "get_weather", "parameters": {ARGUMENTS}}}',
        Parsed("", "", (CALL,)),
    ),
    "Llama's call that is cut off": (
        LLAMA,
        LLAMA_PROMPT,
        '{"name": "f", "parameters": {"a": {"b": 1}}',
        Parsed('{"name": "f", "parameters": {"a": {"b": 1}}'),
    ),
    "Llama's call with a type, as a message to a program": (
        LLAMA,
        LLAMA_PROMPT,
        f'<|python_tag|>{{"type": "function", "name": "get_weather", "parameters": {ARGUMENTS}}}<|eom_id|>',
        Parsed("", "", (CALL,)),
    ),
    "DeepSeek's thought, which the prompt begins": (
        DEEPSEEK,
        "<｜User｜>hi<｜Assistant｜><think>\n",
        "Hm.\n</think>\n\nYes.<｜end▁of▁sentence｜>",
        Parsed("Yes.", "Hm."),
    ),
    "Mistral's answer": (MISTRAL, "[INST] hi[/INST]", " Yes.</s>", Parsed("Yes.")),
    "Mistral's calls": (
        MISTRAL,
        "[INST] hi[/INST]",
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {ARGUMENTS}, "id": "123456789"}}, '
        '{"name": "f", "arguments": {}}]</s>',
        Parsed("", "", (CALL, ToolCall("f", {}))),
    ),
    "Mistral's call behind a result": (
        MISTRAL,
        "[INST] hi[/INST][TOOL_RESULTS] {}[/TOOL_RESULTS]",
        f'Once more.[TOOL_CALLS][{{"name": "get_weather", "arguments": {ARGUMENTS}}}]</s>',
        Parsed("Once more.", "", (CALL,)),
    ),
    "Mistral's call that is cut off": (
        MISTRAL,
        "[INST] hi[/INST]",
        '[TOOL_CALLS] [{"name": "f", ',
        Parsed('[TOOL_CALLS] [{"name": "f",'),
    ),
    "a later Mistral's calls": (
        MISTRAL_11,
        "[INST]hi[/INST]",
        f"I look.[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{{}}</s>",
        Parsed("I look.", "", (CALL, ToolCall("f", {}))),
    ),
    "a later Mistral's thought": (
        MISTRAL_THINKING,
        "[INST]hi[/INST]",
        f"[THINK]Hm.[/THINK]Yes.[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}</s>",
        Parsed("Yes.", "Hm.", (CALL,)),
    ),
    "a later Mistral's call without an end": (
        MISTRAL_11,
        "[INST]hi[/INST]",
        f"[TOOL_CALLS]f[ARGS]{{[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}</s>",
        Parsed("[TOOL_CALLS]f[ARGS]{", "", (CALL,)),
    ),
    "Llama's answer in JSON": (
        LLAMA,
        LLAMA_PROMPT,
        '{"name": "Zoe", "age": 3}<|eot_id|>',
        Parsed('{"name": "Zoe", "age": 3}'),
    ),
}


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_a_reply_is_told_apart(case: str, at_once: bool) -> None:
    control, prompt, reply, expected = CASES[case]
    assert parsed(chat_with(control), prompt, reply, at_once=at_once) == expected


def test_an_answer_that_a_grammar_has_ended_is_none_of_llamas_calls() -> None:
    """Though it looks like one: no function may be called, as beside a `response_format` without tools."""
    tokenizer = chat_with(LLAMA)
    spec = known_template(tokenizer)
    assert spec is not None
    template = ResponseTemplate(spec, tokenizer)
    text = '{"name": "f", "parameters": {}}'
    stream = ReplyStream(tokenizer, (), ReplyParser(template, ends_calls=False))
    given = stream.feed(tokenizer.encode(text, add_special_tokens=False))
    assert given.then(stream.finish()) == Parsed(text)


def test_a_call_that_is_spelled_out_is_none() -> None:
    """A model may write the letters of a control token because a text asked for it."""
    tokenizer = chat_with(THINKING)
    spec = known_template(tokenizer)
    assert spec is not None
    template = ResponseTemplate(spec, tokenizer)
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    stream = ReplyStream(tokenizer, (), ReplyParser(template, ""))
    given = stream.feed(tokenizer.encode(text, add_special_tokens=False, parse_special=False))
    assert given.then(stream.finish()) == Parsed(text)


def test_a_tokenizer_without_such_tokens_has_no_template() -> None:
    assert known_template(chat_with(["<|user|>", "<|assistant|>"])) is None


def test_whether_a_text_begins_with_a_token(tmp_path: Path) -> None:
    """`tokenizer_config.json` decides, then the family, then what `tokenizer.json` does itself."""
    places = tmp_path / "tokenizer.json", tmp_path / "tokenizer_config.json"
    assert not adds_bos(tmp_path, read_tokenizer(tmp_path), None, default=True)
    assert adds_bos(tmp_path, read_tokenizer(tmp_path), BOS, default=None)
    for made, does in ((byte_level(), True), (gemma_like(), False)):
        places[0].write_text(made._backend.to_str(), "utf-8")
        assert adds_bos(tmp_path, read_tokenizer(tmp_path), BOS, default=None) == does
        assert adds_bos(tmp_path, read_tokenizer(tmp_path), BOS, default=True)
        for said in (True, False):
            places[1].write_text(json.dumps({"add_bos_token": said}), "utf-8")
            assert adds_bos(tmp_path, read_tokenizer(tmp_path), BOS, default=True) == said
        places[1].unlink()


def test_tokens_that_end_a_turn(tmp_path: Path) -> None:
    """Only those that the chat template writes."""
    tokenizer = chat_with([*QWEN, "<|eot_id|>"])
    (tmp_path / "tokenizer.json").write_text(tokenizer._backend.to_str(), "utf-8")
    assert turn_ends(tmp_path, read_tokenizer(tmp_path)) == []
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}<|im_end|>", "utf-8")
    assert [tokenizer.text_of(token) for token in turn_ends(tmp_path, read_tokenizer(tmp_path))] == ["<|im_end|>"]


TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def published_chat(name: str) -> tuple[Path, Tokenizer, ChatTemplate]:
    directory = published(f"{name}-tokenizer")
    config = json.loads((directory / "tokenizer_config.json").read_text("utf-8"))
    special = {name: config[name] for name in ("bos_token", "eos_token", "pad_token") if config.get(name)}
    return directory, Tokenizer.from_file(directory / "tokenizer.json"), ChatTemplate(config["chat_template"], special)


def test_published_qwen3() -> None:
    directory, tokenizer, template = published_chat("qwen3")
    asked = [{"role": "user", "content": "hi"}]
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern"}}\n</tool_call><|im_end|>'
    for thinking, reply in ((True, f"<think>\nHm.\n</think>\n\n{call}"), (False, call)):
        prompt = template.render(asked, tools=[TOOL], enable_thinking=thinking)
        found = parsed(tokenizer, prompt, reply, at_once=False)
        assert found == Parsed("", "Hm." if thinking else "", (ToolCall("get_weather", {"city": "Bern"}),))
    assert not adds_bos(directory, read_tokenizer(directory), None, default=None)
    assert [tokenizer.text_of(token) for token in turn_ends(directory, read_tokenizer(directory))] == ["<|im_end|>"]


def test_published_llama3() -> None:
    directory, tokenizer, template = published_chat("llama3.1")
    prompt = template.render([{"role": "user", "content": "hi"}])
    assert prompt.startswith("<|begin_of_text|>")
    call = '{"name": "get_weather", "parameters": {"city": "Bern"}}<|eot_id|>'
    found = parsed(tokenizer, prompt, call, at_once=False)
    assert found == Parsed("", "", (ToolCall("get_weather", {"city": "Bern"}),))
    assert adds_bos(directory, read_tokenizer(directory), 128_000, default=None)
    assert [tokenizer.text_of(token) for token in turn_ends(directory, read_tokenizer(directory))] == ["<|eot_id|>"]


def test_published_gemma3() -> None:
    directory, tokenizer, template = published_chat("gemma3")
    assert template.render([{"role": "user", "content": "hi"}]).endswith("<start_of_turn>model\n")
    assert known_template(tokenizer) is None
    assert adds_bos(directory, read_tokenizer(directory), 2, default=True)
    assert [tokenizer.text_of(token) for token in turn_ends(directory, read_tokenizer(directory))] == ["<end_of_turn>"]
