"""`/v1/chat/completions` and `/v1/completions`: the model's own replies, in OpenAI's form."""

import json

import pytest

from tests.server.served import text_of
from tests.text.conversations import WEATHER

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MESSAGES = [{"role": "user", "content": "def fibonacci(n):"}]


def test_a_chat_completion_is_the_model_s_reply(served, served_model):
    answer = served.post(CHAT, messages=MESSAGES, max_tokens=24, temperature=0)
    reply = served_model.generate(MESSAGES, max_new_tokens=24, temperature=0.0)
    assert answer.status == 200
    body = answer.body
    assert (body["object"], body["model"]) == ("chat.completion", "reference")
    [choice] = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": reply.text}
    assert (choice["index"], choice["finish_reason"]) == (0, "length")
    prompt = len(served_model.encode(MESSAGES))
    assert body["usage"]["prompt_tokens"] == prompt
    assert body["usage"]["completion_tokens"] == 24
    assert body["usage"]["total_tokens"] == prompt + 24


def test_a_stream_adds_up_to_the_same(served, served_model):
    chunks = served.messages(CHAT, messages=MESSAGES, max_tokens=24, temperature=0.8, seed=5)
    reply = served_model.generate(MESSAGES, max_new_tokens=24, temperature=0.8, seed=5)
    assert text_of(chunks) == reply.text
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "length"
    assert chunks[-1]["timings"]["predicted_n"] == 24
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)


def test_usage_comes_last_where_it_is_asked_for(served):
    options = {"messages": MESSAGES, "max_tokens": 4}
    plain = served.messages(CHAT, **options)
    assert not any("usage" in chunk for chunk in plain)
    told = served.messages(CHAT, **options, stream_options={"include_usage": True})
    assert told[-1]["choices"] == []
    assert told[-1]["usage"]["completion_tokens"] == 4


def test_a_stream_ends_with_done(served):
    with served.stream(CHAT, messages=MESSAGES, max_tokens=4) as lines:
        assert list(lines)[-1] == "data: [DONE]"


def test_a_second_turn_computes_its_new_tokens_only(served):
    messages = [{"role": "user", "content": "class Stack: what is a stack and what is it used for in a program?"}]
    first = served.post(CHAT, messages=messages, max_tokens=8, temperature=0).body
    said = first["choices"][0]["message"]
    again = [*messages, said, {"role": "user", "content": "and a queue?"}]
    second = served.post(CHAT, messages=again, max_tokens=4, temperature=0).body
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= first["usage"]["prompt_tokens"] - 4
    assert second["timings"]["cache_n"] == cached
    assert second["timings"]["prompt_n"] == second["usage"]["prompt_tokens"] - cached


def test_several_choices_read_the_prompt_once(served, served_model):
    messages = [{"role": "user", "content": "import os and import sys, then three more"}]
    body = served.post(CHAT, messages=messages, n=3, max_tokens=12, temperature=1, seed=7).body
    for number, choice in enumerate(body["choices"]):
        alone = served_model.generate(messages, max_new_tokens=12, temperature=1.0, seed=7 + number)
        assert (choice["index"], choice["message"]["content"]) == (number, alone.text)
    assert len({choice["message"]["content"] for choice in body["choices"]}) == 3
    assert body["usage"]["completion_tokens"] == 36
    assert body["usage"]["prompt_tokens"] == len(served_model.encode(messages))


def test_copies_leave_one_token_to_read(served_model):
    prompt = "def quicksort(values, key, reverse):"
    first = served_model.stream(prompt, max_new_tokens=8, copies=2)
    others = [served_model.stream(prompt, max_new_tokens=8) for _ in range(2)]
    next(first)
    for other in others:
        next(other)
        assert other.stats.cached_tokens == other.stats.prompt_tokens - 1
    for each in (first, *others):
        each.close()


def test_the_choices_of_a_stream_are_told_apart(served, served_model):
    chunks = served.messages(CHAT, messages=MESSAGES, n=2, max_tokens=10, temperature=1, seed=3)
    for number in range(2):
        alone = served_model.generate(MESSAGES, max_new_tokens=10, temperature=1.0, seed=3 + number)
        assert text_of(chunks, number) == alone.text


def test_how_much_of_the_prompt_is_read(served, served_model):
    prompt = "x = 1\n" * 100
    chunks = served.messages(TEXT, prompt=prompt, max_tokens=1, return_progress=True)
    told = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
    total = len(served_model.encode(prompt))
    assert told[-1]["processed"] == told[-1]["total"] == total
    assert told[-1]["cache"] <= told[0]["processed"]
    assert [each["time_ms"] for each in told] == sorted(each["time_ms"] for each in told)


def test_text_goes_on(served, served_model):
    body = served.post(TEXT, prompt="def f(", max_tokens=8, temperature=0).body
    assert body["object"] == "text_completion"
    assert body["choices"][0]["text"] == served_model.generate("def f(", max_new_tokens=8, temperature=0.0).text
    assert body["timings"]["predicted_n"] == 8


def test_several_prompts_and_choices(served, served_model):
    ids = served_model.encode("class A:")
    body = served.post(TEXT, prompt=[ids, ids[:-1]], n=2, max_tokens=6, temperature=0).body
    texts = [served_model.generate(each, max_new_tokens=6, temperature=0.0).text for each in (ids, ids[:-1])]
    assert [choice["text"] for choice in body["choices"]] == [texts[0], texts[0], texts[1], texts[1]]
    assert body["usage"]["prompt_tokens"] == 2 * len(ids) - 1


def test_text_streams(served, served_model):
    chunks = served.messages(TEXT, prompt="def f(", max_tokens=8, temperature=0)
    assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == (
        served_model.generate("def f(", max_new_tokens=8, temperature=0.0).text
    )


def test_stop_strings_end_a_reply(served):
    whole = served.post(TEXT, prompt="def f(", max_tokens=30, temperature=0).body["choices"][0]
    stop = whole["text"][10:12]
    ended = served.post(TEXT, prompt="def f(", max_tokens=30, temperature=0, stop=[stop]).body["choices"][0]
    assert ended["finish_reason"] == "stop"
    assert ended["text"] == whole["text"][: whole["text"].index(stop)]


def test_drafts_change_nothing(served):
    options = {"prompt": "import re\nimport sys\n", "max_tokens": 32, "temperature": 0.9, "seed": 11}
    plain = served.post(TEXT, **options, drafter="none").body
    drafted = served.post(TEXT, **options).body
    assert drafted["choices"] == plain["choices"]
    assert plain["timings"]["draft_n"] == 0


def test_without_a_number_of_tokens_a_reply_fills_the_context(serve_toy):
    with serve_toy(context_length=300) as served:
        body = served.post(TEXT, prompt="abc").body
        assert body["choices"][0]["finish_reason"] == "length"
        assert body["usage"]["total_tokens"] >= 300


def test_null_and_minus_one_are_as_if_not_there(served):
    body = served.post(TEXT, prompt="a", max_tokens=2, n_predict=-1, stop=None, n=None, seed=-1, top_k=-1).body
    assert body["usage"]["completion_tokens"] == 2


def test_unknown_fields_are_ignored(served):
    assert served.post(TEXT, prompt="a", max_tokens=1, user="me", store=True, cache_prompt=True).status == 200


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {}, "messages"),
        (CHAT, {"messages": "hello"}, "messages"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": ["hello"]}, "messages"),
        (CHAT, {"messages": MESSAGES, "max_tokens": 0}, "max_tokens"),
        (CHAT, {"messages": MESSAGES, "max_completion_tokens": "many"}, "max_completion_tokens"),
        (CHAT, {"messages": MESSAGES, "temperature": "hot"}, "temperature"),
        (CHAT, {"messages": MESSAGES, "temperature": -1}, "temperature"),
        (CHAT, {"messages": MESSAGES, "temperature": True}, "temperature"),
        (CHAT, {"messages": MESSAGES, "top_p": 3}, "top_p"),
        (CHAT, {"messages": MESSAGES, "top_k": 1.5}, "top_k"),
        (CHAT, {"messages": MESSAGES, "n": 0}, "n"),
        (CHAT, {"messages": MESSAGES, "n": 99}, "n"),
        (CHAT, {"messages": MESSAGES, "seed": "one"}, "seed"),
        (CHAT, {"messages": MESSAGES, "stop": [1]}, "stop"),
        (CHAT, {"messages": MESSAGES, "stream": "yes"}, "stream"),
        (CHAT, {"messages": MESSAGES, "stream_options": 1}, "stream_options"),
        (CHAT, {"messages": MESSAGES, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        (CHAT, {"messages": MESSAGES, "drafter": "/etc/passwd"}, "drafter"),
        (CHAT, {"messages": MESSAGES, "logit_bias": {"a": 1}}, "logit_bias"),
        (CHAT, {"messages": MESSAGES, "logit_bias": [1]}, "logit_bias"),
        (CHAT, {"messages": MESSAGES, "presence_penalty": "much"}, "presence_penalty"),
        (CHAT, {"messages": MESSAGES, "logprobs": 1}, "logprobs"),
        (CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"messages": MESSAGES, "response_format": {"type": "poem"}}, "response_format"),
        (CHAT, {"messages": MESSAGES, "response_format": {"type": "json_schema"}}, "response_format"),
        (CHAT, {"messages": MESSAGES, "response_format": "json"}, "response_format"),
        (CHAT, {"messages": MESSAGES, "grammar": "root ::= [0-9]"}, "grammar"),
        (CHAT, {"messages": MESSAGES, "tool_choice": "required"}, "tool_choice"),
        (CHAT, {"messages": MESSAGES, "tools": [WEATHER], "tool_choice": "perhaps"}, "tool_choice"),
        (CHAT, {"messages": MESSAGES, "tools": "weather"}, "tools"),
        (CHAT, {"messages": MESSAGES, "reasoning_effort": "huge"}, "reasoning_effort"),
        (CHAT, {"messages": MESSAGES, "chat_template_kwargs": []}, "chat_template_kwargs"),
        (TEXT, {"prompt": "a", "logprobs": True}, "logprobs"),
        (TEXT, {}, "prompt"),
        (TEXT, {"prompt": 1}, "prompt"),
        (TEXT, {"prompt": [[1], "a"]}, "prompt"),
        (TEXT, {"prompt": []}, "prompt"),
        (TEXT, {"prompt": "a", "echo": True}, "echo"),
    ],
)
def test_a_wrong_field_is_named(served, path, fields, param):
    answer = served.post(path, **fields)
    assert answer.status == 400
    error = answer.body["error"]
    assert (error["code"], error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert param in error["message"]


def test_a_message_that_is_none_is_named(served):
    answer = served.post(CHAT, messages=[{"role": "wizard", "content": "x"}])
    assert answer.status == 400
    assert "wizard" in answer.body["error"]["message"]


def test_a_prompt_beyond_the_context(served, served_model):
    context = served_model.context_length
    answer = served.post(TEXT, prompt=[5] * (context + 1))
    error = answer.body["error"]
    assert (answer.status, error["type"]) == (400, "exceed_context_size_error")
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (context + 1, context)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[1]", b"nonsense", b'"text"', b"[" * 100_000, '{"a":"\ud800"}'.encode("utf-8", "surrogatepass")],
)
def test_what_is_no_json_object_is_refused(served, body):
    answer = served.ask("POST", CHAT, body)
    assert answer.status == 400
    assert answer.body["error"]["type"] == "invalid_request_error"


def test_a_request_can_be_too_large(served):
    answer = served.ask("POST", CHAT, b" " * (1 << 24) + b"{}")
    assert answer.status == 413


def test_half_a_surrogate_is_no_text(served):
    answer = served.ask("POST", TEXT, json.dumps({"prompt": "\ud800"}).encode())
    assert answer.status == 400
    assert "surrogate" in answer.body["error"]["message"]
