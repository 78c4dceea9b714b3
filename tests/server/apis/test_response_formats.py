"""Response formats and required tool calls through every API. The model was not trained to write either."""

import json
from typing import Any

import pytest

from tests.server.served import text_of
from tests.text.conversations import WEATHER

pytestmark = pytest.mark.needs("llguidance")

ASKED = [{"role": "user", "content": "Who?"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Grace"]}, "born": {"type": "integer", "minimum": 1800, "maximum": 1999}},
    "required": ["name", "born"],
    "additionalProperties": False,
}
NAMED = {"name": "person", "schema": SCHEMA, "strict": True}


def check(text):
    person = json.loads(text)
    assert set(person) == {"name", "born"}
    assert person["name"] in ("Ada", "Grace")
    assert 1800 <= person["born"] <= 1999


def test_schema_in_a_chat_completion(served):
    form = {"type": "json_schema", "json_schema": NAMED}
    options = {"messages": ASKED, "response_format": form, "seed": 3}
    [choice] = served.post("/v1/chat/completions", **options).body["choices"]
    check(choice["message"]["content"])
    assert choice["finish_reason"] == "stop"
    assert text_of(served.messages("/v1/chat/completions", **options)) == choice["message"]["content"]
    plain = served.post("/v1/chat/completions", **options, drafter="none").body
    assert plain["choices"] == [choice]


def test_schema_in_llama_cpp_s_short_form(served):
    body = served.post("/v1/completions", prompt="person = ", json_schema=SCHEMA).body
    check(body["choices"][0]["text"])


def test_schema_in_a_response(served):
    body = served.post("/v1/responses", input="Who?", text={"format": {"type": "json_schema", **NAMED}}).body
    check(body["output"][0]["content"][0]["text"])


def test_schema_in_a_message(served):
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    body = served.post("/v1/messages", messages=ASKED, max_tokens=200, output_config=form).body
    check(body["content"][0]["text"])


def test_what_cannot_be_enforced_is_ignored_where_an_api_has_no_word_for_it(served):
    """As at Ollama and llama.cpp; OpenAI's clients have `strict`."""
    schema = {**SCHEMA, "properties": {**SCHEMA["properties"], "name": {"type": "null", "not": {}}}}
    forms = {"/api/generate": {"format": schema}, "/v1/completions": {"json_schema": schema}}
    for path, form in forms.items():
        assert served.post(path, prompt="person = ", stream=False, **form).status == 200


def test_an_unsupported_schema_is_refused(served):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "unheard"}}}
    answer = served.post("/v1/chat/completions", messages=ASKED, response_format=form)
    assert answer.status == 400
    assert "unheard" in answer.body["error"]["message"]


def test_a_schema_that_would_end_the_process_is_refused(served):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": -(2**63)}}}
    answer = served.post("/v1/chat/completions", messages=ASKED, response_format=form)
    assert answer.status == 400
    assert "numbers from" in answer.body["error"]["message"]


def test_a_grammar_that_is_too_large_is_no_fault_of_the_server(served):
    """Its first token shows it, when a stream has begun."""
    form = {"type": "regex", "regex": "(a{1000}){1000}"}
    *_, failed = served.messages("/v1/responses", input="Who?", text={"format": form})
    assert failed["type"] == "response.failed"
    assert failed["response"]["error"]["code"] == "invalid_prompt"
    assert served.post("/v1/responses", input="Who?", text={"format": form}).status == 400


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_required_tool_call(chatting, choice):
    options = {"messages": ASKED, "tools": [WEATHER], "tool_choice": choice, "max_tokens": 300, "seed": 1}
    [reply] = chatting.post("/v1/chat/completions", **options).body["choices"]
    for call in reply["message"].get("tool_calls", []):
        assert call["function"]["name"] == "get_weather"
        json.loads(call["function"]["arguments"])
    assert reply["message"].get("tool_calls") or reply["finish_reason"] == "length"
