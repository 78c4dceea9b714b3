"""`/v1/chat/completions` and `/v1/completions`: OpenAI's APIs, with llama.cpp's additional fields.

Each has a function that reads its requests and a `ResponseWriter`; `OpenAIWriter` is what the two writers share.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal

from ondevice.generate.sampling.sampler import MAX_TOP_LOGPROBS
from ondevice.generate.stats import TokenLogprob
from ondevice.generation import FinishReason, Step
from ondevice.model import Model
from ondevice.options import GenerationKeywords
from ondevice.server.apis.blocks import after_results
from ondevice.server.delivery import FINISH_NAMES, MakeWriter, ResponseWriter, ServerSentEvent, Usage, new_id
from ondevice.server.replies import Choice, Echo, PrefillProgress
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
from ondevice.text.codec import Prompt
from ondevice.text.reply_stream import TokenOffsets
from ondevice.text.tokenizer import Tokenizer

CHAT_NAMES = FieldNames(max_tokens=("max_completion_tokens", "max_tokens", "n_predict"), choices="n")
COMPLETION_NAMES = FieldNames(max_tokens=("max_tokens", "n_predict"), choices="n", least_tokens=0)
CACHING = ("cache_prompt", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options")
"""Fields about the cache of prompts. A reply is the same with and without it."""
MAX_PROMPTS = 64

UsageInStream = Literal["never", "end", "always"]
"""Whether a stream has its usage: nowhere, in a last chunk, or in all chunks."""


def read_chat_completion(fields: RequestFields) -> tuple[CompletionRequest, MakeWriter]:
    """A request to `/v1/chat/completions`, and what makes the writer of its response."""
    fields.required("messages")
    messages = [dict(message) for message in fields.objects("messages")]
    if not messages:
        raise fields.wrong("messages", "a list of at least one message")
    _check_parts(fields)
    messages = after_results(messages)
    options: GenerationKeywords = {
        **_chat_options(fields),
        **_chat_logprobs(fields),
        **continue_option(fields, messages),
    }
    _refuse_others(fields)
    fields.refuse("functions are declared in `tools`", "functions", "function_call")
    fields.refuse("replies are texts only", "audio", modalities=["text"])
    fields.refuse("the client searches: declare a function in `tools`", "web_search_options")
    fields.refuse("the model has no such switch: ask for it in a message", verbosity="medium")
    fields.ignore("metadata", "service_tier", "prediction")
    request = read_request(fields, CHAT_NAMES, [messages], options)
    rounds = fields.flag("return_rounds")
    return request, partial(ChatCompletionWriter, usage=_usage_in_stream(fields), include_rounds=rounds)


def _check_parts(fields: RequestFields) -> None:
    """Refuse parts that could name a file of this machine. The text layer checks the others.

    Raises:
        RequestError: a part has a type that programs in this process may use with a path: `image`, `audio` or `video`.
    """
    for message in fields.objects("messages"):
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, dict) else None
            if kind == "image":
                raise message.unsupported("content", "send pictures as parts of the type image_url, with a data: URI")
            if kind == "audio":
                raise message.unsupported("content", "send sounds as parts of the type input_audio, in base64")
            if kind == "video":
                raise message.unsupported("content", "send some frames of a video, as parts of the type image_url")


def read_completion(fields: RequestFields) -> tuple[CompletionRequest, MakeWriter]:
    """A request to `/v1/completions`, and what makes the writer of its response."""
    _refuse_others(fields)
    fields.refuse("this server only continues a prompt: leave it out", suffix="")
    fields.ignore("best_of")
    options, echoes = _text_logprobs(fields), fields.flag("echo")
    if echoes and options:
        options["prompt_logprobs"] = True
    request = replace(read_request(fields, COMPLETION_NAMES, _prompts(fields), options), echoes=echoes)
    return request, partial(CompletionWriter, usage=_usage_in_stream(fields), scores_prompts=bool(options))


def _refuse_others(fields: RequestFields) -> None:
    """Fields of both APIs that do not concern this server, or whose only value here is the usual one."""
    fields.ignore("user", "safety_identifier", "store", *CACHING)
    fields.refuse("thoughts come as `reasoning_content`", reasoning_format="auto")


def _usage_in_stream(fields: RequestFields) -> UsageInStream:
    """OpenAI's `include_usage`, and vLLM's `continuous_usage_stats`, which only counts beside it."""
    options = fields.inner("stream_options")
    options.ignore("include_obfuscation")
    at_end, continuous = options.flag("include_usage"), options.flag("continuous_usage_stats")
    return ("always" if continuous else "end") if at_end else "never"


def _chat_options(fields: RequestFields) -> GenerationKeywords:
    """Tools, thinking and template variables."""
    options = tool_options([dict(tool) for tool in fields.objects("tools")], fields.get("tool_choice"))
    options |= parallel_option(fields)
    template = fields.inner("chat_template_kwargs")
    if effort := effort_option(fields, "reasoning_effort"):
        options |= effort
    elif "enable_thinking" in template:
        options["thinking"] = template.flag("enable_thinking")
    if variables := {name: value for name, value in template.items() if name != "enable_thinking"}:
        options["template_options"] = variables
    return options


def _chat_logprobs(fields: RequestFields) -> GenerationKeywords:
    """`logprobs` is a flag here."""
    top = fields.whole("top_logprobs", 0, MAX_TOP_LOGPROBS) or 0
    wanted = fields.flag("logprobs")
    if top and not wanted:
        raise fields.unsupported("top_logprobs", "needs logprobs to be true")
    return {"logprobs": True, "top_logprobs": top} if wanted else {}


def _text_logprobs(fields: RequestFields) -> GenerationKeywords:
    """`logprobs` is the number of alternatives here."""
    top = fields.whole("logprobs", 0, MAX_TOP_LOGPROBS)
    return {} if top is None else {"logprobs": True, "top_logprobs": top}


def _prompts(fields: RequestFields) -> Sequence[Prompt]:
    """A text, a list of token ids, or a list of either."""
    prompt = fields.required("prompt")
    if isinstance(prompt, str) or (_is_list_of(prompt, int) and prompt):
        return [prompt]
    if not (_is_list_of(prompt, str) or (isinstance(prompt, list) and all(_is_list_of(each, int) for each in prompt))):
        raise fields.wrong("prompt", "a string, a list of token ids, or a list of either")
    if not 0 < len(prompt) <= MAX_PROMPTS:
        raise RequestError(400, f"prompt must hold 1 to {MAX_PROMPTS} prompts, not {len(prompt)}", param="prompt")
    return list(prompt)


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(each, kind) and not isinstance(each, bool) for each in value)


class OpenAIWriter(ResponseWriter):
    """The common part of both APIs' responses: a list of choices, usage, llama.cpp's timings, `[DONE]` after a stream.

    kind, chunk_kind : `object` of a whole response and of a chunk
    """

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    id_prefix: ClassVar[str]

    def __init__(self, model: Model, name: str, choices: Sequence[Choice], *, usage: UsageInStream = "never") -> None:
        super().__init__(model, name, choices)
        self._usage_in_stream = usage
        self._head = {"id": new_id(self.id_prefix), "created": int(time.time()), "model": name}

    @abstractmethod
    def whole_choice(self, choice: Choice) -> dict[str, Any]:
        """A complete reply in a whole response."""

    def closing(self) -> Iterator[ServerSentEvent]:
        if self._usage_in_stream != "never":
            yield self._chunk([], usage=self._usage())
        yield ServerSentEvent("[DONE]")

    def failure(self, error: RequestError) -> Iterator[ServerSentEvent]:
        yield ServerSentEvent(error.openai())

    def whole(self) -> dict[str, Any]:
        choices = [self.whole_choice(choice) for choice in self.choices]
        response = {"object": self.kind, **self._head, "choices": choices, "usage": self._usage()}
        return response | ({"timings": self.choices[0].stats.timings()} if len(choices) == 1 else {})

    def _chunk(self, choices: Sequence[dict[str, Any]], **more: Any) -> ServerSentEvent:
        if self._usage_in_stream == "always":
            more["usage"] = self._usage()
        elif self._usage_in_stream == "end":
            more.setdefault("usage", None)
        return ServerSentEvent({"object": self.chunk_kind, **self._head, "choices": choices, **more})

    def _usage(self) -> dict[str, Any]:
        usage = Usage.of(self.choices)
        return {
            "prompt_tokens": usage.prompt,
            "completion_tokens": usage.new,
            "total_tokens": usage.prompt + usage.new,
            "prompt_tokens_details": {"cached_tokens": usage.cached},
            "speculative_decoding": usage.drafts,
        }


class ChatCompletionWriter(OpenAIWriter):
    """A `chat.completion`, or its chunks."""

    kind, chunk_kind, id_prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"

    def __init__(
        self,
        model: Model,
        name: str,
        choices: Sequence[Choice],
        *,
        usage: UsageInStream = "never",
        include_rounds: bool = False,
    ) -> None:
        super().__init__(model, name, choices, usage=usage)
        self._include_rounds = include_rounds

    def opening(self) -> Iterator[ServerSentEvent]:
        for choice in self.choices:
            yield self._delta(choice, {"role": "assistant", "content": ""})

    def prefill(self, progress: PrefillProgress) -> Iterator[ServerSentEvent]:
        yield self._delta(progress.choice, {}, prompt_progress=prompt_progress(progress))

    def step(self, choice: Choice, step: Step) -> Iterator[ServerSentEvent]:
        delta: dict[str, Any] = {}
        if step.reasoning:
            delta["reasoning_content"] = step.reasoning
        if step.text:
            delta["content"] = step.text
        if step.tool_calls:
            first = sum(len(each.tool_calls) for each in choice.steps[:-1])
            delta["tool_calls"] = [
                {"index": index, **call.as_openai()} for index, call in enumerate(step.tool_calls, first)
            ]
        more: dict[str, Any] = {"round": round_of(step)} if self._include_rounds else {}
        if delta or step.logprobs or more:
            yield self._delta(choice, delta, step.logprobs, **more)
        if step.finish_reason:
            finish = _finish_name(step.finish_reason)
            yield self._delta(choice, {}, finish_reason=finish, timings=choice.stats.timings())

    def whole_choice(self, choice: Choice) -> dict[str, Any]:
        reply = choice.reply
        return {
            "index": choice.index,
            "message": reply.message,
            "logprobs": chat_logprobs(reply.logprobs, self.model.tokenizer),
            "finish_reason": _finish_name(choice.finish_reason),
        }

    def _delta(
        self,
        choice: Choice,
        delta: dict[str, Any],
        logprobs: Sequence[TokenLogprob] = (),
        finish_reason: str | None = None,
        **more: Any,
    ) -> ServerSentEvent:
        written = {
            "index": choice.index,
            "delta": delta,
            "logprobs": chat_logprobs(logprobs, self.model.tokenizer),
            "finish_reason": finish_reason,
        }
        return self._chunk([written], **more)


class CompletionWriter(OpenAIWriter):
    """A `text_completion`, or its chunks."""

    kind = chunk_kind = "text_completion"
    id_prefix = "cmpl-"

    def __init__(
        self,
        model: Model,
        name: str,
        choices: Sequence[Choice],
        *,
        usage: UsageInStream = "never",
        scores_prompts: bool = False,
    ) -> None:
        """
        Args:
            scores_prompts: whether echoed prompts come with the log probabilities of their tokens.
        """
        super().__init__(model, name, choices, usage=usage)
        self._scores_prompts = scores_prompts
        self._echoes: dict[int, dict[str, Any]] = {}
        """The echoed prompts as they were written, by index of the choice."""
        self._offsets = [self._first_offset(choice) for choice in choices]
        """Where the tokens of a streamed reply begin."""

    def prefill(self, progress: PrefillProgress) -> Iterator[ServerSentEvent]:
        yield self._chunk([self._text(progress.choice, "")], prompt_progress=prompt_progress(progress))

    def step(self, choice: Choice, step: Step) -> Iterator[ServerSentEvent]:
        if len(choice.steps) == 1 and choice.echo is not None:
            yield self._chunk([self._echoed(choice, choice.echo)])
        timings = {"timings": choice.stats.timings()} if step.finish_reason else {}
        if step.text or step.logprobs or timings:
            offsets = self._offsets[choice.index]
            yield self._chunk([self._text(choice, step.text, step.logprobs, offsets)], **timings)

    def whole_choice(self, choice: Choice) -> dict[str, Any]:
        reply, echo = choice.reply, choice.echo
        whole = self._text(choice, reply.text, reply.logprobs, self._first_offset(choice))
        if echo is None:
            return whole
        scores = _joined(self._echoed(choice, echo)["logprobs"], whole["logprobs"])
        return {**whole, "text": echo.text + reply.text, "logprobs": scores}

    def _echoed(self, choice: Choice, echo: Echo) -> dict[str, Any]:
        """The prompt as the beginning of the text."""
        if choice.index in self._echoes:
            return self._echoes[choice.index]
        scores = None
        if self._scores_prompts and self.model.tokenizer is not None:
            scores = prompt_logprobs(echo, (choice.first or choice).reply.prompt_logprobs, self.model.tokenizer)
        written = {**self._text(choice, echo.text), "logprobs": scores, "finish_reason": None}
        self._echoes[choice.index] = written
        return written

    def _text(
        self,
        choice: Choice,
        text: str,
        logprobs: Sequence[TokenLogprob] = (),
        offsets: TokenOffsets | None = None,
    ) -> dict[str, Any]:
        """A piece of the text, or all of it, with its tokens if log probabilities were asked for."""
        scores = None
        if logprobs and offsets is not None and self.model.tokenizer is not None:
            begins = offsets.add(each.token_id for each in logprobs)
            scores = {**text_logprobs(logprobs, self.model.tokenizer), "text_offset": begins}
        finish = _finish_name(choice.finish_reason)
        return {"index": choice.index, "text": text, "logprobs": scores, "finish_reason": finish}

    def _first_offset(self, choice: Choice) -> TokenOffsets | None:
        """For the offsets of a reply's tokens, which count from the beginning of an echoed prompt."""
        if self.model.tokenizer is None:
            return None
        return TokenOffsets(self.model.tokenizer, len(choice.echo.text) if choice.echo else 0, continues=True)


def _finish_name(reason: FinishReason | None) -> str | None:
    return None if reason is None else FINISH_NAMES[reason].openai


def round_of(step: Step) -> dict[str, Any]:
    """The server's own event `round`: one pass of draft, forward, verify; the first of a reply is its prefill."""
    return {
        "tokens": len(step.token_ids),
        "drafted": step.drafted,
        "accepted": step.accepted,
        "source": step.source,
        "time_ms": round(1e3 * step.seconds, 3),
    }


def prompt_progress(progress: PrefillProgress) -> dict[str, Any]:
    """llama.cpp's `prompt_progress`."""
    return {
        "total": progress.total,
        "cache": progress.cached,
        "processed": progress.processed,
        "time_ms": round(1e3 * progress.seconds, 3),
    }


def chat_logprobs(logprobs: Sequence[TokenLogprob], tokenizer: Tokenizer | None) -> dict[str, Any] | None:
    """The `logprobs` of a chat completion's choice; None if none were asked for."""
    if not logprobs or tokenizer is None:
        return None
    content = []
    for each in logprobs:
        top = [_token_logprob(tokenizer, token, logprob) for token, logprob in each.top]
        content.append({**_token_logprob(tokenizer, each.token_id, each.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def text_logprobs(logprobs: Sequence[TokenLogprob], tokenizer: Tokenizer) -> dict[str, list[Any]]:
    """The `logprobs` of consecutive tokens of a completion, but for their offsets.

    A token itself is the last of its `top_logprobs` where it is none of the likeliest, as in OpenAI's API.
    """
    scored = [(*each.top, (each.token_id, each.logprob)) for each in logprobs]
    return {
        "tokens": [_token_text(tokenizer, each.token_id) for each in logprobs],
        "token_logprobs": [each.logprob for each in logprobs],
        "top_logprobs": [{_token_text(tokenizer, token): logprob for token, logprob in each} for each in scored],
    }


def prompt_logprobs(echo: Echo, logprobs: Sequence[TokenLogprob], tokenizer: Tokenizer) -> dict[str, Any]:
    """The `logprobs` of an echoed prompt: null for its first token, which nothing predicts.

    Args:
        logprobs: of the other tokens.
    """
    rest = text_logprobs(logprobs, tokenizer)
    return {
        "tokens": [_token_text(tokenizer, echo.token_ids[0]), *rest["tokens"]],
        "token_logprobs": [None, *rest["token_logprobs"]],
        "top_logprobs": [None, *rest["top_logprobs"]],
        "text_offset": list(echo.offsets),
    }


def _joined(before: dict[str, Any] | None, after: dict[str, Any] | None) -> dict[str, Any] | None:
    """The `logprobs` of a text from those of its two parts, of which either may have none."""
    if before is None or after is None:
        return before or after
    return {name: before[name] + after[name] for name in before}


def _token_logprob(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    made = tokenizer.token_bytes(token)
    return {"token": made.decode(errors="replace"), "logprob": logprob, "bytes": list(made)}


def _token_text(tokenizer: Tokenizer, token: int) -> str:
    """The text of a token, or OpenAI's spelling of its bytes, such as `bytes:\\xe3`, where they are no UTF-8."""
    made = tokenizer.token_bytes(token)
    try:
        return made.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in made)
