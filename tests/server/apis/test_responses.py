"""`/v1/responses` through OpenAI's Python client."""

import json

import openai
import pytest

CALL = '<|tool_call>call:get_weather{city:<|"|>Bern<|"|>,days:2}<tool_call|>'
THOUGHT = "<|channel>thought\nI need the weather.\n<channel|>"
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}


@pytest.fixture
def client(scripted):
    with openai.OpenAI(base_url=f"{scripted.served.url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


def test_response(client, scripted):
    scripted.says("Yes, it will.<turn|>")
    response = client.responses.create(
        model="reference", input="Will it rain?", instructions="Be brief.", temperature=0.5
    )
    assert response.output_text == "Yes, it will."
    assert (response.status, response.model, response.temperature) == ("completed", "reference", 0.5)
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Will it rain?"}]
    assert response.usage.input_tokens == len(scripted.model.encode(prompt))
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens


def test_a_conversation_with_a_tool(client, scripted):
    scripted.says(f"{THOUGHT}{CALL}<|tool_response>")
    asked = [{"role": "user", "content": [{"type": "input_text", "text": "Will it rain?"}]}]
    reasoning = {"effort": "low", "summary": "auto", "context": "current_turn"}
    options = {"model": "reference", "tools": [WEATHER], "reasoning": reasoning}
    response = client.responses.create(input=asked, **options)
    reasoning, call = response.output
    assert reasoning.content[0].text == "I need the weather."
    thoughts = scripted.model.tokenizer.encode("I need the weather.", add_special_tokens=False)
    assert response.usage.output_tokens_details.reasoning_tokens == len(thoughts) < response.usage.output_tokens
    assert (call.type, call.name, json.loads(call.arguments)) == (
        "function_call",
        "get_weather",
        {"city": "Bern", "days": 2},
    )

    scripted.says("It rains.\n<channel|>Yes.<turn|>")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    answer = client.responses.create(input=[*asked, *response.output, result], **options)
    assert answer.output_text == "Yes."
    again = client.responses.create(input=[*asked, *response.output, result, *answer.output, asked[0]], **options)
    assert again.status == "completed"


def test_functions_in_namespaces(client, scripted):
    """Codex declares these, and OpenAI's own tools, which are left out."""
    scripted.says('<|tool_call>call:sky__get_weather{city:<|"|>Bern<|"|>}<tool_call|><|tool_response>')
    sky = {"type": "namespace", "name": "sky", "description": "The sky.", "tools": [WEATHER]}
    options = {"model": "reference", "tools": [sky, {"type": "web_search", "external_web_access": False}]}
    response = client.responses.create(input="Rain?", **options, extra_body={"client_metadata": {"x": "y"}})
    [call] = response.output
    assert (call.namespace, call.name) == ("sky", "get_weather")
    assert [tool.type for tool in response.tools] == ["namespace"]

    function = {**WEATHER, "name": "sky__get_weather"}
    del function["type"]
    alone = [{"type": "function", "function": function}]
    prompt = [{"role": "user", "content": "Rain?"}]
    assert response.usage.input_tokens == len(scripted.model.encode(prompt, tools=alone))

    scripted.says("Yes.<turn|>")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    again = client.responses.create(input=[*prompt, call, result], **options)
    called = {
        "id": call.call_id,
        "type": "function",
        "function": {"name": "sky__get_weather", "arguments": call.arguments},
    }
    said = [*prompt, {"role": "assistant", "tool_calls": [called]}]
    said.append({"role": "tool", "tool_call_id": call.call_id, "content": "rain"})
    assert again.usage.input_tokens == len(scripted.model.encode(said, tools=alone))


def test_tokens_of_a_prompt_are_counted(client, scripted):
    scripted.says("Yes.<turn|>")
    options = {"model": "reference", "input": "Will it rain?", "instructions": "Be brief.", "tools": [WEATHER]}
    counted = client.responses.input_tokens.count(**options)
    assert counted.input_tokens == client.responses.create(**options).usage.input_tokens
    answer = scripted.served.post("/v1/responses/input_tokens", input="x", inputs="y")
    assert (answer.status, answer.body["error"]["param"]) == (400, "inputs")
    assert scripted.served.get("/v1/responses/input_tokens").status == 404


def test_tools_are_repeated(client, scripted):
    scripted.says("Yes.<turn|>")
    options = {"model": "reference", "input": "Rain?"}
    response = client.responses.create(**options, tools=[WEATHER], tool_choice="none")
    assert (response.tool_choice, response.tools[0].to_dict()) == ("none", WEATHER)
    response = client.responses.create(**options)
    assert (response.tool_choice, response.tools) == ("auto", [])


def test_one_call_where_parallel_ones_are_not_allowed(client, scripted):
    scripted.says(f"One moment.{CALL}{CALL}<|tool_response>")
    options = {"model": "reference", "input": "Will it rain?", "tools": [WEATHER]}
    response = client.responses.create(**options, parallel_tool_calls=False)
    assert [item.type for item in response.output] == ["message", "function_call"]
    assert response.parallel_tool_calls is False
    assert client.responses.create(**options).parallel_tool_calls is True


def test_streamed_response(client, scripted):
    scripted.says(f"{THOUGHT}One moment.{CALL}{CALL}<|tool_response>")
    with client.responses.stream(model="reference", input="Will it rain?", tools=[WEATHER]) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 4
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert {item.status for item in done} == {"completed"}
    assert (
        "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
        == "I need the weather."
    )
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "One moment."
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "function_call"]
    assert json.loads(final.output[3].arguments) == {"city": "Bern", "days": 2}


def test_response_cut_at_the_token_limit(client, scripted):
    scripted.says("There will be rain.<turn|>")
    response = client.responses.create(model="reference", input="Rain?", max_output_tokens=2)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    with client.responses.stream(model="reference", input="Rain?", max_output_tokens=2) as stream:
        *_, done, last = stream
    assert (done.type, done.item.status) == ("response.output_item.done", "incomplete")
    assert last.type == "response.incomplete"
    assert last.response.usage.input_tokens_details.cache_write_tokens == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": 1}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].image_url"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "a", "tools": [{"name": "f"}]}, "tools[0].type"),
        ({"input": "a", "tools": [{"type": "namespace", "name": "n", "tools": [{}]}]}, "tools[0].tools[0].type"),
        ({"input": "a", "tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"input": "a", "reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
    ],
)
def test_an_error_names_the_wrong_field(scripted, fields, param):
    answer = scripted.served.post("/v1/responses", **fields)
    assert (answer.status, answer.body["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    "metadata",
    [
        "a",
        ["a"],
        {"a": 1},
        {"a": None},
        {"a": {"b": "c"}},
        {"a": "x" * 513},
        {"a" * 65: "x"},
        dict.fromkeys("abcdefghijklmnopq", "x"),
    ],
)
def test_metadata_is_limited(served, metadata):
    answer = served.post("/v1/responses", input="x", metadata=metadata, stream=True)
    assert (answer.status, answer.body["error"]["param"]) == (400, "metadata")


def test_metadata_is_repeated(served):
    metadata = {f"{number:064}": "x" * 512 for number in range(16)}
    assert served.post("/v1/responses", input="x", max_output_tokens=2, metadata=metadata).body["metadata"] == metadata
