"""Tools, thoughts, biases and log probabilities through `/v1/chat/completions`."""

import json
import math

import pytest

from tests.server.served import text_of
from tests.text.conversations import WEATHER

CHAT = "/v1/chat/completions"
ASKED = [{"role": "user", "content": "Will it rain in Bern?"}]
CALL = '<|tool_call>call:get_weather{city:<|"|>Bern<|"|>,days:2}<tool_call|>'
THOUGHT = "<|channel>thought\nI need the weather.\n<channel|>"


def test_a_call_and_a_thought(scripted):
    scripted.says(f"{THOUGHT}{CALL}<|tool_response>")
    [choice] = scripted.served.post(CHAT, messages=ASKED, tools=[WEATHER], reasoning_effort="high").body["choices"]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert message["content"] is None
    assert message["reasoning_content"] == "I need the weather."
    [call] = message["tool_calls"]
    assert (call["type"], call["function"]["name"]) == ("function", "get_weather")
    assert json.loads(call["function"]["arguments"]) == {"city": "Bern", "days": 2}

    scripted.says("It says rain.\n<channel|>Yes, it will.<turn|>")
    result = {"role": "tool", "tool_call_id": call["id"], "content": "rain"}
    answer = scripted.served.post(CHAT, messages=[*ASKED, message, result], tools=[WEATHER], reasoning_effort="low")
    [choice] = answer.body["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": "Yes, it will.",
        "reasoning_content": "It says rain.",
    }
    assert choice["finish_reason"] == "stop"


def test_calls_stream_with_their_index(scripted):
    scripted.says(f"{THOUGHT}One moment.{CALL}{CALL}<|tool_response>")
    chunks = scripted.served.messages(CHAT, messages=ASKED, tools=[WEATHER])
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "I need the weather."
    assert text_of(chunks) == "One moment."
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [call["index"] for call in calls] == [0, 1]
    assert len({call["id"] for call in calls}) == 2
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("fields", "thinks"),
    [
        ({}, False),
        ({"reasoning_effort": "medium"}, True),
        ({"reasoning_effort": "none"}, False),
        ({"chat_template_kwargs": {"enable_thinking": True}}, True),
        ({"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "none"}, False),
    ],
)
def test_who_asks_for_thoughts(scripted, fields, thinks):
    scripted.says("Yes.<turn|>")
    usage = scripted.served.post(CHAT, messages=ASKED, **fields).body["usage"]
    assert usage["prompt_tokens"] == len(scripted.model.encode(ASKED, thinking=thinks))


def test_tools_that_shall_not_be_called_are_named_all_the_same(scripted):
    """So that what is computed of the prompt stays of use."""
    scripted.says("Yes.<turn|>")
    usage = scripted.served.post(CHAT, messages=ASKED, tools=[WEATHER], tool_choice="none").body["usage"]
    assert usage["prompt_tokens"] == len(scripted.model.encode(ASKED, tools=[WEATHER]))


def test_content_in_parts(scripted):
    scripted.says("Yes.<turn|>")
    parts = [{"role": "user", "content": [{"type": "text", "text": "Will it rain in Bern?"}]}]
    assert scripted.served.post(CHAT, messages=parts).body["usage"]["prompt_tokens"] == len(
        scripted.model.encode(ASKED)
    )
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]
    answer = scripted.served.post(CHAT, messages=image)
    assert answer.status == 400
    assert "image_url" in answer.body["error"]["message"]


def test_biases_reach_the_sampler(served, served_model):
    token = served_model.encode("(")[-1]
    for biases in ({str(token): 100}, [[token, 100]]):
        body = served.post("/v1/completions", prompt="def f", max_tokens=3, temperature=0, logit_bias=biases).body
        assert body["choices"][0]["text"] == "((("
    penalised = served.post(
        "/v1/completions",
        prompt="def f",
        max_tokens=3,
        temperature=0,
        logit_bias={str(token): 40},
        presence_penalty=100,
    )
    assert penalised.body["choices"][0]["text"].count("(") == 1


def test_log_probabilities_of_a_chat(served, served_model):
    options = {"messages": ASKED, "max_tokens": 6, "temperature": 0, "logprobs": True, "top_logprobs": 3}
    [choice] = served.post(CHAT, **options).body["choices"]
    tokens = choice["logprobs"]["content"]
    assert len(tokens) == 6
    assert "".join(token["token"] for token in tokens) == choice["message"]["content"]
    for token in tokens:
        assert token["bytes"] == list(token["token"].encode())
        assert len(token["top_logprobs"]) == 3
        assert token["top_logprobs"][0]["token"] == token["token"]  # greedy
        assert math.isclose(token["logprob"], token["top_logprobs"][0]["logprob"])
    chunks = served.messages(CHAT, **options)
    streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [token for each in streamed if each for token in each["content"]] == tokens


def test_log_probabilities_of_a_text(served):
    options = {"prompt": "def f(", "max_tokens": 5, "temperature": 0, "logprobs": 2}
    [choice] = served.post("/v1/completions", **options).body["choices"]
    told = choice["logprobs"]
    assert "".join(told["tokens"]) == choice["text"]
    assert [len(each) for each in told["top_logprobs"]] == [2] * 5
    for token, offset in zip(told["tokens"], told["text_offset"], strict=True):
        assert choice["text"][offset:].startswith(token)
    chunks = [chunk["choices"][0]["logprobs"] for chunk in served.messages("/v1/completions", **options)]
    for name, values in told.items():
        assert [value for chunk in chunks if chunk for value in chunk[name]] == values
