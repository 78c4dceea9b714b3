"""`/v1/responses` and `/v1/responses/input_tokens`: OpenAI's Responses API without stored conversations.

A request contains all of its own conversation.

Input and tools are translated to the form of OpenAI's chat completions, which the text layer reads.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import Any, NamedTuple

from ondevice.generation import Step
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
from ondevice.server.apis.openai import CACHING, prompt_progress, round_of
from ondevice.server.delivery import FINISH_NAMES, MakeWriter, ServerSentEvent, Usage, new_id
from ondevice.server.replies import Choice, PrefillProgress, QueuePlace
from ondevice.server.requests import (
    CompletionRequest,
    FieldNames,
    RequestError,
    RequestFields,
    continue_option,
    effort_option,
    parallel_option,
    read_request,
    tool_options,
)

NAMES = FieldNames(max_tokens=("max_output_tokens",))
ECHOED = ("instructions", "max_output_tokens", "temperature", "top_p", "metadata", "tool_choice")
"""Fields of the request that the response repeats."""

MAX_METADATA, MAX_NAME, MAX_VALUE = 16, 64, 512
"""Most entries of `metadata`, and characters of their names and values, as in OpenAI's API. Responses repeat them."""

INCLUDED = {"reasoning.encrypted_content"}
"""Values of `include` that are accepted. Thoughts come as plain text, which a client can send back."""

ITEM_KINDS = ("message", "function_call", "function_call_output", "reasoning")
TOOL_KINDS = ("function", "namespace")
ROLES = ("user", "assistant", "system", "developer")

ID_PREFIXES = {"reasoning": "rs_", "text": "msg_", "call": "fc_"}
PARTS = {"reasoning": "reasoning_text", "text": "output_text"}
"""The `type` of an item's part, by the kind of block."""


def _picture(block: RequestFields) -> ContentPart:
    """The part of a block `input_image`, whose picture must be in a `data:` URI."""
    if "file_id" in block:
        raise block.unsupported("file_id", "no file is stored: send the picture as image_url, with a data: URI")
    block.required("image_url")
    return picture_part(block, "image_url", block.text("image_url"), block.text("detail"))


def _sound(block: RequestFields) -> ContentPart:
    """The part of a block `input_audio`, as in chat completions: a file in base64."""
    block.required("input_audio")
    sound = block.inner("input_audio")
    return {"type": "input_audio", "input_audio": {"data": sound.required("data"), "format": sound.text("format")}}


TEXTS = dict.fromkeys(("input_text", "output_text", "reasoning_text", "summary_text", "text"), text_part)
"""Readers of the blocks of an item, by their `type`."""
MEDIA = {**TEXTS, "input_image": _picture, "input_audio": _sound}


def read_response(fields: RequestFields) -> tuple[CompletionRequest, MakeWriter]:
    """A request to `/v1/responses`, and what makes the writer of its response."""
    stored = "this server stores no conversations: send the whole conversation as `input`"
    fields.refuse(stored, "previous_response_id", "conversation", "prompt")
    fields.refuse("a prompt that is too long is an error here", "context_management", truncation="disabled")
    fields.refuse("this API has none here: use chat completions", top_logprobs=0)
    if not set(fields.texts("include")) <= INCLUDED:
        raise fields.unsupported("include", "of what can be included, there are only thoughts, which are always there")
    fields.ignore("user", "safety_identifier", "store", "service_tier", "max_tool_calls", "client_metadata", *CACHING)
    fields.inner("stream_options").ignore("include_obfuscation")
    _check_metadata(fields)
    messages = read_input(fields)
    tools = list(_tools(fields))
    options = tool_options([tool.declaration() for tool in tools], _tool_choice(fields)) | _options(fields)
    request = read_request(fields, NAMES, [messages], {**options, **continue_option(fields, messages)})
    request = replace(request, background=fields.flag("background"))
    if request.background and fields.get("store") is False:
        raise fields.unsupported("store", "a background response is kept until it is read: leave it out")
    echoed = {name: fields.get(name) for name in ECHOED}
    echoed["parallel_tool_calls"] = request.options.get("parallel_tool_calls", True)
    echoed["background"] = request.background
    echoed["tool_choice"] = echoed["tool_choice"] or "auto"
    echoed["tools"] = [dict(tool) for tool in fields.objects("tools") if tool["type"] in TOOL_KINDS]
    make_writer = partial(
        OpenAIResponseWriter,
        echoed=echoed,
        namespaced={tool.name: tool for tool in tools if tool.namespace},
        include_progress=request.reports_prefill,
        include_rounds=fields.flag("return_rounds"),
    )
    return request, make_writer


def count_input_tokens(model: Model, fields: RequestFields) -> dict[str, Any]:
    """The number of tokens of a request's prompt. The request may have the other fields of a response's, too."""
    request, _ = read_response(fields)
    return {"object": "response.input_tokens", "input_tokens": prompt_tokens(model, request)}


def _check_metadata(fields: RequestFields) -> None:
    metadata = fields.get("metadata", {})
    if (
        not isinstance(metadata, dict)
        or len(metadata) > MAX_METADATA
        or any(len(name) > MAX_NAME for name in metadata)
        or not all(isinstance(value, str) and len(value) <= MAX_VALUE for value in metadata.values())
    ):
        wanted = f"at most {MAX_METADATA} names of {MAX_NAME} characters at most, with strings of {MAX_VALUE} at most"
        raise fields.wrong("metadata", wanted)


def read_input(fields: RequestFields) -> list[dict[str, Any]]:
    """`instructions` and `input`, as messages of a chat completion."""
    fields.required("input")
    instructions = fields.text("instructions")
    messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(fields["input"], str):
        return [*messages, {"role": "user", "content": fields["input"]}]
    for item in fields.objects("input"):
        item.ignore("id", "status", "summary", "encrypted_content", "phase")
        kind = item.choice("type", ITEM_KINDS) or "message"
        if kind == "function_call_output":
            output = content_of(read_parts(item, "output", MEDIA))
            messages.append({"role": "tool", "tool_call_id": item.required("call_id"), "content": output})
        elif kind == "message" and (role := item.choice("role", ROLES) or "user") != "assistant":
            parts = read_parts(item, "content", MEDIA if role == "user" else TEXTS)
            messages.append({"role": role, "content": content_of(parts)})
        else:
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": [], "reasoning_content": [], "tool_calls": []})
            _add_to_assistant(messages[-1], item, kind)
    return after_results([_assistant(message) if message["role"] == "assistant" else message for message in messages])


def _add_to_assistant(turn: dict[str, Any], item: RequestFields, kind: str) -> None:
    """Add an item to an assistant's turn: consecutive thoughts, calls and texts are one."""
    if kind == "function_call":
        name = _full_name(item, item.text("namespace") or "")
        function = {"name": name, "arguments": item.text("arguments") or ""}
        turn["tool_calls"].append({"id": item.required("call_id"), "type": "function", "function": function})
    else:
        name = "reasoning_content" if kind == "reasoning" else "content"
        turn[name] += (part["text"] for part in read_parts(item, "content", TEXTS))


def _assistant(turn: dict[str, Any]) -> dict[str, Any]:
    """The message of a turn."""
    thoughts, calls = "".join(turn["reasoning_content"]), turn["tool_calls"]
    message = {"role": "assistant", "content": "".join(turn["content"]) or (None if calls else "")}
    return message | ({"reasoning_content": thoughts} if thoughts else {}) | ({"tool_calls": calls} if calls else {})


def _options(fields: RequestFields) -> GenerationKeywords:
    """Thinking, parallel calls and response format."""
    reasoning, text = fields.inner("reasoning"), fields.inner("text")
    reasoning.ignore("summary", "generate_summary", "context")  # the template drops thoughts of earlier turns
    text.refuse("the model has no such switch: ask for it in `instructions`", verbosity="medium")
    options = effort_option(reasoning, "effort") | parallel_option(fields)
    text_format = dict(text.inner("format"))
    if text_format.get("type") == "json_schema":
        options["response_format"] = {"type": text_format.pop("type"), "json_schema": text_format}
    elif text_format:
        options["response_format"] = text_format
    return options


class DeclaredFunction(NamedTuple):
    """A function, which the client runs.

    fields : its declaration, which has one level less than that of a chat completion
    namespace : that it is declared in; empty for none
    """

    fields: RequestFields
    namespace: str

    @property
    def name(self) -> str:
        """The function's name for the model."""
        return _full_name(self.fields, self.namespace)

    def declaration(self) -> dict[str, Any]:
        """The declaration for the model."""
        function = {name: value for name, value in self.fields.items() if name != "type"}
        return {"type": "function", "function": function | {"name": self.name}}


def _full_name(fields: RequestFields, namespace: str) -> str:
    """The name of a function, or of the one that is called, for the model, which knows no namespaces."""
    fields.required("name")
    name = fields.text("name") or ""
    return f"{namespace}__{name}" if namespace else name


def _tools(fields: RequestFields, namespace: str = "") -> Iterator[DeclaredFunction]:
    """The functions among the tools, also those of namespaces. Tools of other kinds are left out, as in llama.cpp."""
    for tool in fields.objects("tools"):
        tool.required("type")
        kind = tool.text("type")
        if kind == "function":
            yield DeclaredFunction(tool, namespace)
        elif kind == "namespace" and not namespace:
            tool.required("name")
            tool.ignore("description")
            yield from _tools(tool, tool.text("name") or "")
        else:
            tool.ignore(*tool)


def _tool_choice(fields: RequestFields) -> Any:
    """`tool_choice` in the form of chat completions."""
    choice = fields.get("tool_choice")
    if isinstance(choice, dict) and "name" in choice:
        return {"type": choice.get("type"), "function": {"name": choice["name"]}}
    return choice


class OpenAIResponseWriter(BlockWriter):
    """A `response`, or the events that build it item by item. Every block of the reply is an item."""

    def __init__(
        self,
        model: Model,
        name: str,
        choices: Sequence[Choice],
        *,
        echoed: dict[str, Any],
        namespaced: Mapping[str, DeclaredFunction],
        include_progress: bool = False,
        include_rounds: bool = False,
    ) -> None:
        """
        Args:
            model, name, choices: see `ResponseWriter`; exactly one choice.
            echoed: fields of the request that the response repeats.
            namespaced: the functions that are declared in namespaces, by their names for the model.
            include_progress: whether a stream has events of the queue and of the prompt.
            include_rounds: whether it has events of rounds.
        """
        super().__init__(model, name, choices)
        self._namespaced = namespaced
        self._include_progress = include_progress
        self._include_rounds = include_rounds
        head = {"id": new_id("resp_"), "object": "response", "created_at": int(time.time())}
        self._head = {**head, "model": name, **echoed}
        self._last_status = "completed"
        """`status` of the last item once it has ended, because another one follows or because the reply ends."""
        self._events_sent = 0
        self.final: dict[str, Any] = {}
        """The response, after `failure` or `cancelled`."""

    @property
    def id(self) -> str:
        """Id of the response."""
        return str(self._head["id"])

    def current(self) -> dict[str, Any]:
        """The response as far as it is written, before `closing`."""
        return self._response("in_progress" if self.choice.started_s else "queued")

    def opening(self) -> Iterator[ServerSentEvent]:
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._response("in_progress"))

    def queued(self, queue: QueuePlace) -> Iterator[ServerSentEvent]:
        if self._include_progress:
            yield self._event("response.queued", response=self.current(), queue_place=queue.place)

    def prefill(self, progress: PrefillProgress) -> Iterator[ServerSentEvent]:
        if self._include_progress:
            yield self._event("response.prompt_progress", prompt_progress=prompt_progress(progress))

    def step(self, choice: Choice, step: Step) -> Iterator[ServerSentEvent]:
        yield from super().step(choice, step)
        if self._include_rounds:
            yield self._event("response.round", round=round_of(step))

    def begun(self, block: ReplyBlock) -> Iterator[ServerSentEvent]:
        yield self._item_event("output_item.added", item=self._item(block))
        if block.call is None:
            yield self._part_event(block, "content_part.added", part=_part(block))

    def grown(self, block: ReplyBlock, text: str) -> Iterator[ServerSentEvent]:
        if block.call is None:
            yield self._part_event(block, f"{PARTS[block.kind]}.delta", delta=text, logprobs=[])
        else:
            yield self._item_event("function_call_arguments.delta", item_id=_id(block), delta=text)

    def ended(self, block: ReplyBlock) -> Iterator[ServerSentEvent]:
        if block.call is None:
            yield self._part_event(block, f"{PARTS[block.kind]}.done", text=block.text, logprobs=[])
            yield self._part_event(block, "content_part.done", part=_part(block))
        else:
            yield self._item_event("function_call_arguments.done", item_id=_id(block), arguments=block.text)
        yield self._item_event("output_item.done", item=self._item(block))

    def closing(self) -> Iterator[ServerSentEvent]:
        status = self._last_status = self._final_status()
        yield from self.end_block()
        yield self._event(f"response.{status}", response=self._response(status))

    def failure(self, error: RequestError) -> Iterator[ServerSentEvent]:
        code = "server_error" if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_prompt"
        self.final = self._response("failed") | {"error": {"code": code, "message": error.message}}
        yield self._event("response.failed", response=self.final)

    def cancelled(self) -> Iterator[ServerSentEvent]:
        """The reply was cancelled, which is not an error of this API."""
        self._last_status = "incomplete"
        yield from self.end_block()
        self.final = self._response("cancelled")
        yield self._event("response.incomplete", response=self.final)

    def whole(self) -> dict[str, Any]:
        return self._response(self._final_status())

    def _part_event(self, block: ReplyBlock, kind: str, **data: Any) -> ServerSentEvent:
        return self._item_event(kind, item_id=_id(block), content_index=0, **data)

    def _item_event(self, kind: str, **data: Any) -> ServerSentEvent:
        return self._event(f"response.{kind}", output_index=len(self.blocks) - 1, **data)

    def _event(self, kind: str, **data: Any) -> ServerSentEvent:
        self._events_sent += 1
        number = self._events_sent - 1
        return ServerSentEvent({"type": kind, "sequence_number": number, **data}, kind, number)

    def _final_status(self) -> str:
        return FINISH_NAMES[self.choice.finish_reason].responses

    def _response(self, status: str) -> dict[str, Any]:
        return {
            **self._head,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": [self._item(block) for block in self.blocks],
            "store": self._head["background"],
            "usage": self._usage() if status in ("completed", "incomplete") else None,
        }

    def _item(self, block: ReplyBlock) -> dict[str, Any]:
        """A block's item, as far as it is written. It begins without parts. The last one of a reply that was cut is
        incomplete; calls are complete.
        """
        is_cut = block is self.blocks[-1] and block.call is None and self._last_status == "incomplete"
        status = "in_progress" if block.is_open else "incomplete" if is_cut else "completed"
        head = {"id": _id(block), "status": status}
        if block.call is not None:
            call = {"call_id": block.call.id, "name": block.call.name, "arguments": block.text}
            if (tool := self._namespaced.get(block.call.name)) is not None:
                call |= {"namespace": tool.namespace, "name": tool.fields["name"]}
            return {"type": "function_call", **head, **call}
        content = [_part(block)] if block.text else []
        if block.kind == "reasoning":
            return {"type": "reasoning", **head, "summary": [], "content": content}
        return {"type": "message", **head, "role": "assistant", "content": content}

    def _usage(self) -> dict[str, Any]:
        usage, tokenizer, thoughts = Usage.of(self.choices), self.model.tokenizer, self.choice.reply.reasoning
        thinking = len(tokenizer.encode(thoughts, add_special_tokens=False)) if tokenizer and thoughts else 0
        return {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
            "output_tokens": usage.new,
            "output_tokens_details": {"reasoning_tokens": thinking},
            "total_tokens": usage.prompt + usage.new,
            "speculative_decoding": usage.drafts,
        }


def _id(block: ReplyBlock) -> str:
    """The id of a block's item."""
    return f"{ID_PREFIXES[block.kind]}{block.id}"


def _part(block: ReplyBlock) -> dict[str, Any]:
    """The one part of an item with a text."""
    more: dict[str, Any] = {"annotations": [], "logprobs": []} if block.kind == "text" else {}
    return {"type": PARTS[block.kind], "text": block.text, **more}
