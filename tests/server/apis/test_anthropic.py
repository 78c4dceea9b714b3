"""`/v1/messages` through Anthropic's Python client."""

import anthropic
import pytest

from ondevice.server.apis.anthropic import read_message, read_messages
from ondevice.server.guard import Rules
from ondevice.server.requests import RequestFields

ASKED = [{"role": "user", "content": "Will it rain in Bern?"}]
CALL = '<|tool_call>call:get_weather{city:<|"|>Bern<|"|>,days:2}<tool_call|>'
THOUGHT = "<|channel>thought\nI need the weather.\n<channel|>"
WEATHER = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def client_of(served, key="none"):
    return anthropic.Anthropic(base_url=served.url, api_key=key, max_retries=0)


@pytest.fixture
def client(scripted):
    return client_of(scripted.served)


def test_message_and_token_count(client, scripted):
    scripted.says("Yes, it will.<turn|>")
    message = client.messages.create(model="reference", max_tokens=100, system="Be brief.", messages=ASKED)
    assert [block.text for block in message.content] == ["Yes, it will."]
    assert (message.stop_reason, message.role, message.model) == ("end_turn", "assistant", "reference")
    prompt = [{"role": "system", "content": "Be brief."}, *ASKED]
    usage = message.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == len(scripted.model.encode(prompt))
    counted = client.messages.count_tokens(model="reference", system="Be brief.", messages=ASKED)
    assert counted.input_tokens == len(scripted.model.encode(prompt))


def test_tool_call_thinking_and_tool_result(client, scripted):
    scripted.says(f"{THOUGHT}One moment. {CALL}<|tool_response>")
    options = {
        "model": "reference",
        "max_tokens": 200,
        "tools": [WEATHER],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    message = client.messages.create(messages=ASKED, **options)
    assert message.stop_reason == "tool_use"
    thinking, text, call = message.content
    assert (thinking.type, thinking.thinking) == ("thinking", "I need the weather.")
    assert (text.type, text.text) == ("text", "One moment.")
    assert (call.type, call.name, call.input) == ("tool_use", "get_weather", {"city": "Bern", "days": 2})

    scripted.says("It rains.\n<channel|>Yes.<turn|>")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "rain"}]}
    said = [*ASKED, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    answer = client.messages.create(messages=said, **options)
    assert answer.content[-1].text == "Yes."


@pytest.mark.parametrize(
    ("content", "failed", "said"),
    [
        ("no such city", False, "no such city"),
        ("no such city", True, "Error:\nno such city"),
        ([], True, "Error:"),
        ([{"type": "text", "text": "no"}, {"type": "text", "text": "city"}], True, "Error:\nno\ncity"),
    ],
)
def test_the_model_learns_that_a_tool_failed(content, failed, said):
    """Templates have no flag for it, and the text alone may not tell."""
    result = {"type": "tool_result", "tool_use_id": "1", "content": content, "is_error": failed}
    [message] = read_messages(RequestFields({"messages": [{"role": "user", "content": [result]}]}))
    assert message == {"role": "tool", "tool_call_id": "1", "content": said}


def test_a_reply_of_nothing_but_calls_has_no_text():
    call = {"type": "tool_use", "id": "1", "name": "get_weather", "input": {"city": "Bern"}}
    said = [{"role": "assistant", "content": [each]} for each in (call, {"type": "text", "text": ""})]
    called, silent = read_messages(RequestFields({"messages": said}))
    assert called["content"] is None
    assert silent["content"] == ""


def test_fields_of_claude_code(client, scripted):
    """It edits contexts, which are not edited here, and declares Anthropic's own tools, which are left out."""
    scripted.says("Yes.<turn|>")
    edits = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
    options = {"model": "reference", "messages": ASKED}
    message = client.messages.create(
        **options, max_tokens=9, tools=[search, WEATHER], extra_body={"context_management": edits}
    )
    assert message.content[0].text == "Yes."
    counted = client.messages.count_tokens(**options, tools=[search, WEATHER]).input_tokens
    assert counted == client.messages.count_tokens(**options, tools=[WEATHER]).input_tokens
    choice = {"type": "tool", "name": "web_search"}
    with pytest.raises(anthropic.BadRequestError, match="tool_choice"):
        client.messages.create(**options, max_tokens=9, tools=[search], tool_choice=choice)


def test_a_client_that_has_conversations_stored_goes_on_without(client, scripted):
    scripted.says("Yes.<turn|>")
    answer = scripted.served.post("/v1/messages", max_tokens=5, messages=ASKED, thread={"type": "create"})
    assert answer.body["error"]["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """The weather of a city."""
        return city

    asked = {"model": "reference", "max_tokens": 20, "messages": ASKED, "tools": [get_weather]}
    assert client.beta.messages.tool_runner(**asked).until_done().content[0].text == "Yes."


@pytest.mark.filterwarnings("error")
def test_models(client):
    [model] = client.models.list()
    assert (model.type, model.id, model.display_name) == ("model", "reference", "reference")
    assert client.models.retrieve("reference") == model
    assert model.created_at.year > 2025
    assert "capabilities" not in model.to_dict()


def test_one_call_where_parallel_ones_are_disabled(client, scripted):
    scripted.says(f"One moment.{CALL}{CALL}<|tool_response>")
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    message = client.messages.create(
        model="reference", max_tokens=200, messages=ASKED, tools=[WEATHER], tool_choice=choice
    )
    assert [block.type for block in message.content] == ["text", "tool_use"]
    assert message.stop_reason == "tool_use"


def test_streamed_message(client, scripted):
    scripted.says(f"{THOUGHT}One moment. {CALL}{CALL}<|tool_response>")
    with client.messages.stream(model="reference", max_tokens=200, messages=ASKED, tools=[WEATHER]) as stream:
        events = list(stream)
        message = stream.get_final_message()
    assert events[0].type == "message_start"
    assert events[-1].type == "message_stop"
    for kind in ("content_block_start", "content_block_stop"):
        assert [event.index for event in events if event.type == kind] == [0, 1, 2, 3]
    deltas = [event.index for event in events if event.type == "content_block_delta"]
    assert sorted(deltas) == deltas
    assert set(deltas) == {0, 1, 2, 3}
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert message.content[0].thinking == "I need the weather."
    assert message.content[1].text == "One moment."
    assert message.content[3].input == {"city": "Bern", "days": 2}
    assert message.stop_reason == "tool_use"
    assert message.usage.output_tokens > 10


def test_a_whole_message_has_the_blocks_of_its_stream(client, scripted):
    scripted.says(f"One.{THOUGHT}Two.{CALL}<|tool_response>")
    options = {"model": "reference", "max_tokens": 200, "messages": ASKED, "tools": [WEATHER]}
    whole = client.messages.create(**options)
    assert [block.type for block in whole.content] == ["text", "thinking", "text", "tool_use"]
    with client.messages.stream(**options) as stream:
        streamed = stream.get_final_message()
    ids = {"id"}
    assert [block.model_dump(exclude=ids) for block in streamed.content] == [
        block.model_dump(exclude=ids) for block in whole.content
    ]


@pytest.mark.parametrize("stops", [["rain"], ["snow", "rain", "."]])
def test_stop_sequence(client, scripted, stops):
    scripted.says("There will be rain.<turn|>")
    message = client.messages.create(model="reference", max_tokens=100, messages=ASKED, stop_sequences=stops)
    assert message.content[0].text == "There will be"
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "rain")


def test_a_reply_that_ends_with_its_form_did_not_end_at_a_stop_sequence(served):
    asked = {"max_tokens": 100, "messages": ASKED, "stop_sequences": ["snow"]}
    form = {"type": "json_schema", "schema": {"enum": ["yes", "no"]}}
    body = served.post("/v1/messages", **asked, output_config={"format": form}).body
    assert body["content"][0]["text"] in ('"yes"', '"no"')
    assert (body["stop_reason"], body["stop_sequence"]) == ("end_turn", None)


def test_max_tokens(client, scripted):
    scripted.says("There will be rain.<turn|>")
    assert client.messages.create(model="reference", max_tokens=2, messages=ASKED).stop_reason == "max_tokens"


@pytest.mark.parametrize("kind", ["enabled", "adaptive", "disabled", "between_tools"])
def test_kinds_of_thinking(kind):
    fields = RequestFields({"messages": ASKED, "max_tokens": 5, "thinking": {"type": kind}})
    request, _ = read_message(fields)
    assert request.options["thinking"] == (kind in ("enabled", "adaptive"))


@pytest.mark.parametrize(
    ("fields", "thinking"),
    [
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}}, "high"),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "new"}}, True),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}, False),
        ({"output_config": {"effort": "high"}}, None),
    ],
)
def test_how_much_it_thinks(fields, thinking):
    request, _ = read_message(RequestFields({"messages": ASKED, "max_tokens": 5, **fields}))
    assert request.options.get("thinking") == thinking


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"extra_body": {"temperature": -1}}, "temperature"),
        ({"messages": []}, "the prompt is empty"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "source.type is missing"),
        ({"tools": [{"description": "nameless"}]}, "tools[0].name is missing"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
        ({"thinking": {"type": "much"}}, "thinking.type"),
    ],
)
def test_bad_requests_name_the_field(client, change, complaint):
    with pytest.raises(anthropic.BadRequestError, match="invalid_request_error") as raised:
        client.messages.create(**{"model": "reference", "max_tokens": 5, "messages": ASKED, **change})
    assert complaint in raised.value.message


def test_not_found_and_authentication_errors(client, serve_toy):
    with pytest.raises(anthropic.NotFoundError):
        client.post("/v1/messages/batches", cast_to=object)
    with serve_toy(rules=Rules(api_key="secret")) as served:
        with pytest.raises(anthropic.AuthenticationError):
            client_of(served, "wrong").messages.create(model="toy-model", max_tokens=1, messages=ASKED)
        assert client_of(served, "secret").messages.create(model="toy-model", max_tokens=1, messages=ASKED).id
