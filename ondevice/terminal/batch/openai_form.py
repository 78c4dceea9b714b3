"""Lines as OpenAI's batch files and vLLM's `run-batch` have them: `{"custom_id", "method", "url", "body"}`.

https://platform.openai.com/docs/guides/batch
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ondevice.errors import PromptError, UsageError
from ondevice.reply import Reply

if TYPE_CHECKING:
    from ondevice.terminal.batch.request import Request

URLS = {"/v1/chat/completions": "messages", "/v1/completions": "prompt"}
"""Where a request would be sent, and the field that its prompt is in."""

SAME = ("temperature", "top_p", "seed", "stop", "presence_penalty", "frequency_penalty", "tools", "response_format")
"""Fields of a body that are options of the same name."""

LENGTHS = ("max_completion_tokens", "max_tokens")
"""The first that is there counts."""

WITHOUT_EFFECT: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "stream": (False,),
    "tool_choice": ("auto",),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False,),
}
"""Fields that say what is so anyway, with the values for which it is."""

IGNORED = ("model", "user", "metadata", "store", "service_tier", "safety_identifier", "parallel_tool_calls")


def fits(fields: Mapping[str, Any]) -> bool:
    return "body" in fields and "prompt" not in fields


def read(fields: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Prompt and options of a line.

    Raises:
        PromptError: it is for another endpoint, or has no prompt.
        UsageError: it asks for what there is not.
    """
    body = fields["body"]
    if not isinstance(body, Mapping):
        raise PromptError("body must be a JSON object")
    url = fields.get("url", "/v1/chat/completions" if "messages" in body else "/v1/completions")
    if not isinstance(url, str) or url not in URLS:
        raise PromptError(f"url must be one of {', '.join(URLS)}, not {url!r:.99}")
    if body.get(URLS[url]) is None:
        raise PromptError(f"body needs {URLS[url]}")
    options: dict[str, Any] = {}
    for name, value in body.items():
        if value is None or name in (*IGNORED, *LENGTHS, URLS[url]):
            continue
        if name in SAME:
            options[name] = value
        elif name == "logit_bias":
            options[name] = token_biases(value)
        elif value not in WITHOUT_EFFECT.get(name, ()):
            raise UsageError(f"body.{name} cannot be {value!r:.99} here")
    lengths = [body[name] for name in LENGTHS if body.get(name) is not None]
    if lengths:
        options["max_new_tokens"] = lengths[0]
    return body[URLS[url]], options


def token_biases(value: object) -> dict[int, Any]:
    """JSON has strings for keys, and token ids are numbers."""
    try:
        return {int(token): bias for token, bias in dict(value).items()}  # type: ignore[call-overload]
    except (TypeError, ValueError) as error:
        raise UsageError(f"logit_bias must map token ids to numbers, not {value!r:.99}") from error


def response(request: Request, reply: Reply) -> dict[str, Any]:
    """An answer. No time is told: two runs of a file write the same."""
    is_chat = isinstance(request.prompt, list) and isinstance(request.prompt[0], dict)
    told: dict[str, Any] = {"message": reply.message} if is_chat else {"text": reply.text}
    finish = "length" if reply.finish_reason == "context" else reply.finish_reason
    body = {
        "id": f"batch-{request.line}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": 0,
        "choices": [{"index": 0, **told, "logprobs": None, "finish_reason": finish}],
        "usage": usage(reply),
    }
    return {"custom_id": request.id, "response": {"status_code": 200, "body": body}, "error": None}


def refusal(request: Request, message: str) -> dict[str, Any]:
    """The answer to a line that has none."""
    return {"custom_id": request.id, "response": None, "error": {"code": "invalid_request", "message": message}}


def usage(reply: Reply) -> dict[str, int]:
    """Tokens read and written. Those that were known before are not told apart: that depends on what ran earlier."""
    read, new = reply.stats.prompt_tokens, reply.stats.new_tokens
    return {"prompt_tokens": read, "completion_tokens": new, "total_tokens": read + new}
