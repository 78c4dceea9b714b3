"""Requests and errors that agents and benchmarks know from other servers."""

import re

import pytest

from tests.text.conversations import WEATHER

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "What is a stack?"}]


def test_top_p_0_is_greedy(served):
    options = {"messages": MESSAGES, "max_tokens": 8}
    greedy = served.post(CHAT, **options, temperature=0).body["choices"][0]["message"]
    assert served.post(CHAT, **options, temperature=1, top_p=0, seed=3).body["choices"][0]["message"] == greedy


@pytest.mark.parametrize(("path", "prompt"), [(CHAT, {"messages": MESSAGES}), (TEXT, {"prompt": "x"})])
def test_usage_in_all_chunks_of_a_stream(served, path, prompt):
    """vLLM's field, which guidellm sends."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = served.messages(path, **prompt, max_tokens=6, ignore_eos=True, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 6
    alone = {"continuous_usage_stats": True}
    assert all("usage" not in each for each in served.messages(path, **prompt, max_tokens=2, stream_options=alone))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"])
def test_agents_find_out_by_how_much_a_prompt_is_too_long(served, served_model, path):
    said = [{"role": "user", "content": "a b " * served_model.context_length}]
    fields = {"input": said} if path == "/v1/responses" else {"messages": said, "max_tokens": 1}
    if path == "/api/chat":
        del fields["max_tokens"]
    error = served.post(path, **fields).body["error"]
    message = error if isinstance(error, str) else error["message"]
    found = re.search(r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)", message)  # Claude Code's
    assert found is not None
    assert int(found[1]) > int(found[2]) == served_model.context_length - 1


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"tools": [WEATHER]}),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}),
        (CHAT, {"tools": [WEATHER], "stream": True}),
        ("/v1/responses", {"tools": [{"type": "function", "name": "f"}]}),
        ("/v1/messages", {"tools": [{"name": "f", "input_schema": {}}], "max_tokens": 5}),
        ("/api/chat", {"tools": [WEATHER]}),
        ("/api/chat", {"think": True}),
        ("/api/generate", {"think": "low"}),
    ],
)
def test_a_model_without_tools_or_thinking_says_so(serve_toy, path, fields):
    """In Ollama's words: agents then ask without them."""
    prompt = {"/v1/responses": {"input": "x"}, "/api/generate": {"prompt": "x"}}.get(path, {"messages": MESSAGES})
    with serve_toy() as served:
        answer = served.post(path, **prompt, **fields)
        error = answer.body["error"]
        message = error if isinstance(error, str) else error["message"]
        wanted = "tools" if "tools" in fields else "thinking"
        assert answer.status == 400
        assert message == f"toy-model does not support {wanted}: its chat template has no {wanted}"
        if path == CHAT:
            assert error["param"] == "tools"


def test_a_model_without_tools_answers_requests_that_use_none(serve_toy):
    with serve_toy() as served:
        unused = {"tools": [WEATHER], "tool_choice": "none"}
        assert served.post(CHAT, messages=MESSAGES, max_tokens=2, **unused).status == 200
        assert served.post(CHAT, messages=MESSAGES, max_tokens=2, reasoning_effort="low").status == 200
        quiet = {"think": False, "stream": False, "options": {"num_predict": 2}}
        assert served.post("/api/chat", messages=MESSAGES, **quiet).status == 200


def test_a_prompt_of_too_many_characters(served):
    error = served.post(CHAT, messages=[{"role": "user", "content": "a" * 10**6}]).body["error"]
    assert (error["type"], error["n_prompt_tokens"]) == ("exceed_context_size_error", None)
    assert error["message"].startswith("prompt is too long: 1000")
