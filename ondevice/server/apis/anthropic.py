"""`/v1/messages` and `/v1/messages/count_tokens`: Anthropic's API.

Messages and tools are translated to the form of OpenAI's chat completions, which the text layer reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ondevice.model import Model
from ondevice.options import GenerationKeywords
from ondevice.server.apis.blocks import (
    BlockWriter,
    ContentPart,
    ReplyBlock,
    after_results,
    content_of,
    picture_part,
    prompt_tokens,
    read_parts,
    text_part,
)
from ondevice.server.delivery import FINISH_NAMES, MakeWriter, ServerSentEvent, Usage, new_id
from ondevice.server.replies import Choice, PrefillProgress
from ondevice.server.requests import (
    CompletionRequest,
    FieldNames,
    RequestError,
    RequestFields,
    continue_option,
    read_request,
    schema_format,
    tool_options,
)
from ondevice.text.messages import LEVELS

NAMES = FieldNames(max_tokens=("max_tokens",), stop="stop_sequences")

DELTAS = {
    "reasoning": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}
"""The `type` of a delta, and its field with the text, by the kind of block."""

MEDIA_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")
"""Names of pictures' formats. A picture is read as what its bytes are."""

ERROR = {"type": "text", "text": "Error:"}
"""Begins the result of a tool that failed: templates have no flag for it."""

WITHOUT_THINKING = ("disabled", "between_tools")
"""Kinds of `thinking` in which the model does not think. In the second, a remark before a call would be a thought."""

UNTHREADED = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
"""The details of an error by which Anthropic's client knows that a server stores no conversations."""


def read_message(fields: RequestFields) -> tuple[CompletionRequest, MakeWriter]:
    """A request to `/v1/messages`, and what makes the writer of its response."""
    fields.required("max_tokens")
    fields.whole("max_tokens", 1)  # in the other APIs -1 means no limit
    return _read(fields), MessageWriter


def count_tokens(model: Model, fields: RequestFields) -> dict[str, Any]:
    """The number of tokens of a request's prompt. The request may have the other fields of a message's, too."""
    return {"input_tokens": prompt_tokens(model, _read(fields))}


def _read(fields: RequestFields) -> CompletionRequest:
    messages = read_messages(fields)
    try:
        fields.refuse("no conversation is stored: send all of it as `messages`", "thread")
    except RequestError as error:
        error.facts["details"] = UNTHREADED
        raise
    fields.refuse("declare functions in `tools`, which the client runs", "mcp_servers", "container")
    fields.ignore("metadata", "service_tier", "context_management")
    options: GenerationKeywords = {**_options(fields), **continue_option(fields, messages)}
    return read_request(fields, NAMES, [messages], options)


def read_messages(fields: RequestFields) -> list[dict[str, Any]]:
    """`system` and `messages`, as messages of a chat completion."""
    fields.required("messages")
    system = content_of(read_parts(fields, "system", {"text": text_part}), "\n")
    messages = [{"role": "system", "content": system}] if system else []
    for message in fields.objects("messages"):
        message.required("content")
        role = message.choice("role", ("user", "assistant", "system")) or "user"
        blocks = [RequestFields({"type": "text", "text": message["content"]})]
        if not isinstance(message["content"], str):
            blocks = message.objects("content")
        messages += [_assistant_message(blocks)] if role == "assistant" else _user_messages(blocks, role)
    return after_results(messages)


def _picture(block: RequestFields) -> ContentPart:
    """The part of a block `image`, whose picture must be in base64."""
    block.required("source")
    block.ignore("cache_control")
    source = block.inner("source")
    if source.kind(("base64", "url", "file")) != "base64":
        raise source.unsupported("type", "no address is opened, and no file is stored: send the picture as base64")
    media_type = source.choice("media_type", MEDIA_TYPES) or MEDIA_TYPES[0]
    source.required("data")
    return picture_part(source, "data", f"data:{media_type};base64,{source.text('data')}")


PARTS = {"text": text_part, "image": _picture}
"""Readers of the blocks of messages and tool results, by their `type`."""


def _user_messages(blocks: Sequence[RequestFields], role: str) -> list[dict[str, Any]]:
    """Tool results become messages of their own, before the text and pictures."""
    kinds = (*PARTS, "tool_result") if role == "user" else ("text", "tool_result")
    results: list[dict[str, Any]] = []
    parts: list[ContentPart] = []
    for block in blocks:
        kind = block.kind(kinds)
        if kind == "tool_result":
            block.ignore("cache_control")
            said = [ERROR] if block.flag("is_error") else []
            content = content_of([*said, *read_parts(block, "content", PARTS)], "\n")
            results.append({"role": "tool", "tool_call_id": block.required("tool_use_id"), "content": content})
        else:
            parts.append(PARTS[kind](block))
    return [*results, *([{"role": role, "content": content_of(parts, "\n")}] if parts or not results else [])]


def _assistant_message(blocks: Sequence[RequestFields]) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for block in blocks:
        kind = block.kind(("text", "thinking", "redacted_thinking", "tool_use"))
        block.ignore("cache_control", "citations", "signature", "data", "caller")
        if kind == "text":
            texts.append(block.text("text") or "")
        elif kind == "thinking":
            thoughts.append(block.text("thinking") or "")
        elif kind == "tool_use":
            function = {"name": block.required("name"), "arguments": dict(block.inner("input"))}
            calls.append({"id": block.required("id"), "type": "function", "function": function})
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts) or (None if calls else "")}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _options(fields: RequestFields) -> GenerationKeywords:
    """Tools, thinking and response format."""
    fields.ignore("cache_control")
    options = tool_options(_tools(fields), _tool_choice(fields.inner("tool_choice")))
    if fields.inner("tool_choice").flag("disable_parallel_tool_use"):
        options["parallel_tool_calls"] = False
    thinking = fields.inner("thinking").choice("type", ("enabled", "adaptive", *WITHOUT_THINKING))
    fields.inner("thinking").ignore("budget_tokens", "display")
    effort = fields.inner("output_config").get("effort")
    if thinking in WITHOUT_THINKING:
        options["thinking"] = False
    elif thinking is not None:
        options["thinking"] = effort if isinstance(effort, str) and effort in LEVELS else True
    output_format = fields.inner("output_config").inner("format")
    if output_format.choice("type", ("json_schema",)) is not None:
        output_format.required("schema")
        options["response_format"] = schema_format(output_format.inner("schema"), strict=True)
    return options


def _tools(fields: RequestFields) -> list[dict[str, Any]]:
    """Functions, which the client runs. Anthropic's own tools are left out, as those of OpenAI in responses.py."""
    tools = []
    for tool in fields.objects("tools"):
        if (tool.text("type") or "custom") != "custom":
            tool.ignore(*tool)
            continue
        tool.ignore("cache_control", "input_examples", "eager_input_streaming", "defer_loading", "allowed_callers")
        function = {
            "name": tool.required("name"),
            "description": tool.text("description") or "",
            "parameters": dict(tool.inner("input_schema")),
            **({"strict": True} if tool.flag("strict") else {}),
        }
        tools.append({"type": "function", "function": function})
    return tools


def _tool_choice(choice: RequestFields) -> Any:
    """OpenAI's `tool_choice`."""
    kind = choice.choice("type", ("auto", "any", "tool", "none"))
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.required("name")}}
    return "required" if kind == "any" else kind


class MessageWriter(BlockWriter):
    """A `message`, or the events that build it block by block."""

    def __init__(self, model: Model, name: str, choices: Sequence[Choice]) -> None:
        super().__init__(model, name, choices)
        self._head = {"id": new_id("msg_"), "type": "message", "role": "assistant", "model": name}

    def opening(self) -> Iterator[ServerSentEvent]:
        end = {"stop_reason": None, "stop_sequence": None}
        yield _event("message_start", message={**self._head, "content": [], **end, "usage": self._usage()})

    def prefill(self, progress: PrefillProgress) -> Iterator[ServerSentEvent]:
        yield self.keep_alive()

    def begun(self, block: ReplyBlock) -> Iterator[ServerSentEvent]:
        yield _event("content_block_start", index=len(self.blocks) - 1, content_block=_content(block))

    def grown(self, block: ReplyBlock, text: str) -> Iterator[ServerSentEvent]:
        kind, name = DELTAS[block.kind]
        yield _event("content_block_delta", index=len(self.blocks) - 1, delta={"type": kind, name: text})

    def ended(self, block: ReplyBlock) -> Iterator[ServerSentEvent]:
        yield _event("content_block_stop", index=len(self.blocks) - 1)

    def closing(self) -> Iterator[ServerSentEvent]:
        yield from self.end_block()
        yield _event("message_delta", delta=self._end(), usage=self._usage())
        yield _event("message_stop")

    def failure(self, error: RequestError) -> Iterator[ServerSentEvent]:
        yield ServerSentEvent(error.anthropic(), "error")

    def keep_alive(self) -> ServerSentEvent:
        return _event("ping")

    def whole(self) -> dict[str, Any]:
        content = [_content(block) for block in self.blocks]
        return {**self._head, "content": content, **self._end(), "usage": self._usage()}

    def _end(self) -> dict[str, Any]:
        """`stop_reason` and `stop_sequence`."""
        found = self.choice.reply.stop_string
        reason = FINISH_NAMES[self.choice.finish_reason].anthropic if found is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": found}

    def _usage(self) -> dict[str, Any]:
        usage = Usage.of(self.choices)
        return {
            "input_tokens": usage.prompt - usage.cached,
            "cache_read_input_tokens": usage.cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": usage.new,
            "speculative_decoding": usage.drafts,
        }


def _content(block: ReplyBlock) -> dict[str, Any]:
    """A block as far as it is written. A call begins without arguments."""
    if block.call is not None:
        arguments = block.call.arguments if block.text else {}
        return {"type": "tool_use", "id": block.call.id, "name": block.call.name, "input": arguments}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    return {"type": "text", "text": block.text}


def _event(kind: str, **data: Any) -> ServerSentEvent:
    return ServerSentEvent({"type": kind, **data}, kind)
