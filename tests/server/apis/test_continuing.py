"""A last message of the assistant is continued, in every API that takes messages."""

import json

import pytest

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
BEGUN = [{"role": "user", "content": "Will it rain?"}, {"role": "assistant", "content": "There will"}]
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"], "additionalProperties": False}


def test_it_is_the_reply_of_generate(served, served_model):
    options = {"max_new_tokens": 12, "temperature": 0.0}
    reply = served_model.generate(BEGUN, **options, continue_final=True)
    other = served_model.generate(BEGUN, **options)
    prompt = len(served_model.encode(BEGUN, continue_final=True))
    assert reply.stats.prompt_tokens == prompt != other.stats.prompt_tokens

    chat = served.post(CHAT, messages=BEGUN, max_tokens=12, temperature=0).body
    assert chat["choices"][0]["message"]["content"] == reply.text
    assert chat["usage"]["prompt_tokens"] == prompt
    message = served.post(MESSAGES, messages=BEGUN, max_tokens=12, temperature=0).body
    assert message["content"][0]["text"] == reply.text
    assert served.post(f"{MESSAGES}/count_tokens", messages=BEGUN).body["input_tokens"] == prompt
    response = served.post(RESPONSES, input=BEGUN, max_output_tokens=12, temperature=0).body
    assert response["output"][0]["content"][0]["text"] == reply.text


@pytest.mark.parametrize(
    ("fields", "continues"),
    [
        ({"continue_final_message": True}, True),
        ({"continue_final_message": True, "add_generation_prompt": False}, True),
        ({"add_generation_prompt": False}, True),
        ({"continue_final_message": False}, False),
        ({"add_generation_prompt": True}, False),
    ],
)
def test_vllm_s_fields(served, served_model, fields, continues):
    body = served.post(CHAT, messages=BEGUN, max_tokens=1, **fields).body
    assert body["usage"]["prompt_tokens"] == len(served_model.encode(BEGUN, continue_final=continues))


@pytest.mark.parametrize("both", [True, False])
def test_fields_that_contradict_each_other(served, both):
    answer = served.post(CHAT, messages=BEGUN, continue_final_message=both, add_generation_prompt=both)
    assert (answer.status, answer.body["error"]["param"]) == (400, "continue_final_message")


def test_only_an_assistant_s_message_is_continued(served):
    answer = served.post(CHAT, messages=BEGUN[:1], continue_final_message=True)
    assert answer.status == 400
    assert "the last one is of the role user" in answer.body["error"]["message"]


@pytest.mark.needs("llguidance")
def test_the_form_holds_for_the_whole_message(served):
    form = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    messages = [BEGUN[0], {"role": "assistant", "content": '{"a": "'}]
    rest = served.post(CHAT, messages=messages, response_format=form).body["choices"][0]["message"]["content"]
    assert json.loads('{"a": "' + rest)["a"] in ("x", "y")
    messages[1]["content"] = "Here it is: "
    answer = served.post(CHAT, messages=messages, response_format=form)
    assert answer.status == 400
    assert "does not begin a text of the form" in answer.body["error"]["message"]


def test_there_are_no_thoughts_before_the_rest(scripted):
    scripted.says(" be rain.<turn|>")
    options = {"messages": BEGUN, "chat_template_kwargs": {"enable_thinking": True}}
    message = scripted.served.post(CHAT, **options).body["choices"][0]["message"]
    assert message == {"role": "assistant", "content": " be rain."}
