"""Chat completions, completions and models through OpenAI's Python client."""

import asyncio
import json
import re

import openai
import pytest

from ondevice.server.guard import Rules
from tests.conftest import ROOT
from tests.server.served import wait_until
from tests.text.conversations import WEATHER

MESSAGES = [{"role": "user", "content": "def fibonacci(n):"}]


def client_of(served, key="none", **options):
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key=key, max_retries=0, **options)


@pytest.fixture
def client(served):
    with client_of(served) as opened:
        yield opened


def test_chat_completion(client, served_model):
    reply = client.chat.completions.create(model="reference", messages=MESSAGES, max_tokens=24, temperature=0)
    same = served_model.generate(MESSAGES, max_new_tokens=24, temperature=0.0)
    assert reply.choices[0].message.content == same.text
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage.completion_tokens == 24
    assert reply.usage.prompt_tokens_details.cached_tokens >= 0
    assert reply.model_extra["timings"]["predicted_n"] == 24


def test_streamed_chat_completion(client, served_model):
    chunks = list(
        client.chat.completions.create(
            model="reference",
            messages=MESSAGES,
            max_tokens=24,
            temperature=0.7,
            seed=4,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == served_model.generate(MESSAGES, max_new_tokens=24, temperature=0.7, seed=4).text
    assert chunks[-1].usage.completion_tokens == 24
    assert chunks[-2].choices[0].finish_reason == "length"


def test_the_client_s_stream_helper(client):
    with client.chat.completions.stream(model="reference", messages=MESSAGES, stop="\n    ", temperature=0) as stream:
        texts = [event.delta for event in stream if event.type == "content.delta"]
        whole = stream.get_final_completion()
    assert "".join(texts) == whole.choices[0].message.content


def test_completion_and_models(client):
    reply = client.completions.create(model="reference", prompt="def f(", max_tokens=4, n=2, seed=1, temperature=1)
    assert [choice.index for choice in reply.choices] == [0, 1]
    assert [model.id for model in client.models.list()] == ["reference"]
    assert client.models.retrieve("reference").owned_by == "ondevice"


def test_several_clients_at_once(served, served_model):
    prompts = [f"def {name}(x):" for name in ("one", "two", "three", "four", "five", "six")]

    async def ask(client, prompt):
        parts = []
        stream = await client.completions.create(
            model="reference", prompt=prompt, max_tokens=20, temperature=0, stream=True
        )
        async for chunk in stream:
            parts.append(chunk.choices[0].text)
        return "".join(parts)

    async def ask_all():
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, prompt) for prompt in prompts))

    alone = [served_model.generate(prompt, max_new_tokens=20, temperature=0.0).text for prompt in prompts]
    assert asyncio.run(ask_all()) == alone


def test_closing_a_stream_cancels_it(client, served):
    before = served.gauge("tokens_predicted_total")
    stream = client.completions.create(model="reference", prompt="import os\n" * 20, stream=True, temperature=0)
    for _ in zip(range(3), stream, strict=False):
        pass
    stream.close()
    served.wait_until_idle()
    assert served.gauge("tokens_predicted_total") - before < 1500


@pytest.mark.parametrize(
    ("change", "param"), [({"temperature": -1}, "temperature"), ({"messages": []}, "messages"), ({"stop": 1}, "stop")]
)
def test_bad_requests_name_the_field(client, change, param):
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(**{"model": "reference", "messages": MESSAGES, **change})
    assert raised.value.param == param
    assert raised.value.type == "invalid_request_error"


def test_not_found_and_authentication_errors(client, serve_toy):
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    with serve_toy(rules=Rules(api_key="secret")) as served:
        with pytest.raises(openai.AuthenticationError):
            client_of(served, "wrong").models.list()
        assert [model.id for model in client_of(served, "secret").models.list()] == ["toy-model"]


def test_the_client_retries_when_the_queue_is_full(serve_toy, gate):
    with serve_toy(max_sequences=1, max_waiting=0) as served:
        gate.close()
        with served.stream("/v1/completions", prompt="abc"):
            wait_until(lambda: served.gauge("requests_processing") == 1)
            with pytest.raises(openai.InternalServerError) as raised:
                client_of(served).completions.create(model="toy-model", prompt="abc", max_tokens=2)
            assert raised.value.status_code == 503
        gate.open()
        again = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=3)
        assert len(again.completions.create(model="toy-model", prompt="abc", max_tokens=2).choices) == 1


def test_tool_call_with_reasoning(scripted):
    scripted.says(
        '<|channel>thought\nHm.\n<channel|><|tool_call>call:get_weather{city:<|"|>Bern<|"|>}<tool_call|><|tool_response>'
    )
    client = client_of(scripted.served)
    asked = [{"role": "user", "content": "Will it rain in Bern?"}]
    whole = client.chat.completions.create(model="reference", messages=asked, tools=[WEATHER]).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.model_extra["reasoning_content"] == "Hm."
    assert json.loads(whole.message.tool_calls[0].function.arguments) == {"city": "Bern"}
    with client.chat.completions.stream(model="reference", messages=asked, tools=[WEATHER]) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.message.tool_calls[0].function.name == "get_weather"
    result = {"role": "tool", "tool_call_id": whole.message.tool_calls[0].id, "content": "rain"}
    scripted.says("Yes.<turn|>")
    answer = client.chat.completions.create(
        model="reference", messages=[*asked, whole.message, result], tools=[WEATHER]
    )
    assert answer.choices[0].message.content == "Yes."


def test_the_examples_in_the_docs(served, capsys):
    page = (ROOT / "docs" / "server.md").read_text("utf-8")
    [program] = re.findall(r"```python\n(from openai import OpenAI\n.*?)```", page, re.DOTALL)
    exec(
        program.replace("http://127.0.0.1:8642", served.url)
        .replace("e2b", "reference")
        .replace("stream=True", "stream=True, max_tokens=8"),
        {},
    )
    assert capsys.readouterr().out
    [body] = re.findall(r"curl http://127\.0\.0\.1:8642(/v1/\S+) -d '(.*)'", page)
    answer = served.ask("POST", body[0], {**json.loads(body[1]), "max_tokens": 8})
    assert answer.body["choices"][0]["message"]["content"]
