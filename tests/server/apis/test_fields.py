"""Fields of requests: read, accepted without effect, or refused by name. The tables of docs/server.md are made here:
`python -m tests.server.apis.test_fields` writes them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ondevice.server.apis import anthropic, ollama, openai, responses
from ondevice.server.requests import RequestError, RequestFields
from tests.conftest import ROOT

PAGE = ROOT / "docs" / "server.md"
BEGIN, END = "<!-- fields: made by tests/server/apis/test_fields.py -->\n", "<!-- end of fields -->\n"
MESSAGES = [{"role": "user", "content": "x"}]

READERS: dict[str, tuple[Callable[[RequestFields], Any], dict[str, Any]]] = {
    "/v1/chat/completions": (openai.read_chat_completion, {"messages": MESSAGES}),
    "/v1/completions": (openai.read_completion, {"prompt": "x"}),
    "/v1/responses": (responses.read_response, {"input": "x"}),
    "/v1/messages": (anthropic.read_message, {"messages": MESSAGES, "max_tokens": 1}),
    "/api/chat": (ollama.read_chat, {"messages": MESSAGES}),
    "/api/generate": (ollama.read_generate, {"prompt": "x"}),
}
"""The function that reads a request of each path, and the least of its fields."""

ANYWHERE = ("model", "stream")
"""Fields that the server reads itself."""


def read(path: str, **more: Any) -> RequestFields:
    """The fields of a request after they were read."""
    reader, least = READERS[path]
    fields = RequestFields({**least, **more})
    for name in ANYWHERE:
        fields.get(name)
    reader(fields)
    fields.refuse_rest()
    return fields


def table() -> str:
    """The tables of the page."""
    made = ["| path | fields | accepted without effect |", "|---|---|---|"]
    refused: dict[str, set[str]] = {}
    for path in READERS:
        fields = read(path)
        parts = [("", fields)]
        if "options" in fields.read:
            parts.append((" in `options`", fields.inner("options")))
        for place, part in parts:
            made.append(f"| `{path}`{place} | {_listed(part.read)} | {_listed(part.ignored)} |")
            for name, message in part.refused.items():
                accepted = f" (`{json.dumps(part.neutral[name])}` is accepted)" if name in part.neutral else ""
                refused.setdefault(message, set()).add(f"`{name}`{accepted}")
    made += ["", "| refused | because |", "|---|---|"]
    made += [f"| {', '.join(sorted(names))} | {message} |" for message, names in refused.items()]
    return "\n".join([*made, ""])


def _listed(names: Any) -> str:
    return ", ".join(f"`{name}`" for name in sorted(set(names)))


def test_the_page_lists_them() -> None:
    _, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    assert rest.partition(END)[0] == table(), "python -m tests.server.apis.test_fields"


def parameters() -> Iterator[tuple[str, str]]:
    """Paths, and the names of fields that their clients know."""
    from anthropic.types.message_create_params import MessageCreateParamsBase
    from ollama._types import ChatRequest, GenerateRequest
    from openai.types.chat.completion_create_params import CompletionCreateParamsBase as Chat
    from openai.types.completion_create_params import CompletionCreateParamsBase as Text
    from openai.types.responses.response_create_params import ResponseCreateParamsBase

    clients = (Chat, Text, ResponseCreateParamsBase, MessageCreateParamsBase, ChatRequest, GenerateRequest)
    for path, client in zip(READERS, clients, strict=True):
        names = getattr(client, "model_fields", client.__annotations__)
        yield from ((path, name) for name in names)


@pytest.mark.needs("clients")
def test_every_field_of_the_clients_is_read_or_refused_by_name() -> None:
    refused = set()
    for path, name in parameters():
        known = read(path)
        if name in known.read or name in known.ignored:
            continue
        with pytest.raises(RequestError) as raised:
            read(path, **{name: ["other"]})
        assert raised.value.param == name
        refused.add(name)
    assert {"web_search_options", "functions", "modalities", "top_logprobs", "container"} <= refused


@pytest.mark.parametrize(
    ("path", "fields", "param", "complaint"),
    [
        ("/v1/chat/completions", {"max_token": 5}, "max_token", "unknown field: did you mean max_tokens?"),
        ("/v1/chat/completions", {"stream_options": {"usage": True}}, "stream_options.usage", "unknown"),
        ("/v1/chat/completions", {"functions": [{"name": "f"}]}, "functions", "declared in `tools`"),
        ("/v1/chat/completions", {"mirostat": 2}, "mirostat", "this sampler is not here"),
        ("/v1/chat/completions", {"\x1b[2J": 1}, r"\x1b[2J", "unknown"),
        ("/v1/completions", {"suffix": "x"}, "suffix", "only continues a prompt"),
        ("/v1/responses", {"include": ["file_search_call.results"]}, "include", "only thoughts"),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_text", "txt": "x"}]}]},
         "input[0].content[0].txt", "did you mean text?"),
        ("/api/chat", {"options": {"temprature": 1}}, "options.temprature", "did you mean temperature?"),
        ("/api/generate", {"template": "x"}, "template", "send a `raw` prompt"),
        ("/v1/messages", {"mcp_servers": [{}]}, "mcp_servers", "declare functions"),
        ("/v1/messages", {"thinking": {"type": "enabled", "budget": 5}}, "thinking.budget", "budget_tokens?"),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x", "nam": "y"}]}, "messages[0].nam", "unknown"),
    ],
)  # fmt: skip
def test_a_field_that_is_not_known_is_refused(served, path, fields, param, complaint) -> None:
    answer = served.post(path, **{**READERS[path][1], **fields})
    assert answer.status == 400
    error = answer.body["error"]
    message = error if isinstance(error, str) else error["message"]
    assert complaint in message
    assert message.startswith(param)
    assert "param" not in error or error["param"] == param


@pytest.mark.parametrize(("path", "least"), [("/tokenize", {"content": "x"}), ("/detokenize", {"tokens": [5]})])
def test_queries_refuse_unknown_fields_too(served, path, least) -> None:
    assert served.post(path, **least).status == 200
    assert served.post(path, **least, other=1).body["error"]["param"] == "other"


def test_values_that_ask_for_nothing_are_accepted(served) -> None:
    neutral = {"modalities": ["text"], "mirostat": 0, "typical_p": 1, "user": "me", "logit_bias": None, "store": True}
    assert served.post("/v1/chat/completions", messages=MESSAGES, max_tokens=1, **neutral).status == 200
    more = {"truncation": "disabled", "include": ["reasoning.encrypted_content"], "top_logprobs": 0}
    assert served.post("/v1/responses", input="x", max_output_tokens=1, **more).status == 200


if __name__ == "__main__":
    text = PAGE.read_text("utf-8")
    PAGE.write_text(re.sub(f"{BEGIN}.*{END}", f"{BEGIN}{table()}{END}", text, flags=re.DOTALL), "utf-8")
