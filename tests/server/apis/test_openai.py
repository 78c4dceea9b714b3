"""`/v1/chat/completions` and `/v1/completions` by plain HTTP: replies, tools, log probabilities, and errors."""

import json
import math
import threading
from functools import partial

import pytest

from ondevice.generate.stats import TokenLogprob
from ondevice.generation import Step
from ondevice.server.apis import openai
from ondevice.server.apis.openai import ChatCompletionWriter
from ondevice.server.bodies import MAX_REQUEST_BYTES
from ondevice.server.replies import Choice
from tests.server.served import text_of
from tests.text.conversations import WEATHER

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MESSAGES = [{"role": "user", "content": "def fibonacci(n):"}]
ASKED = [{"role": "user", "content": "Will it rain in Bern?"}]
CALL = '<|tool_call>call:get_weather{city:<|"|>Bern<|"|>,days:2}<tool_call|>'
THOUGHT = "<|channel>thought\nI need the weather.\n<channel|>"


def test_chat_completion_equals_the_reply_of_generate(served, served_model):
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


def test_streamed_chat_equals_the_reply_of_generate(served, served_model):
    chunks = served.messages(CHAT, messages=MESSAGES, max_tokens=24, temperature=0.8, seed=5)
    reply = served_model.generate(MESSAGES, max_new_tokens=24, temperature=0.8, seed=5)
    assert text_of(chunks) == reply.text
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "length"
    assert chunks[-1]["timings"]["predicted_n"] == 24
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)


def test_rounds_are_sent_if_asked_for(served):
    asked = {"messages": MESSAGES, "max_tokens": 24, "temperature": 0}
    assert not any("round" in chunk for chunk in served.messages(CHAT, **asked))
    chunks = served.messages(CHAT, **asked, return_rounds=True)
    rounds = [chunk["round"] for chunk in chunks if "round" in chunk]
    timings = chunks[-1]["timings"]
    assert sum(each["tokens"] for each in rounds) == timings["predicted_n"] == 24
    assert sum(each["drafted"] for each in rounds) == timings["draft_n"]
    assert sum(each["accepted"] for each in rounds) == timings["draft_n_accepted"]
    assert {each["source"] for each in rounds if not each["drafted"]} <= {"none"}
    assert sum(each["time_ms"] for each in rounds[1:]) == pytest.approx(timings["predicted_ms"], abs=0.1)
    assert served.post(CHAT, **asked, return_rounds=1).body["error"]["param"] == "return_rounds"


def test_drafts_of_a_request(served, served_model, monkeypatch):
    """Its drafter and the length of its drafts; the figures under vLLM's names, which `/metrics` sums."""
    constant = partial(served_model.stream, num_assistant_tokens_schedule="constant")  # `auto` may find that none pay
    monkeypatch.setattr(served_model, "stream", constant)
    served.wait_until_idle()
    before = served.gauge("spec_decode_num_draft_tokens_total")
    asked = {"prompt": "import os\nimport sys\n" * 4, "max_tokens": 40, "temperature": 0, "n": 2, "drafter": "ngram"}
    plain = served.post(TEXT, **{**asked, "drafter": "none"}).body
    body = served.post(TEXT, **asked, num_assistant_tokens=2).body
    assert body["choices"] == plain["choices"]
    assert plain["usage"]["speculative_decoding"]["num_drafts"] == 0
    drafts = body["usage"]["speculative_decoding"]
    assert (
        0
        < drafts["num_drafts"]
        <= drafts["num_draft_tokens"]
        == served.gauge("spec_decode_num_draft_tokens_total") - before
    )
    assert len(drafts["num_drafts_per_pos"]) <= 2
    assert sum(drafts["num_accepted_tokens_per_pos"]) == drafts["num_accepted_tokens"]
    assert drafts["draft_acceptance_rate"] == drafts["num_accepted_tokens"] / drafts["num_draft_tokens"]
    assert served.post(TEXT, **asked, num_assistant_tokens=0).body["error"]["param"] == "num_assistant_tokens"
    assert served.post(TEXT, prompt="a", drafter="../x").body["error"]["param"] == "drafter"


def test_a_round_tells_what_was_drafted(served_model):
    choice = Choice(0, None, None)
    writer = ChatCompletionWriter(served_model, "reference", [choice], include_rounds=True)
    [event] = writer.step(choice, Step("", (5, 6, 7), 4, 2, "ngram", 0.0105, None))
    assert isinstance(event.data, dict)
    assert event.data["choices"][0]["delta"] == {}
    assert event.data["round"] == {"tokens": 3, "drafted": 4, "accepted": 2, "source": "ngram", "time_ms": 10.5}


def test_a_stream_ends_with_usage_if_asked_for(served):
    options = {"messages": MESSAGES, "max_tokens": 4, "temperature": 0}
    plain = served.messages(CHAT, **options)
    assert not any("usage" in chunk for chunk in plain)
    with_usage = served.messages(CHAT, **options, stream_options={"include_usage": True})
    assert with_usage[-1]["choices"] == []
    assert with_usage[-1]["usage"]["completion_tokens"] == 4
    assert [chunk["usage"] for chunk in with_usage[:-1]] == [None] * (len(with_usage) - 1)


def test_a_stream_ends_with_done(served):
    with served.stream(CHAT, messages=MESSAGES, max_tokens=4) as lines:
        assert list(lines)[-1] == "data: [DONE]"


def test_a_second_turn_computes_only_its_new_tokens(served):
    messages = [{"role": "user", "content": "class Stack: what is a stack and what is it used for in a program?"}]
    first = served.post(CHAT, messages=messages, max_tokens=8, temperature=0).body
    said = first["choices"][0]["message"]
    again = [*messages, said, {"role": "user", "content": "and a queue?"}]
    second = served.post(CHAT, messages=again, max_tokens=4, temperature=0).body
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= first["usage"]["prompt_tokens"] - 4
    assert second["timings"]["cache_n"] == cached
    assert second["timings"]["prompt_n"] == second["usage"]["prompt_tokens"] - cached


def test_several_choices_compute_the_prompt_once(served, served_model):
    messages = [{"role": "user", "content": "import os and import sys, then three more"}]
    body = served.post(CHAT, messages=messages, n=3, max_tokens=12, temperature=1, seed=7).body
    for number, choice in enumerate(body["choices"]):
        alone = served_model.generate(messages, max_new_tokens=12, temperature=1.0, seed=7 + number)
        assert (choice["index"], choice["message"]["content"]) == (number, alone.text)
    assert len({choice["message"]["content"] for choice in body["choices"]}) == 3
    assert body["usage"]["completion_tokens"] == 36
    assert body["usage"]["prompt_tokens"] == len(served_model.encode(messages))


def test_copies_of_a_prompt_have_one_token_to_compute(served_model):
    prompt = "def quicksort(values, key, reverse):"
    first = served_model.stream(prompt, max_new_tokens=8, copies=2)
    others = [served_model.stream(prompt, max_new_tokens=8) for _ in range(2)]
    next(first)
    for other in others:
        next(other)
        assert other.stats.cached_tokens == other.stats.prompt_tokens - 1
    for each in (first, *others):
        each.close()


def test_streamed_choices_have_their_index(served, served_model):
    chunks = served.messages(CHAT, messages=MESSAGES, n=2, max_tokens=10, temperature=1, seed=3)
    for number in range(2):
        alone = served_model.generate(MESSAGES, max_new_tokens=10, temperature=1.0, seed=3 + number)
        assert text_of(chunks, number) == alone.text


def test_prompt_progress(served, served_model):
    prompt = "x = 1\n" * 100
    chunks = served.messages(TEXT, prompt=prompt, max_tokens=1, return_progress=True)
    progress = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
    total = len(served_model.encode(prompt))
    assert progress[-1]["processed"] == progress[-1]["total"] == total
    assert progress[-1]["cache"] <= progress[0]["processed"]
    assert [each["time_ms"] for each in progress] == sorted(each["time_ms"] for each in progress)


def test_progress_of_a_later_prompt_names_its_choice(serve_toy):
    with serve_toy(max_sequences=1) as served:
        chunks = served.messages(TEXT, prompt=["abc" * 20, "bca" * 20], max_tokens=2, return_progress=True)
    told = [chunk["choices"][0] for chunk in chunks if "prompt_progress" in chunk]
    assert [choice["index"] for choice in told] == [0] * 4 + [1] * 4
    assert all(choice["finish_reason"] is None for choice in told)


def test_completion_equals_the_reply_of_generate(served, served_model):
    body = served.post(TEXT, prompt="def f(", max_tokens=8, temperature=0).body
    assert body["object"] == "text_completion"
    assert body["choices"][0]["text"] == served_model.generate("def f(", max_new_tokens=8, temperature=0.0).text
    assert body["timings"]["predicted_n"] == 8


def test_a_list_of_one_prompt_is_answered_like_the_prompt(served):
    options = {"max_tokens": 4, "temperature": 0}
    listed = served.post(TEXT, prompt=["def f("], **options).body["choices"]
    assert listed == served.post(TEXT, prompt="def f(", **options).body["choices"]


def test_completions_of_several_prompts_and_choices(served, served_model):
    ids = served_model.encode("class A:")
    body = served.post(TEXT, prompt=[ids, ids[:-1]], n=2, max_tokens=6, temperature=0).body
    texts = [served_model.generate(each, max_new_tokens=6, temperature=0.0).text for each in (ids, ids[:-1])]
    assert [choice["text"] for choice in body["choices"]] == [texts[0], texts[0], texts[1], texts[1]]
    assert body["usage"]["prompt_tokens"] == 2 * len(ids) - 1


def test_streamed_completion_equals_the_reply_of_generate(served, served_model):
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


def test_drafts_do_not_change_a_completion(served):
    options = {"prompt": "import re\nimport sys\n", "max_tokens": 32, "temperature": 0.9, "seed": 11}
    plain = served.post(TEXT, **options, drafter="none").body
    drafted = served.post(TEXT, **options).body
    assert drafted["choices"] == plain["choices"]
    assert plain["timings"]["draft_n"] == 0


def test_without_a_token_limit_a_reply_fills_the_context(serve_toy):
    with serve_toy(context_length=300) as served:
        body = served.post(TEXT, prompt="abc").body
        assert body["choices"][0]["finish_reason"] == "length"
        assert body["usage"]["total_tokens"] >= 300


def test_null_and_minus_one_count_as_missing(served):
    missing = {"n_predict": -1, "stop": None, "n": None, "seed": -1, "top_k": -1}
    body = served.post(TEXT, prompt="a", temperature=0, max_tokens=2, **missing).body  # a draw could end the text
    assert body["usage"]["completion_tokens"] == 2


def test_unknown_fields_are_ignored(served):
    assert served.post(TEXT, prompt="a", max_tokens=1, user="me", store=True, cache_prompt=True).status == 200


def test_a_tool_call_with_reasoning(scripted):
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


def test_without_parallel_calls_a_reply_ends_behind_its_first_call(scripted):
    scripted.says(f"{THOUGHT}One moment.{CALL}{CALL}More.<turn|>")
    options = {"messages": ASKED, "tools": [WEATHER], "stop": ["moment. More"]}
    [both] = scripted.served.post(CHAT, **options, parallel_tool_calls=True).body["choices"]
    assert len(both["message"]["tool_calls"]) == 2
    response = scripted.served.post(CHAT, **options, parallel_tool_calls=False).body
    [choice] = response["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert (len(choice["message"]["tool_calls"]), choice["message"]["content"]) == (1, "One moment.")
    chunks = scripted.served.messages(CHAT, **options, parallel_tool_calls=False)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert [call["index"] for delta in deltas for call in delta.get("tool_calls", [])] == [0]
    assert text_of(chunks) == "One moment."
    assert scripted.served.post(CHAT, **options, parallel_tool_calls="no").status == 400


def test_streamed_tool_calls_have_their_index(scripted):
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
        ({"reasoning_effort": "max"}, True),
        ({"reasoning_effort": "none"}, False),
        ({"chat_template_kwargs": {"enable_thinking": True}}, True),
        ({"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "none"}, False),
    ],
)
def test_fields_that_switch_thinking_on(scripted, fields, thinks):
    scripted.says("Yes.<turn|>")
    usage = scripted.served.post(CHAT, messages=ASKED, **fields).body["usage"]
    assert usage["prompt_tokens"] == len(scripted.model.encode(ASKED, thinking=thinks))


def test_tool_choice_none_keeps_the_tools_in_the_prompt(scripted):
    """The prompt stays the same, so that its cached prefix can be used."""
    scripted.says("Yes.<turn|>")
    usage = scripted.served.post(CHAT, messages=ASKED, tools=[WEATHER], tool_choice="none").body["usage"]
    assert usage["prompt_tokens"] == len(scripted.model.encode(ASKED, tools=[WEATHER]))


def test_content_as_a_list_of_parts(scripted):
    scripted.says("Yes.<turn|>")
    parts = [{"role": "user", "content": [{"type": "text", "text": "Will it rain in Bern?"}]}]
    assert scripted.served.post(CHAT, messages=parts).body["usage"]["prompt_tokens"] == len(
        scripted.model.encode(ASKED)
    )
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]
    answer = scripted.served.post(CHAT, messages=image)
    assert answer.status == 400
    assert "reads text only" in answer.body["error"]["message"]


def test_biases_and_penalties(served, served_model):
    token = served_model.encode("(")[-1]
    for biases in ({str(token): 100}, [[token, 100]]):
        body = served.post(TEXT, prompt="def f", max_tokens=3, temperature=0, logit_bias=biases).body
        assert body["choices"][0]["text"] == "((("
    penalised = served.post(
        TEXT,
        prompt="def f",
        max_tokens=3,
        temperature=0,
        logit_bias={str(token): 40},
        presence_penalty=100,
    )
    assert penalised.body["choices"][0]["text"].count("(") == 1


def test_a_reply_that_ignores_its_end(served, served_model):
    ends = dict.fromkeys(map(str, served_model.manifest.eos_token_ids), 100)
    options = {"prompt": "def f", "max_tokens": 30, "temperature": 0, "logit_bias": ends}
    assert served.post(TEXT, **options).body["usage"]["completion_tokens"] == 1
    body = served.post(TEXT, ignore_eos=True, **options).body
    assert (body["usage"]["completion_tokens"], body["choices"][0]["finish_reason"]) == (30, "length")
    refused = served.post(TEXT, ignore_eos="yes", **options)
    assert (refused.status, refused.body["error"]["param"]) == (400, "ignore_eos")


def test_logprobs_of_a_chat_completion(served, served_model):
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


LOGPROBS = ("tokens", "token_logprobs", "top_logprobs")


def test_logprobs_of_a_completion(served):
    options = {"prompt": "def f(", "max_tokens": 5, "temperature": 0, "logprobs": 2}
    [choice] = served.post(TEXT, **options).body["choices"]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert [len(each) for each in logprobs["top_logprobs"]] == [2] * 5
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert choice["text"][offset:].startswith(token)
    chunks = [chunk["choices"][0]["logprobs"] for chunk in served.messages(TEXT, **options)]
    for name, values in logprobs.items():
        assert [value for chunk in chunks if chunk for value in chunk[name]] == values


@pytest.mark.parametrize("top", [0, 1])
def test_the_alternatives_of_a_completion_include_the_token_itself(served, top):
    """As OpenAI's client says: up to `logprobs` + 1 of them."""
    options = {"prompt": "def f(", "max_tokens": 20, "temperature": 2, "seed": 1, "logprobs": top}
    [choice] = served.post(TEXT, **options).body["choices"]
    scores, likely = choice["logprobs"], 0
    for token, logprob, alternatives in zip(*(scores[each] for each in LOGPROBS), strict=True):
        assert alternatives[token] == logprob
        assert max(top, 1) <= len(alternatives) <= top + 1
        likely += len(alternatives) == top
    assert likely < 20


@pytest.mark.parametrize("stream", [False, True])
def test_a_long_echo_is_made_in_a_thread_for_requests(served, monkeypatch, stream):
    """The log probabilities of 6,000 tokens would take the event loop 0.1 s."""
    threads, really = [], openai.prompt_logprobs

    def noted(*arguments):
        threads.append(threading.current_thread().name)
        return really(*arguments)

    monkeypatch.setattr(openai, "prompt_logprobs", noted)
    assert served.post(TEXT, prompt="abc", echo=True, max_tokens=0, logprobs=2, stream=stream).status == 200
    assert len(threads) == 1
    assert threads[0].startswith("ondevice-request")


@pytest.mark.parametrize(
    "options",
    [
        {"prompt": "def f(", "stop": ["return value of", "\n\n\n"], "max_tokens": 24},
        {"prompt": "# caf\u00e9 \U0001f600\n", "temperature": 1.5, "seed": 4, "max_tokens": 40},
        {"prompt": "def f(", "logit_bias": {"2": 100}, "max_tokens": 3},
    ],
    ids=["held back", "bytes", "control tokens"],
)
@pytest.mark.parametrize("echo", [False, True])
def test_offsets_of_tokens_are_those_in_the_text_also_where_it_is_held_back(served, options, echo):
    given = {"temperature": 0, **options, "logprobs": 1, "echo": echo}
    [choice] = served.post(TEXT, **given).body["choices"]
    text, logprobs = choice["text"], choice["logprobs"]
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        is_control, is_part = token.startswith("<"), "\ufffd" in token or token.startswith("bytes:")
        assert text.startswith(token, offset) or is_control or is_part
    chunks = [chunk["choices"][0]["logprobs"] for chunk in served.messages(TEXT, **given)]
    assert [each for chunk in chunks if chunk for each in chunk["text_offset"]] == logprobs["text_offset"]


def test_a_text_is_scored_by_the_log_probabilities_of_its_tokens(served, served_model):
    """With no new token: exactly the numbers that the tokens had when they were generated."""
    reply = served_model.generate("def f(", max_new_tokens=30, temperature=0.8, seed=3, top_logprobs=2)
    ids = [*served_model.encode("def f("), *reply.token_ids]
    body = served.post(TEXT, prompt=ids, echo=True, max_tokens=0, logprobs=2).body
    [choice] = body["choices"]
    assert choice["text"] == "def f(" + reply.text
    assert choice["finish_reason"] == "length"
    assert body["usage"].pop("speculative_decoding")["num_drafts"] == 0
    assert body["usage"] == {
        "prompt_tokens": len(ids),
        "completion_tokens": 0,
        "total_tokens": len(ids),
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    scores = choice["logprobs"]
    assert {len(each) for each in scores.values()} == {len(ids)}
    assert scores["token_logprobs"][0] is scores["top_logprobs"][0] is None
    assert scores["token_logprobs"][-30:] == [each.logprob for each in reply.logprobs]
    assert [list(each.values()) for each in scores["top_logprobs"][-30:]] == [
        list(dict([*each.top, (each.token_id, each.logprob)]).values()) for each in reply.logprobs
    ]
    for token, offset in zip(scores["tokens"][1:], scores["text_offset"][1:], strict=True):
        assert choice["text"].startswith(token, offset)


@pytest.mark.needs("llguidance")
@pytest.mark.parametrize("stop", [None, "fter"])
def test_offsets_leave_out_control_tokens_and_count_characters(served, served_model, stop):
    """All tokens of a character that is spread over several begin where it does; a stream has the same offsets."""
    said = [served_model.manifest.bos_token_id, *served_model.tokenizer.encode("é \U0001f600 after it")[1:]]
    options = {"prompt": "x", "max_tokens": len(said), "temperature": 0, "logprobs": 0, "stop": stop}
    form = {"type": "lark", "lark": "start: <[" + "]> <[".join(map(str, said)) + "]>"}
    answer = served.post(TEXT, **options, response_format=form)
    assert answer.status == 200, answer.body
    [choice] = answer.body["choices"]
    scores = choice["logprobs"]
    assert choice["text"] == ("é \U0001f600 a" if stop else "é \U0001f600 after it")
    before = [served_model.tokenizer.decode(said[:count]) for count in range(len(scores["tokens"]))]
    assert scores["text_offset"] == [len(text.rstrip("\N{REPLACEMENT CHARACTER}")) for text in before]
    chunks = served.messages(TEXT, **options, response_format=form)
    assert all("choices" in chunk for chunk in chunks), chunks
    streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [offset for each in streamed if each for offset in each["text_offset"]] == scores["text_offset"]


@pytest.mark.parametrize("prompt", ["def f(x):", "caf\u00e9 \U0001f600 <eos> x"])
def test_an_echoed_prompt_comes_before_the_reply(served, prompt):
    options = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "logprobs": 1}
    [plain] = served.post(TEXT, **options).body["choices"]
    [echoed] = served.post(TEXT, **options, echo=True).body["choices"]
    assert echoed["text"] == prompt + plain["text"]
    assert echoed["finish_reason"] == plain["finish_reason"]
    for name in ("tokens", "token_logprobs", "top_logprobs"):
        assert echoed["logprobs"][name][-6:] == plain["logprobs"][name]
    moved = [offset + len(prompt) for offset in plain["logprobs"]["text_offset"]]
    assert echoed["logprobs"]["text_offset"][-6:] == moved
    assert echoed["logprobs"]["text_offset"] == sorted(echoed["logprobs"]["text_offset"])
    chunks = [chunk["choices"][0] for chunk in served.messages(TEXT, **options, echo=True)]
    assert "".join(chunk["text"] for chunk in chunks) == echoed["text"]
    streamed = [chunk["logprobs"] for chunk in chunks if chunk["logprobs"]]
    for name, values in echoed["logprobs"].items():
        assert [each for chunk in streamed for each in chunk[name]] == values
    assert [chunk["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)


def test_several_echoes_compute_their_prompt_once(served):
    options = {"prompt": [[5, 6, 7, 8], [5, 6, 7]], "n": 2, "temperature": 1, "seed": 4, "max_tokens": 3, "echo": True}
    body = served.post(TEXT, **options, logprobs=0).body
    first, second, third, fourth = (choice["logprobs"] for choice in body["choices"])
    assert first["token_logprobs"][:-3] == second["token_logprobs"][:-3]
    assert third["token_logprobs"][:-3] == fourth["token_logprobs"][:-3] == first["token_logprobs"][:3]
    without = [choice["text"] for choice in served.post(TEXT, **options).body["choices"]]
    assert without == [choice["text"] for choice in body["choices"]]
    assert all(choice["logprobs"] is None for choice in served.post(TEXT, **options).body["choices"])


def test_no_token_and_no_echo_is_an_empty_text(served):
    body = served.post(TEXT, prompt="def f(", max_tokens=0).body
    assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == ("", "length")
    assert body["usage"]["completion_tokens"] == 0
    assert "".join(chunk["choices"][0]["text"] for chunk in served.messages(TEXT, prompt="ab", max_tokens=0)) == ""
    assert served.post(TEXT, prompt=[5], max_tokens=0, echo=True, logprobs=1).body["choices"][0]["logprobs"][
        "token_logprobs"
    ] == [None]


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
        (CHAT, {"messages": MESSAGES, "logit_bias": [[None, 1]]}, "logit_bias"),
        (CHAT, {"messages": MESSAGES, "logit_bias": [[1.7, 1]]}, "logit_bias"),
        (CHAT, {"messages": MESSAGES, "logit_bias": [[True, 1]]}, "logit_bias"),
        (CHAT, {"messages": MESSAGES, "logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        (CHAT, {"messages": MESSAGES, "logit_bias": ""}, "logit_bias"),
        (CHAT, {"messages": MESSAGES, "logit_bias": False}, "logit_bias"),
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
        (TEXT, {"prompt": "a", "echo": 1}, "echo"),
        (TEXT, {"prompt": "a", "suffix": "b"}, "suffix"),
        (TEXT, {"prompt": "a", "max_tokens": -3}, "max_tokens"),
    ],
)
def test_an_error_names_the_wrong_field(served, path, fields, param):
    answer = served.post(path, **fields)
    assert answer.status == 400
    error = answer.body["error"]
    assert (error["code"], error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert param in error["message"]


@pytest.mark.parametrize("name", ["self", "messages", "bos_token"])
def test_names_that_are_the_template_s_own_are_refused(served, name):
    answer = served.post(CHAT, messages=MESSAGES, chat_template_kwargs={name: 1})
    assert answer.status == 400
    assert name in answer.body["error"]["message"]


def test_an_error_names_an_unknown_role(served):
    answer = served.post(CHAT, messages=[{"role": "wizard", "content": "x"}])
    assert answer.status == 400
    assert "wizard" in answer.body["error"]["message"]


def test_a_prompt_longer_than_the_context(served, served_model):
    context = served_model.context_length
    answer = served.post(TEXT, prompt=[5] * (context + 1))
    error = answer.body["error"]
    assert (answer.status, error["type"]) == (400, "exceed_context_size_error")
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (context + 1, context)


def test_logprobs_of_tokens_that_are_parts_of_characters(served, served_model):
    ids = served_model.tokenizer.encode("\U0001f600", add_special_tokens=False)
    assert len(ids) > 1
    first, second = (served_model.tokenizer.token_bytes(token) for token in ids[:2])
    scored = TokenLogprob(ids[0], -1.0, ((ids[0], -1.0), (ids[1], -2.0)))
    made = openai.chat_logprobs([scored], served_model.tokenizer)
    assert made is not None
    [token] = made["content"]
    assert [each["bytes"] for each in (token, *token["top_logprobs"])] == [list(first), list(first), list(second)]
    spelled = ["bytes:" + "".join(f"\\x{byte:02x}" for byte in part) for part in (first, second)]
    assert list(openai.text_logprobs([scored], served_model.tokenizer)["top_logprobs"][0]) == spelled
    scores = served.post(TEXT, prompt="\U0001f600", echo=True, max_tokens=0, logprobs=0).body["choices"][0]["logprobs"]
    assert spelled == [token for token in scores["tokens"] if token.startswith("bytes:")][:2]


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[1]", b"nonsense", b'"text"', b"[" * 100_000, '{"a":"\ud800"}'.encode("utf-8", "surrogatepass")],
)
def test_a_body_that_is_not_a_json_object(served, body):
    answer = served.ask("POST", CHAT, body)
    assert answer.status == 400
    assert answer.body["error"]["type"] == "invalid_request_error"


def test_a_body_that_is_too_large(served):
    answer = served.ask("POST", CHAT, b" " * MAX_REQUEST_BYTES + b"{}")
    assert answer.status == 413


def test_half_a_surrogate_is_refused(served):
    answer = served.ask("POST", TEXT, json.dumps({"prompt": "\ud800"}).encode())
    assert answer.status == 400
    assert "surrogate" in answer.body["error"]["message"]
