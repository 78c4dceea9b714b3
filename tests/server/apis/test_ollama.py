"""Ollama's API, through its Python client."""

import base64
import json
from datetime import UTC, datetime

import ollama
import pytest

from ondevice.server.apis.ollama import read_messages
from ondevice.server.guard import Rules
from ondevice.server.requests import RequestFields
from tests.fuzz.requests import PICTURE
from tests.text.conversations import WEATHER

ASKED = [{"role": "user", "content": "Will it rain in Bern?"}]
CALL = '<|tool_call>call:get_weather{city:<|"|>Bern<|"|>,days:2}<tool_call|>'
THOUGHT = "<|channel>thought\nI need the weather.\n<channel|>"
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"], "additionalProperties": False}
GREEDY = {"temperature": 0, "num_predict": 12}


def client_of(served, **headers):
    return ollama.Client(host=served.url, headers=headers)


@pytest.fixture
def client(served):
    return client_of(served)


def test_chat_is_the_reply_of_generate(client, served_model):
    reply = served_model.generate(ASKED, max_new_tokens=12, temperature=0.0)
    answer = client.chat("reference", ASKED, options=GREEDY)
    assert answer.message.content == reply.text
    assert (answer.done, answer.done_reason, answer.model) == (True, "length", "reference")
    assert (answer.prompt_eval_count, answer.eval_count) == (reply.stats.prompt_tokens, 12)
    assert answer.eval_duration > 0
    assert answer.total_duration > 0
    parts = list(client.chat("reference", ASKED, options=GREEDY, stream=True))
    assert "".join(part.message.content for part in parts) == reply.text
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].eval_count == 12


def test_it_streams_lines_unless_told_otherwise(served):
    answer = served.post("/api/chat", model="reference", messages=ASKED, options=GREEDY)
    assert answer.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in answer.body.splitlines()]
    assert lines[-1]["done"]
    assert served.post("/api/chat", messages=ASKED, options=GREEDY, stream=False).body["done"]


def test_a_text_with_other_ends_of_lines_stays_on_its_line(scripted):
    """Ollama's client reads lines as Python's `splitlines` does."""
    text = "a\u2028b\x85c\u2029d"
    scripted.says(f"{text}<turn|>")
    assert client_of(scripted.served).chat("reference", ASKED).message.content == text
    chunks = [*client_of(scripted.served).chat("reference", ASKED, stream=True)]
    assert "".join(chunk.message.content for chunk in chunks) == text


def test_generate_with_template_system_message_and_raw(client, served_model):
    asked = {"model": "reference", "prompt": "def f(", "options": GREEDY}
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "def f("}]
    options = {"max_new_tokens": 12, "temperature": 0.0}
    assert client.generate(**asked, system="Be brief.").response == served_model.generate(messages, **options).text
    assert client.generate(**asked).response == served_model.generate(messages[1:], **options).text
    raw = served_model.generate("def f(", **options).text
    assert client.generate(**asked, raw=True).response == raw
    assert "".join(part.response for part in client.generate(**asked, raw=True, stream=True)) == raw


def test_fields_beside_options_are_ignored(served):
    """The client of Vercel's AI SDK sends these once more, and Ollama ignores them."""
    beside = {"temperature": 9, "top_p": 7, "max_output_tokens": 1, "tool_choice": "auto"}
    asked = {"messages": ASKED, "options": GREEDY, "stream": False}
    answer = served.post("/api/chat", **asked, **beside)
    assert answer.body["message"] == served.post("/api/chat", **asked).body["message"]
    assert served.post("/api/generate", prompt="x", options=GREEDY, stream=False, **beside).status == 200
    assert "unknown field" in served.post("/api/chat", **asked, top_k=1).body["error"]


def test_thoughts_tools_and_their_results(scripted):
    client = client_of(scripted.served)
    scripted.says(f"{THOUGHT}One moment. {CALL}<|tool_response>")
    message = client.chat("reference", ASKED, tools=[WEATHER], think=True).message
    assert (message.thinking, message.content) == ("I need the weather.", "One moment.")
    [call] = message.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_weather", {"city": "Bern", "days": 2})
    parts = list(client.chat("reference", ASKED, tools=[WEATHER], think="low", stream=True))
    assert "".join(part.message.thinking or "" for part in parts) == "I need the weather."
    assert [call.function.name for part in parts for call in part.message.tool_calls or ()] == ["get_weather"]

    scripted.says("It rains.\n<channel|>Yes.<turn|>")
    result = {"role": "tool", "tool_name": "get_weather", "content": "rain"}
    answer = client.chat("reference", [*ASKED, message, result], tools=[WEATHER], think=True)
    assert answer.message.content == "Yes."


def test_a_result_belongs_to_the_call_that_it_names():
    calls = [{"id": each, "function": {"name": "get_weather", "arguments": {"city": each}}} for each in ("a", "b", "c")]
    results = [
        {"role": "tool", "content": "rain", "tool_call_id": "b"},
        {"role": "tool", "content": "sun", "tool_name": "get_weather"},
        {"role": "tool", "content": "snow"},
    ]
    fields = RequestFields({"messages": [{"role": "assistant", "content": "", "tool_calls": calls}, *results]})
    asked, *answered = read_messages(fields)
    assert asked["content"] is None
    assert [each["tool_call_id"] for each in answered] == ["b", "a", "c"]


def test_the_last_message_is_continued(client, served_model):
    begun = [*ASKED, {"role": "assistant", "content": "There will"}]
    reply = served_model.generate(begun, max_new_tokens=12, temperature=0.0, continue_final=True)
    assert client.chat("reference", begun, options=GREEDY).message.content == reply.text


@pytest.mark.parametrize("form", ["json", SCHEMA])
def test_form_of_the_answer(client, form):
    options = {"num_predict": 60, "temperature": 0, "stop": None}
    text = client.chat("reference", ASKED, format=form, options=options).message.content
    if form == "json":
        assert text.startswith("{")
    else:
        assert json.loads(text)["a"] in ("x", "y")


def test_log_probabilities_and_drafts(client, served_model):
    reply = served_model.generate(ASKED, max_new_tokens=6, temperature=0.0, logprobs=True, top_logprobs=2)
    options = {"num_predict": 6, "temperature": 0, "drafter": "ngram", "num_assistant_tokens": 3}
    answer = client.chat("reference", ASKED, logprobs=True, top_logprobs=2, options=options)
    assert [each.logprob for each in answer.logprobs] == [each.logprob for each in reply.logprobs]
    assert len(answer.logprobs[0].top_logprobs) == 2


def test_a_picture_reaches_the_text_layer(served):
    """The reference bundle has no tower, and says so; what is no base64 is refused by its field."""
    data = PICTURE.partition(",")[2]
    answer = served.post("/api/generate", prompt="What is it?", images=[data])
    assert answer.status == 400
    assert "reads text only" in answer.body["error"]
    assert (
        "images" in served.post("/api/chat", messages=[{"role": "user", "content": "x", "images": ["?"]}]).body["error"]
    )
    assert base64.b64decode(data)


def test_models(client, served_model, reference_bundle):
    [entry] = client.list().models
    assert (entry.model, entry.details.format) == ("reference", "ondevice")
    assert entry.size > 1000
    shown = client.show("reference")
    assert {"completion"} <= set(shown.capabilities)
    assert shown.template == (reference_bundle / "chat_template.jinja").read_text("utf-8")
    assert any(name.endswith(".context_length") for name in shown.modelinfo)
    assert [each.model for each in client.ps().models] == ["reference"]
    assert client.show("reference:latest").template == shown.template


def test_version(served):
    assert served.get("/api/version").body["version"].count(".") == 2


@pytest.mark.parametrize("path", ["pull", "push", "create", "copy", "embed", "embeddings", "delete"])
def test_what_is_not_here_says_what_is(served, path):
    answer = served.ask("DELETE" if path == "delete" else "POST", f"/api/{path}", {"model": "reference"})
    assert answer.status == 404
    assert ("ondevice" in answer.body["error"]) != ("embed" in path)


def test_errors(client, serve_toy):
    with pytest.raises(ollama.ResponseError, match="no model 'other' here") as raised:
        client.chat("other", ASKED)
    assert raised.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match=r"options\.temperature"):
        client.chat("reference", ASKED, options={"temperature": "warm"})
    with pytest.raises(ollama.ResponseError, match="keep_alive must be"):
        client.chat("reference", ASKED, keep_alive="soon")
    with serve_toy(rules=Rules(api_key="secret")) as served:
        with pytest.raises(ollama.ResponseError, match="wrong or missing API key"):
            client_of(served).list()
        assert client_of(served, Authorization="Bearer secret").list().models


def hours_left(entry) -> float:
    """Hours until a model of `ps` is unloaded."""
    return (entry.expires_at - datetime.now(UTC)).total_seconds() / 3600


def test_an_empty_request_loads_the_model_and_keep_alive_unloads_it(serve_toy):
    with serve_toy() as served:
        client = client_of(served)
        assert client.chat("toy-model", [], keep_alive="1h30m").done_reason == "load"
        [entry] = client.ps().models
        assert 1 < hours_left(entry) < 2
        assert client.generate("toy-model", "", keep_alive=-1).done_reason == "load"
        assert hours_left(client.ps().models[0]) > 24 * 365 * 100  # `ollama ps` shows "Forever"
        client.generate("toy-model", "abc", raw=True, keep_alive=0, options={"num_predict": 2})
        while client.ps().models:
            pass
        assert client.generate("toy-model", "abc", raw=True, options={"num_predict": 2}).eval_count == 2
        for ask in (client.chat, client.generate):
            for now in (0, "0", "0s"):
                assert ask("toy-model", keep_alive=now).done_reason == "unload"
        while client.ps().models:
            pass
        client.generate("toy-model", "abc", raw=True, options={"num_predict": 2})
        [entry] = client.ps().models  # loaded anew, it stays as usual
        assert hours_left(entry) > 24 * 365 * 100
