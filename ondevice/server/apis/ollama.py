"""`/api/chat` and `/api/generate`: Ollama's API, and its descriptions of models.

Messages and tools are translated to the form of OpenAI's chat completions, which the text layer reads. A stream is a
JSON object per line, and the default. Options of sampling are in an object `options`; those of a model's start in it
are ignored, since a model was started with its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from math import inf
from typing import Any

from ondevice import __version__
from ondevice.bundle import CHAT_TEMPLATE, MANIFEST
from ondevice.generate.sampling.sampler import MAX_TOP_LOGPROBS
from ondevice.generation import Step
from ondevice.model import Model
from ondevice.options import GenerationKeywords
from ondevice.server.apis.blocks import ContentPart, after_results, content_of, picture_part
from ondevice.server.apis.openai import chat_logprobs
from ondevice.server.delivery import FINISH_NAMES, JsonLine, MakeWriter, ResponseWriter, Usage
from ondevice.server.model_manager import ModelManager
from ondevice.server.replies import Choice
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
from ondevice.text.codec import Prompt

NAMES = FieldNames(max_tokens=("num_predict",))
STAYING = timedelta(days=106_751)
"""Time until a model that stays in memory is unloaded, as Ollama gives it: 292 years, the longest duration of Go. Its
command shows `Forever`, and `Stopping...` without a time."""
ROLES = ("system", "user", "assistant", "tool")

PENALTIES = {"repeat_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
"""Options that `repeat_last_n` is about, and the values that switch them off."""
STARTED = (
    *("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep", "low_vram", "f16_kv", "logits_all"),
    *("vocab_only", "use_mmap", "use_mlock", "embedding_only", "numa", "mirostat_tau", "mirostat_eta"),
)
"""Options of a model's start, and those of samplers that are switched off."""

BESIDE_OPTIONS = ("temperature", "top_p", "max_output_tokens", "tool_choice")
"""Fields that Ollama ignores outside of `options`, where clients, as that of Vercel's AI SDK, send them once more."""

EFFORTS = ("low", "medium", "high", "max")
"""Values of `think` besides true and false. All of them switch thinking on."""

UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)(ms|s|m|h)")
"""A part of a duration as Go writes it, such as `1h30m`."""

MAX_KEEP_S = 1e9
"""Longer times are for ever: the event loop's clock could not count them."""

VERSION = "0.30.0"
"""The version of Ollama whose API this is. Clients compare it with the one that they need."""

NOT_HERE = {
    **dict.fromkeys(("/api/pull", "/api/push"), "no models are downloaded by requests: run `ondevice pull` here"),
    **dict.fromkeys(
        ("/api/create", "/api/copy", "/api/delete"),
        "models are not changed by requests: use `ondevice export` and `ondevice remove` here",
    ),
    **dict.fromkeys(
        ("/api/embed", "/api/embeddings"),
        "these models make texts, not embeddings: use one that was trained for them",
    ),
}
"""Paths of Ollama's that are not served, and why."""


def read_chat(fields: RequestFields) -> tuple[CompletionRequest, MakeWriter]:
    """A request to `/api/chat`, and what makes the writer of its response. Without messages it loads the model."""
    messages = read_messages(fields)
    tools = [dict(tool) for tool in fields.objects("tools")]
    options: GenerationKeywords = {**_options(fields), **tool_options(tools, None)}
    if messages:
        options |= continue_option(fields, messages)
    return _request(fields, [messages] if messages else [], options, is_chat=True)


def read_generate(fields: RequestFields) -> tuple[CompletionRequest, MakeWriter]:
    """A request to `/api/generate`, and what makes the writer of its response. Without a prompt it loads the model."""
    fields.refuse("this server only continues a prompt: leave it out", suffix="")
    fields.refuse("a model has the template of its bundle: send a `raw` prompt", template="")
    fields.refuse("send the conversation to /api/chat: the prefix cache computes only its new turn", context=[])
    prompt, system = fields.text("prompt") or "", fields.text("system") or ""
    options, raw = _options(fields), fields.flag("raw")
    pictures = [picture_part(fields, "images", _data_uri(each)) for each in fields.texts("images")]
    if raw and (system or pictures or "thinking" in options):
        raise fields.unsupported("raw", "a raw prompt has no system message, no images and no `think`: leave them out")
    if not prompt and not pictures:
        return _request(fields, [], options, is_chat=False)
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": content_of([*pictures, {"type": "text", "text": prompt}])})
    return _request(fields, [prompt if raw else messages], options, is_chat=False)


def _request(
    fields: RequestFields, prompts: Sequence[Prompt], options: GenerationKeywords, *, is_chat: bool
) -> tuple[CompletionRequest, MakeWriter]:
    fields.ignore(*BESIDE_OPTIONS)
    inner = fields.inner("options")
    inner.ignore(*STARTED)
    if all(inner.get(name, off) == off for name, off in PENALTIES.items()):
        inner.ignore("repeat_last_n")  # Ollama's default of 64 is sent by front ends
    inner.refuse("penalties count the whole text", repeat_last_n=-1, penalize_newline=True)
    request = read_request(inner, NAMES, prompts, options)
    thinks = {"thinking": "think"} if options.get("thinking") else {}
    keep_s = _keep_s(fields)
    unloads = not prompts and keep_s == 0
    absent = partial(_unloaded, is_chat=is_chat) if unloads else None
    request = replace(request, keep_s=keep_s, needs={**request.needs, **thinks}, absent=absent)
    return request, partial(OllamaWriter, is_chat=is_chat, unloads=unloads)


def _options(fields: RequestFields) -> GenerationKeywords:
    """Thinking, form of the answer, and log probabilities."""
    options: GenerationKeywords = {}
    think, form = fields.get("think"), fields.get("format")
    if isinstance(think, str):
        fields.choice("think", EFFORTS)
    if think is not None:
        options["thinking"] = think if isinstance(think, str) else fields.flag("think")
    if isinstance(form, str) and form:
        fields.choice("format", ("json",))
        options["response_format"] = {"type": "json_object"}
    elif form not in (None, ""):
        options["response_format"] = schema_format(fields.inner("format"), strict=False)
    top = fields.whole("top_logprobs", 0, MAX_TOP_LOGPROBS) or 0
    if fields.flag("logprobs"):
        options |= {"logprobs": True, "top_logprobs": top}
    return options


def _keep_s(fields: RequestFields) -> float | None:
    """Seconds of `keep_alive`, a number or a duration of Go; negative ones mean for ever."""
    value = fields.get("keep_alive")
    if isinstance(value, str):
        text, parts = value.removeprefix("-"), DURATION.findall(value)
        if text not in ("0", "".join(f"{number}{unit}" for number, unit in parts)) or not text:
            raise fields.wrong("keep_alive", "a number of seconds, or a duration such as 5m")
        total = sum(float(number) * UNITS[unit] for number, unit in parts)
        seconds: float | None = -total if value.startswith("-") else total
    else:
        seconds = fields.number("keep_alive")
    return inf if seconds is not None and not 0 <= seconds <= MAX_KEEP_S else seconds


def read_messages(fields: RequestFields) -> list[dict[str, Any]]:
    """`messages`, as messages of a chat completion. A tool's result belongs to the first open call of its name."""
    messages: list[dict[str, Any]] = []
    open_calls: list[tuple[str, str]] = []
    for message in fields.objects("messages"):
        role = message.choice("role", ROLES) or "user"
        text, pictures = message.text("content") or "", message.texts("images")
        parts: list[ContentPart] = [picture_part(message, "images", _data_uri(each)) for each in pictures]
        made: dict[str, Any] = {"role": role, "content": content_of([*parts, {"type": "text", "text": text}])}
        if thoughts := message.text("thinking"):
            made["reasoning_content"] = thoughts
        called = enumerate(message.objects("tool_calls"))
        calls = [_call(each, f"call_{len(messages)}_{number}") for number, each in called]
        if calls:
            made |= {"tool_calls": calls, "content": made["content"] or None}
            open_calls += [(each["id"], each["function"]["name"]) for each in calls]
        name, call_id = message.text("tool_name") or message.text("name"), message.text("tool_call_id")
        if role == "tool":
            wanted = (each for each in open_calls if (call_id or each[0]) == each[0] and (name or each[1]) == each[1])
            if (found := next(wanted, None)) is not None:
                open_calls.remove(found)
                made["tool_call_id"] = found[0]
            made |= {"name": name} if name else {}
        messages.append(made)
    return after_results(messages)


def _call(call: RequestFields, own_id: str) -> dict[str, Any]:
    """A call in OpenAI's form; Ollama's may have no id."""
    call.ignore("type")
    function = call.inner("function")
    function.ignore("index", "description")
    name, arguments = function.required("name"), function.get("arguments")
    return {
        "id": call.text("id") or own_id,
        "type": "function",
        "function": {"name": name, "arguments": {} if arguments is None else arguments},
    }


def _data_uri(data: str) -> str:
    """A picture's base64 as the address that the other APIs have. Its format is that of its bytes."""
    return f"data:image/png;base64,{data}"


class OllamaWriter(ResponseWriter):
    """The object of a response, or the lines of its stream."""

    media_type = "application/x-ndjson"

    def __init__(self, model: Model, name: str, choices: Sequence[Choice], *, is_chat: bool, unloads: bool) -> None:
        """
        Args:
            choices: one, or none for a request that only loads or unloads the model.
            is_chat: whether the text is in a message.
            unloads: whether the model is unloaded after the response.
        """
        super().__init__(model, name, choices)
        self._said = partial(_said, is_chat=is_chat)
        self._unloads = unloads
        self._began = datetime.now(UTC)

    def step(self, choice: Choice, step: Step) -> Iterator[JsonLine]:
        if step.text or step.reasoning or step.tool_calls or step.logprobs:
            scores = chat_logprobs(step.logprobs, self.model.tokenizer)
            more = {} if scores is None else {"logprobs": scores["content"]}
            yield self._line(self._said(step.text, step.reasoning, step.tool_calls) | more, done=False)

    def closing(self) -> Iterator[JsonLine]:
        yield self._line(self._said("", "", ()) | self._end(), done=True)

    def failure(self, error: RequestError) -> Iterator[JsonLine]:
        yield JsonLine(error.ollama())

    def keep_alive(self) -> JsonLine:
        return self._line(self._said("", "", ()), done=False)

    def whole(self) -> dict[str, Any]:
        if not self.choices:
            return self._object(self._said("", "", ()) | self._end(), done=True)
        reply = self.choices[0].reply
        scores = chat_logprobs(reply.logprobs, self.model.tokenizer)
        more = {} if scores is None else {"logprobs": scores["content"]}
        return self._object(self._said(reply.text, reply.reasoning, reply.tool_calls) | more | self._end(), done=True)

    def _line(self, fields: Mapping[str, Any], *, done: bool) -> JsonLine:
        return JsonLine(self._object(fields, done=done))

    def _object(self, fields: Mapping[str, Any], *, done: bool) -> dict[str, Any]:
        return _object(self.name, fields, done=done)

    def _end(self) -> dict[str, Any]:
        """Why the reply ended, tokens, and times in nanoseconds."""
        if not self.choices:
            return {"done_reason": "unload" if self._unloads else "load"}
        [choice] = self.choices
        usage, stats = Usage.of(self.choices), choice.stats
        reason = FINISH_NAMES[choice.finish_reason].openai
        return {
            "done_reason": "length" if reason == "length" else "stop",
            "total_duration": _nanoseconds((datetime.now(UTC) - self._began).total_seconds()),
            "prompt_eval_count": usage.prompt,
            "prompt_eval_cached_count": usage.cached,
            "prompt_eval_duration": _nanoseconds(stats.prefill_s),
            "eval_count": usage.new,
            "eval_duration": _nanoseconds(stats.decode_s),
            "speculative_decoding": usage.drafts,
        }


def _unloaded(name: str, *, is_chat: bool) -> dict[str, Any]:
    """The response that a model is unloaded, which it was before: it is not loaded for that."""
    return _object(name, {**_said("", "", (), is_chat=is_chat), "done_reason": "unload"}, done=True)


def _said(text: str, thoughts: str, calls: Sequence[Any], *, is_chat: bool) -> dict[str, Any]:
    """Text, thoughts and calls, of a message or of `/api/generate`, which knows no calls."""
    more = {"thinking": thoughts} if thoughts else {}
    if not is_chat:
        return {"response": text, **more}
    functions = [{"id": call.id, "function": {"name": call.name, "arguments": call.arguments}} for call in calls]
    message = {"role": "assistant", "content": text, **more, **({"tool_calls": functions} if functions else {})}
    return {"message": message}


def _object(name: str, fields: Mapping[str, Any], *, done: bool) -> dict[str, Any]:
    now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    return {"model": name, "created_at": now, **fields, "done": done}


def _nanoseconds(seconds: float) -> int:
    return round(1e9 * seconds)


def tag(manager: ModelManager) -> dict[str, Any]:
    """An entry of `/api/tags`."""
    bundle = manager.bundle
    changed = datetime.fromtimestamp((bundle.path / MANIFEST).stat().st_mtime, UTC)
    return {
        "name": manager.name,
        "model": manager.name,
        "modified_at": changed.isoformat(),
        "size": sum(entry.size for entry in bundle.manifest.files.values()),
        "digest": bundle.content,
        "details": _details(manager),
    }


def running(manager: ModelManager) -> dict[str, Any]:
    """An entry of `/api/ps`, for a model in memory."""
    left, model = manager.idle_left_s, manager.model
    remaining = STAYING if left is None else timedelta(seconds=left)
    entry = {name: value for name, value in tag(manager).items() if name != "modified_at"}
    return {
        **entry,
        "expires_at": (datetime.now(UTC) + remaining).isoformat(),
        "size_vram": 0,
        "context_length": None if model is None else model.context_length,
    }


def show(manager: ModelManager, fields: RequestFields) -> dict[str, Any]:
    """The response of `/api/show`."""
    fields.ignore("verbose", "name")
    manifest, template = manager.bundle.manifest, manager.bundle.file(CHAT_TEMPLATE)
    family = manifest.family
    return {
        "modelfile": f"# a bundle of ondevice {__version__}",
        "parameters": "",
        "template": "" if template is None else template.read_text("utf-8", "replace"),
        "details": _details(manager),
        "model_info": {
            "general.architecture": family,
            f"{family}.context_length": manifest.target.context_length,
            f"{family}.block_count": len(manifest.target.layers),
            f"{family}.vocab_size": manifest.target.vocab_size,
        },
        "capabilities": list(manager.capabilities),
        "modified_at": tag(manager)["modified_at"],
    }


def _details(manager: ModelManager) -> dict[str, Any]:
    manifest = manager.bundle.manifest
    return {
        "parent_model": "",
        "format": "ondevice",
        "family": manifest.family,
        "families": [manifest.family],
        "parameter_size": "",
        "quantization_level": manifest.weights,
    }
