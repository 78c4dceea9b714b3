"""Pictures in the server's APIs: the forms that are read, and those that are refused."""

from __future__ import annotations

import base64
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from ondevice import Image, Model
from ondevice.media.images import Picture
from ondevice.media.prompt import MediaEncoder
from ondevice.server.bodies import MAX_REQUEST_BYTES
from ondevice.text.media_parts import MAX_BYTES
from tests.media.pictures_made import png
from tests.server.served import Answer, Served, serving

PICTURE, OTHER = png(50, 50), png(30, 90, seed=1)
DATA = base64.b64encode(PICTURE).decode()
URL = f"data:image/png;base64,{DATA}"
TEXT = {"type": "text", "text": "the fox"}
INPUT = {"type": "input_text", "text": "the fox"}
IMAGE = {"type": "image_url", "image_url": {"url": URL}}
MESSAGES, COUNT, RESPONSES = "/v1/messages", "/v1/messages/count_tokens", "/v1/responses"
CALL = {"type": "function", "id": "c1", "function": {"name": "look", "arguments": {}}}
pytestmark = pytest.mark.needs("onnxruntime")


@pytest.fixture(scope="module")
def served(chat_bundle: Path, chat_model: Model) -> Iterator[Served]:
    with serving(chat_bundle, lambda: chat_model) as server:
        yield server
        server.wait_until_idle()


def block(content: bytes = PICTURE, **source: Any) -> dict[str, Any]:
    data = base64.b64encode(content).decode()
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data, **source}}


def user(*parts: object) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def message(served: Served, *messages: object, path: str = MESSAGES) -> Answer:
    return served.post(path, messages=list(messages), max_tokens=8, temperature=0)


def said(answer: Answer) -> str:
    return "".join(block["text"] for block in answer.body["content"])


def respond(served: Served, *items: object) -> Answer:
    return served.post(RESPONSES, input=list(items), max_output_tokens=8, temperature=0)


def check(model: Model, prompt: list[dict[str, Any]], text: str, tokens: int) -> None:
    """Compare an answer's text and its number of prompt tokens with those of the prompt in Python."""
    reply = model.generate(prompt, max_new_tokens=8, temperature=0.0)
    assert (text, tokens) == (reply.text, len(model.encode(prompt)))


def test_messages(served: Served, chat_model: Model) -> None:
    answer = message(served, user(block(), TEXT, TEXT, block(OTHER)))
    assert answer.status == 200
    prompt = [user(Image(PICTURE), {"type": "text", "text": "the fox\nthe fox"}, Image(OTHER))]
    usage = answer.body["usage"]
    tokens = usage["input_tokens"] + usage["cache_read_input_tokens"]
    check(chat_model, prompt, said(answer), tokens)
    assert chat_model.generate(prompt, max_new_tokens=8, temperature=0.0).text != (
        chat_model.generate([user(TEXT)], max_new_tokens=8, temperature=0.0).text
    )


def test_counting_decodes_no_picture(served: Served, chat_model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Picture, "piece", lambda self, index: pytest.fail("decoded"))
    answer = message(served, user(block(), TEXT), path=COUNT)
    assert answer.body == {"input_tokens": len(chat_model.encode([user(Image(PICTURE), TEXT)]))}
    assert answer.body["input_tokens"] > 60


@pytest.mark.parametrize("path", [MESSAGES, COUNT, "/v1/chat/completions", RESPONSES])
def test_the_pixels_of_a_request_are_limited(served: Served, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ondevice.media.prompt.MAX_DECODED", 2 * 50 * 50)
    monkeypatch.setattr(Picture, "piece", lambda self, index: pytest.fail("decoded"))
    pictures = {
        "/v1/chat/completions": IMAGE,
        RESPONSES: {"type": "input_image", "image_url": URL},
    }
    messages = [user(*[pictures.get(path, block())] * 3)]
    names = ("input", "max_output_tokens") if path == RESPONSES else ("messages", "max_tokens")
    answer = served.post(path, **dict(zip(names, (messages, 8), strict=True)))
    assert answer.status == 400
    assert "the first 3 pictures and sounds have 7,500 pixels and samples" in answer.body["error"]["message"]


def test_pictures_are_counted_in_the_queue(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request to count them waits in the queue of those that generate, and is refused where that is full."""
    counted = MediaEncoder.counted
    waiting: list[float] = []

    def watched(*arguments: Any) -> Any:
        waiting.append(served.gauge("requests_deferred"))
        return counted(*arguments)

    monkeypatch.setattr(MediaEncoder, "counted", watched)
    assert message(served, user(block(), TEXT), path=COUNT).status == 200
    assert waiting == [1]


def test_a_picture_in_a_tool_result_begins_the_users_message(served: Served, chat_model: Model) -> None:
    use = {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "look", "input": {}}]}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [TEXT, block(), TEXT]}
    asked: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
    ]
    told = {"role": "tool", "tool_call_id": "c1", "content": "the fox\nthe fox"}
    for parts, then in (
        ([result], user(Image(PICTURE))),
        ([block(OTHER), result, TEXT], user(Image(PICTURE), Image(OTHER), TEXT)),
    ):
        answer = message(served, {"role": "user", "content": "a"}, use, user(*parts), path=COUNT)
        assert answer.body["input_tokens"] == len(chat_model.encode([*asked, told, then]))
        answer = message(served, {"role": "user", "content": "a"}, use, user(*parts))
        reply = chat_model.generate([*asked, told, then], max_new_tokens=8, temperature=0.0)
        assert said(answer) == reply.text


def test_a_picture_in_a_tool_message_begins_the_users_message(served: Served, chat_model: Model) -> None:
    """Chat completions and Ollama's API do the same."""
    begun: list[dict[str, Any]] = [{"role": "user", "content": "a"}]
    call = {**CALL, "function": {"name": "look", "arguments": "{}"}}
    asked = [*begun, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    told = {"role": "tool", "tool_call_id": "c1", "content": "the fox"}
    chat = [*begun, {"role": "assistant", "content": None, "tool_calls": [call]}, {**told, "content": [TEXT, IMAGE]}]
    result = {"role": "tool", "tool_name": "look", "content": "the fox", "images": [DATA]}
    ollama = [*begun, {"role": "assistant", "content": "", "tool_calls": [{"function": CALL["function"]}]}, result]
    for further, then in (
        ([], [user(Image(PICTURE))]),
        ([{"role": "user", "content": "b"}], [user(Image(PICTURE), {"type": "text", "text": "b"})]),
        ([{"role": "system", "content": "b"}], [user(Image(PICTURE)), {"role": "system", "content": "b"}]),
    ):
        reply = chat_model.generate([*asked, told, *then], max_new_tokens=8, temperature=0.0)
        answer = served.post("/v1/chat/completions", messages=[*chat, *further], max_tokens=8, temperature=0)
        assert answer.body["usage"]["prompt_tokens"] == reply.stats.prompt_tokens
        assert answer.body["choices"][0]["message"]["content"] == reply.text
        options = {"num_predict": 8, "temperature": 0}
        answer = served.post("/api/chat", messages=[*ollama, *further], stream=False, options=options)
        assert answer.body["prompt_eval_count"] == reply.stats.prompt_tokens
        assert answer.body["message"]["content"] == reply.text


@pytest.mark.parametrize("result", [[7, IMAGE], [{"type": "text"}, IMAGE], [{"type": "text", "text": 7}, IMAGE]])
def test_a_malformed_tool_message_with_a_picture(served: Served, result: list[Any]) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "tool", "content": result}, {"role": "user"}, {}]
    answer = served.post("/v1/chat/completions", messages=messages)
    assert (answer.status, answer.body["error"]["type"]) == (400, "invalid_request_error")
    assert "message 2 " in answer.body["error"]["message"]


def test_anthropics_client(served: Served) -> None:
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as client:
        made = client.messages.create(model="seeing", max_tokens=4, messages=[user(block(), TEXT)])  # type: ignore[list-item]
    assert made.usage.output_tokens > 0


@pytest.mark.parametrize(
    ("part", "complaint"),
    [
        ({"type": "image"}, "messages[0].content[0].source is missing"),
        ({"type": "image", "source": "x"}, "messages[0].content[0].source must be an object"),
        (block(type="url", url="https://example.com/a.png"), "source.type: no address is opened"),
        (block(type="file", file_id="f"), "source.type: no address is opened"),
        (block(type="path"), "source.type must be one of base64"),
        (block(media_type="image/tiff"), "source.media_type must be one of image/jpeg"),
        (block(data=None), "source.data is missing"),
        (block(data="!!!!"), "source.data: the request has a picture whose base64 is damaged"),
        (block(data=7), "source.data must be a string"),
        (block(PICTURE[:99]), "picture 1 is damaged"),
        ({"type": "document", "source": {}}, "content[0].type must be one of text, image, tool_result"),
    ],
)
def test_forms_of_messages_that_are_refused(served: Served, part: dict[str, Any], complaint: str) -> None:
    for path in (MESSAGES, COUNT):
        if path == COUNT and "picture 1" in complaint:
            continue  # its header is whole
        answer = message(served, user(part, TEXT), path=path)
        assert (answer.status, answer.body["type"]) == (400, "error")
        error = answer.body["error"]
        assert error["type"] == "invalid_request_error"
        assert complaint in error["message"]
        assert "\n" not in error["message"]


@pytest.mark.parametrize("role", ["system", "assistant"])
def test_only_users_send_pictures(served: Served, role: str) -> None:
    answer = message(served, user(TEXT), {"role": role, "content": [block()]}, user(TEXT))
    assert answer.status == 400
    assert "messages[1].content[0].type" in answer.body["error"]["message"]
    answer = respond(served, {"role": role, "content": [{"type": "input_image", "image_url": URL}]}, user(INPUT))
    assert (answer.status, answer.body["error"]["param"]) == (400, "input[0].content[0].type")


def test_responses(served: Served, chat_model: Model) -> None:
    pictures = [{"type": "input_image", "image_url": URL}, {"type": "input_image", "image_url": URL, "detail": "high"}]
    for part, tokens in zip(pictures, (None, 560), strict=True):
        answer = respond(served, user(part, INPUT, INPUT))
        assert answer.status == 200
        prompt = [user(Image(PICTURE, tokens), {"type": "text", "text": "the foxthe fox"})]
        [item] = answer.body["output"]
        check(chat_model, prompt, item["content"][0]["text"], answer.body["usage"]["input_tokens"])


def test_a_picture_in_a_functions_output(served: Served, chat_model: Model) -> None:
    calls = [{"type": "function_call", "call_id": name, "name": "look", "arguments": "{}"} for name in ("c1", "c2")]
    shown = [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": URL}]
    outputs = [{"type": "function_call_output", "call_id": name, "output": shown} for name in ("c1", "c2")]
    asked: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [CALL, {**CALL, "id": "c2"}]},
        {"role": "tool", "tool_call_id": "c1", "content": "a"},
        {"role": "tool", "tool_call_id": "c2", "content": "a"},
    ]
    begun = [{"role": "user", "content": "a"}, *calls, *outputs]
    twice = [Image(PICTURE), Image(PICTURE)]
    for further, then in (
        ([], [user(*twice)]),
        ([user(INPUT)], [user(*twice, TEXT)]),
        ([{"role": "system", "content": "b"}], [user(*twice), {"role": "system", "content": "b"}]),
    ):
        answer = respond(served, *begun, *further)
        assert answer.status == 200
        assert answer.body["usage"]["input_tokens"] == len(chat_model.encode([*asked, *then]))


def test_openais_client(served: Served) -> None:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        part: Any = {"type": "input_image", "image_url": URL, "detail": "auto"}
        made = client.responses.create(model="seeing", max_output_tokens=4, input=[user(part, INPUT)])  # type: ignore[list-item]
    assert made.usage is not None
    assert made.usage.input_tokens > 60


@pytest.mark.parametrize(
    ("part", "param", "complaint"),
    [
        ({}, "image_url", "is missing"),
        ({"image_url": {"url": URL}}, "image_url", "must be a string"),
        ({"image_url": "https://example.com/a.png"}, "image_url", "no address is opened"),
        ({"image_url": "file:///etc/passwd"}, "image_url", "no address is opened"),
        ({"file_id": "f"}, "file_id", "no file is stored"),
        ({"image_url": URL, "detail": "best"}, "image_url", "use one of auto, low, high, original"),
        ({"image_url": f"{URL}!"}, "image_url", "base64 is damaged"),
    ],
)
def test_forms_of_responses_that_are_refused(served: Served, part: dict[str, Any], param: str, complaint: str) -> None:
    answer = respond(served, user({"type": "input_image", **part}, INPUT))
    error = answer.body["error"]
    assert (answer.status, error["type"]) == (400, "invalid_request_error")
    assert error["param"] == f"input[0].content[0].{param}"
    assert complaint in error["message"]
    assert "\n" not in error["message"]


def test_the_largest_picture_fits_into_a_request(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    """A file of MAX_BYTES reaches the reader of pictures, which refuses this one. No content of it is logged."""
    with caplog.at_level(logging.DEBUG):
        answer = message(served, user(block(b"never a picture" * (MAX_BYTES // 15)), TEXT))
    assert answer.status == 400
    assert "picture 1 is damaged" in answer.body["error"]["message"]
    assert "bmV2ZX" not in caplog.text
    assert 4 * MAX_BYTES // 3 < MAX_REQUEST_BYTES


def test_the_server_says_what_its_model_reads(served: Served) -> None:
    assert served.get("/props").body["modalities"] == {"vision": True, "audio": True}
