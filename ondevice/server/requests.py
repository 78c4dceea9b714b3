"""Read a request: its JSON as `RequestFields`, and these as a `CompletionRequest`; a mistake raises a `RequestError`.

The modules of `apis` read the fields that only their API has. Sampling, token limit, stop strings, drafter and response
format are read here, for all of them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from ondevice.engines.protocol import MAX_SESSIONS
from ondevice.errors import (
    ContextOverflowError,
    MissingDependencyError,
    OndeviceError,
    PromptError,
    UsageError,
    near,
    shown,
)
from ondevice.generate.drafters import registry
from ondevice.options import GenerationKeywords
from ondevice.text.codec import Prompt
from ondevice.text.messages import LEVELS

NUMBERS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "repeat_penalty": "repetition_penalty",  # llama.cpp's name
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}
"""Fields that hold a number, and the generation option that each one sets. The same in all APIs."""

NEUTRAL_SAMPLERS = {
    "typical_p": 1,
    "tfs_z": 1,
    "mirostat": 0,
    "dynatemp_range": 0,
    "dry_multiplier": 0,
    "xtc_probability": 0,
}
"""llama.cpp's fields of samplers that are not here, and the values with which front ends switch them off."""

MAX_STOPS = 64
MAX_STOP_CHARACTERS = 256
"""Most stop strings of a request, and the longest one. Every token is compared with the beginnings of all of them."""

MAX_BIASES = 1024
"""Most entries of `logit_bias`."""
_TOKEN_ID = re.compile("[0-9]{1,10}")

NO_LIMIT = (-1, -2)
"""Token limits of llama.cpp and Ollama that are none: to the end of the reply, or of the context."""

MAX_ASSISTANT_TOKENS = 64
"""Highest `num_assistant_tokens`."""

MAX_CHOICES = 64
"""Most replies of a request: its number of prompts times `n`."""

EFFORTS = ("none", *LEVELS)
"""OpenAI's reasoning efforts. Most templates only switch thinking on or off: all but `none` switch it on."""

ERROR_TYPES = {
    400: ("invalid_request_error", "invalid_request_error"),
    401: ("authentication_error", "authentication_error"),
    403: ("permission_error", "permission_error"),
    404: ("not_found_error", "not_found_error"),
    405: ("invalid_request_error", "invalid_request_error"),
    408: ("timeout_error", "timeout_error"),
    413: ("invalid_request_error", "request_too_large"),
    500: ("server_error", "api_error"),
    503: ("unavailable_error", "overloaded_error"),
}
"""Error types by HTTP status: OpenAI's (and llama.cpp's) name, Anthropic's name."""

OTHER_ERROR_TYPES = ("invalid_request_error", "api_error")

_log = logging.getLogger("ondevice")


@dataclass(frozen=True)
class CompletionRequest:
    """A request to the model, in the same form for every API.

    prompts : each one gets `choices` replies
    options : for every generation; without `max_new_tokens` a reply may fill the context
    choices : replies per prompt
    reports_prefill : whether the client wants to be sent the progress of reading the prompt
    echoes : whether the response begins with the prompt
    background : whether the reply goes on without its client
    keep_s : idle seconds after which the model is to be unloaded this time, infinite for never; None changes nothing
    needs : what the model must be capable of, in Ollama's words, and the field that asks for it
    absent : makes the response of a name, if its model is not in memory and need not be loaded for it
    """

    prompts: Sequence[Prompt]
    options: GenerationKeywords
    choices: int = 1
    reports_prefill: bool = False
    echoes: bool = False
    background: bool = False
    keep_s: float | None = None
    needs: Mapping[str, str] = field(default_factory=dict)
    absent: Callable[[str], dict[str, Any]] | None = None


class FieldNames(NamedTuple):
    """The names that an API has for fields that all APIs share.

    max_tokens : the token limit; the first of these names that the request contains counts
    stop : the stop strings
    choices : the number of replies per prompt; None if the API always gives one
    least_tokens : lowest token limit
    """

    max_tokens: Sequence[str]
    stop: str = "stop"
    choices: str | None = None
    least_tokens: int = 1


def read_request(
    fields: RequestFields, names: FieldNames, prompts: Sequence[Prompt], api_options: GenerationKeywords
) -> CompletionRequest:
    """Read the fields that all APIs share.

    Args:
        fields: the request.
        names: what its API calls them.
        prompts: read by the caller.
        api_options: generation options that the caller read from fields of its own API.

    Raises:
        RequestError: a field has a wrong type or value.
    """
    options: GenerationKeywords = {**_sampling(fields), **api_options}
    if (max_tokens := _max_tokens(fields, names)) is not None:
        options["max_new_tokens"] = max_tokens
    if stop := fields.texts(names.stop):
        options["stop"] = _stops(fields, names.stop, stop)
    # a name, never a path: clients must not be able to open files of this machine
    if (drafter := fields.choice("drafter", registry.names())) is not None:
        options["drafter"] = drafter
    if (drafted := fields.whole("num_assistant_tokens", 1, MAX_ASSISTANT_TOKENS)) is not None:
        options["num_assistant_tokens"] = drafted
    fields.refuse("llama.cpp's GBNF is not supported: use `response_format`, which also takes `lark`", "grammar")
    if "json_schema" in fields:  # llama.cpp's short form
        options["response_format"] = schema_format(fields.inner("json_schema"), strict=False)
    if response_format := dict(fields.inner("response_format")):
        options["response_format"] = response_format
    choices = 1 if names.choices is None else fields.whole(names.choices, 1, MAX_SESSIONS) or 1
    if choices * len(prompts) > MAX_CHOICES:
        raise RequestError(
            400, f"{len(prompts)} prompts with {choices} replies each are more than {MAX_CHOICES} replies"
        )
    needs = {"tools": "tools"} if options.get("tools") and options.get("tool_choice") != "none" else {}
    return CompletionRequest(prompts, options, choices, fields.flag("return_progress"), needs=needs)


def tool_options(tools: list[dict[str, Any]], choice: Any) -> GenerationKeywords:
    """The options `tools` and `tool_choice`.

    An "auto" of the request stays "auto", which holds calls to their declarations, only if a tool is `strict`, as in
    OpenAI's API. Otherwise it becomes None, which does not constrain the model.

    Args:
        tools: declarations in the form of OpenAI's chat completions.
        choice: OpenAI's `tool_choice`; None if the request has none.
    """
    if not tools:
        return {} if choice in (None, "auto", "none") else {"tool_choice": choice}
    if choice in (None, "auto"):
        strict = any(isinstance(tool.get("function"), dict) and tool["function"].get("strict") for tool in tools)
        return {"tools": tools, "tool_choice": "auto" if strict else None}
    return {"tools": tools, "tool_choice": choice}


def parallel_option(fields: RequestFields) -> GenerationKeywords:
    """OpenAI's `parallel_tool_calls`; nothing if the request does not have it."""
    return {"parallel_tool_calls": fields.flag("parallel_tool_calls")} if "parallel_tool_calls" in fields else {}


def effort_option(fields: RequestFields, name: str) -> GenerationKeywords:
    """The option `thinking` from a field with OpenAI's reasoning effort; empty if the request has no such field."""
    effort = fields.choice(name, EFFORTS)
    return {} if effort is None else {"thinking": effort if effort in LEVELS else False}


def continue_option(fields: RequestFields, messages: Sequence[Mapping[str, Any]]) -> GenerationKeywords:
    """The option `continue_final`: a last message of the assistant is continued, as in Anthropic's API and llama.cpp,
    unless vLLM's fields `continue_final_message` or `add_generation_prompt` say otherwise.
    """
    continued, opened = (
        fields.flag(name) if name in fields else None for name in ("continue_final_message", "add_generation_prompt")
    )
    if continued is not None and continued == opened:
        raise fields.unsupported(
            "continue_final_message", "a reply either continues the last message or follows it: leave one of them out"
        )
    if continued is None and opened is not None:
        continued = not opened
    if continued is None:
        last = messages[-1] if messages else {}
        continued = last.get("role") == "assistant" and not last.get("tool_calls")
    return {"continue_final": continued}


def schema_format(schema: Mapping[str, Any], *, strict: bool) -> dict[str, Any]:
    """The `response_format` of a JSON schema.

    Args:
        strict: whether a keyword that cannot be enforced is an error. llama.cpp and Ollama ignore it.
    """
    return {"type": "json_schema", "json_schema": {"schema": dict(schema), "strict": strict}}


def _max_tokens(fields: RequestFields, names: FieldNames) -> int | None:
    """The token limit; None if there is none."""
    limits = [fields.whole(name, names.least_tokens) for name in names.max_tokens if fields.get(name) not in NO_LIMIT]
    return next((limit for limit in limits if limit is not None), None)


def _stops(fields: RequestFields, name: str, stops: Sequence[str]) -> Sequence[str]:
    if len(stops) > MAX_STOPS or max(map(len, stops)) > MAX_STOP_CHARACTERS:
        raise fields.wrong(name, f"at most {MAX_STOPS} strings of at most {MAX_STOP_CHARACTERS} characters")
    return stops


def _sampling(fields: RequestFields) -> GenerationKeywords:
    numbers = {option: value for name, option in NUMBERS.items() if (value := fields.number(name)) is not None}
    options = cast("GenerationKeywords", numbers)
    fields.refuse("this sampler is not here: leave it out", **NEUTRAL_SAMPLERS)
    if (top_k := fields.whole("top_k", -1)) is not None:
        options["top_k"] = max(top_k, 0)
    seed = fields.whole("seed", -1)
    if seed is not None and seed >= 0:  # llama.cpp's -1 asks for a random seed
        options["seed"] = seed
    if fields.flag("ignore_eos"):
        options["ignore_eos"] = True
    if biases := _biases(fields):
        options["logit_bias"] = biases
    return options


def _biases(fields: RequestFields) -> dict[int, float]:
    """Biases by token id, from OpenAI's object or llama.cpp's list of pairs."""
    given = fields.get("logit_bias", {})
    pairs = list(given.items()) if isinstance(given, dict) else given
    if not isinstance(pairs, list) or not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
        raise fields.wrong("logit_bias", "an object of token ids and biases")
    if len(pairs) > MAX_BIASES:
        raise fields.wrong("logit_bias", f"at most {MAX_BIASES} token ids with biases")
    if not all(type(token) is int or (isinstance(token, str) and _TOKEN_ID.fullmatch(token)) for token, _ in pairs):
        raise fields.wrong("logit_bias", "an object of token ids and biases")
    return {int(token): bias for token, bias in pairs}


class RequestFields(Mapping[str, Any]):
    """A JSON object of a request, with readers that check types.

    A field that is null counts as missing. Each reader raises a `RequestError` that names the field if its value has
    another type. Fields that no reader asks for are refused in the end, by `refuse_rest`: a misspelt one, or one for
    something that this server cannot do, must not change a reply silently.
    """

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        """
        Args:
            values: the JSON object.
            path: prefix of field names in errors: empty for the request itself, otherwise it ends with a dot.
        """
        self._values = {name: value for name, value in values.items() if value is not None}
        self._path = path
        self._inner: dict[tuple[str, int], RequestFields] = {}
        """The objects that were read, by their name, and their number in a list."""
        self.read: dict[str, None] = {}
        """Names that a reader has asked for, in this order."""
        self.ignored: dict[str, None] = {}
        """Names of fields that change nothing here."""
        self.refused: dict[str, str] = {}
        """Names of fields that are refused, with what to do instead."""
        self.neutral: dict[str, Any] = {}
        """Values of some of these that ask for nothing, and are accepted."""

    def __getitem__(self, name: str) -> Any:
        self.read[name] = None
        return self._values[name]

    def ignore(self, *names: str) -> None:
        """Accept fields that change nothing of a reply here."""
        self.ignored |= dict.fromkeys(names)

    def refuse(self, message: str, *names: str, **neutral: Any) -> None:
        """Refuse fields with a message that says what to do instead.

        Args:
            neutral: values by name that ask for nothing, and are accepted.
        """
        self.refused |= dict.fromkeys((*names, *neutral), message)
        self.neutral |= neutral
        for name in (*names, *neutral):
            if name in self._values and (name not in neutral or self._values[name] != neutral[name]):
                raise self.unsupported(name, message)

    def refuse_rest(self) -> None:
        """Call it when all fields were read.

        Raises:
            RequestError: for the first field that no reader has asked for, in this object or in one that was read.
        """
        known = self.read | self.ignored | self.neutral
        for name in self._values:
            if name not in known:
                raise self.unsupported(shown(name)[1:-1], f"unknown field{near(name, known)}")
        for each in self._inner.values():
            each.refuse_rest()

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def text(self, name: str) -> str | None:
        value = self.get(name)
        if value is not None and not isinstance(value, str):
            raise self.wrong(name, "a string")
        return value

    def number(self, name: str) -> float | None:
        value = self.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise self.wrong(name, "a number")
        return value

    def whole(self, name: str, least: int, most: int | None = None) -> int | None:
        value = self.get(name)
        if value is None:
            return None
        # some clients write 64.0: JSON has one type for all numbers
        whole = int(value) if isinstance(value, float) and value.is_integer() else value
        if (
            isinstance(whole, bool)
            or not isinstance(whole, int)
            or whole < least
            or (most is not None and whole > most)
        ):
            raise self.wrong(name, f"a whole number from {least} {'on' if most is None else f'to {most}'}")
        return whole

    def flag(self, name: str) -> bool:
        value = self.get(name, False)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def choice(self, name: str, choices: Collection[str]) -> str | None:
        value = self.text(name)
        if value is not None and value not in choices:
            raise self.wrong(name, f"one of {', '.join(choices)}")
        return value

    def kind(self, kinds: Collection[str]) -> str:
        """The field `type`, which must be there and one of `kinds`."""
        self.required("type")
        return self.choice("type", kinds) or ""

    def inner(self, name: str) -> RequestFields:
        """The object in a field; an empty one if the field is missing."""
        value = self.get(name, {})
        if not isinstance(value, Mapping):
            raise self.wrong(name, "an object")
        return self._object(name, value)

    def array(self, name: str) -> Sequence[Any]:
        value = self.get(name, [])
        if not isinstance(value, list):
            raise self.wrong(name, "a list")
        return value

    def objects(self, name: str) -> list[RequestFields]:
        """The objects of a list."""
        found = self.array(name)
        if not all(isinstance(each, Mapping) for each in found):
            raise self.wrong(name, "a list of objects")
        return [self._object(name, each, number) for number, each in enumerate(found)]

    def _object(self, name: str, value: Mapping[str, Any], number: int = -1) -> RequestFields:
        """The object in a field or, with a number, in the list that a field holds."""
        if (name, number) not in self._inner:
            place = name if number < 0 else f"{name}[{number}]"
            self._inner[name, number] = RequestFields(value, f"{self._path}{place}.")
        return self._inner[name, number]

    def texts(self, name: str) -> tuple[str, ...]:
        """A string, or a list of strings."""
        value = self.get(name, [])
        found = [value] if isinstance(value, str) else value
        if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
            raise self.wrong(name, "a string or a list of strings")
        return tuple(found)

    def required(self, name: str) -> Any:
        """The value of a field that must be there."""
        if name not in self:
            raise RequestError(400, f"{self._path}{name} is missing", param=self._path + name)
        return self[name]

    def wrong(self, name: str, wanted: str) -> RequestError:
        """The error for a field with a wrong value."""
        message = f"{self._path}{name} must be {wanted}, not {shown(self[name])}"
        return RequestError(400, message, param=self._path + name)

    def unsupported(self, name: str, message: str) -> RequestError:
        """The error for a field that asks for something this server cannot do."""
        return RequestError(400, f"{self._path}{name}: {message}", param=self._path + name)


class RequestError(Exception):
    """A request that is answered with an error.

    Attributes:
        status: HTTP status.
        message: for the client.
        param: name of the wrong field, if one is wrong.
        retry_after: seconds after which the client should try again.
        facts: further fields of the error's body.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        retry_after: int | None = None,
        kind: str | None = None,
        **facts: Any,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.retry_after = retry_after
        self.facts = facts
        self._kind = kind

    @classmethod
    def of(cls, error: Exception, names: Collection[str] = ()) -> RequestError:
        """The error that a client is sent for any exception. An exception that is not the client's fault is logged.

        Args:
            error: raised while the request was answered.
            names: of the request's fields. If the message begins with one of them, that field is `param`.
        """
        if isinstance(error, RequestError):
            return error
        if isinstance(error, ContextOverflowError):
            return cls(
                400,
                str(error),
                kind="exceed_context_size_error",
                n_prompt_tokens=error.prompt_tokens,
                n_ctx=error.context_length,
            )
        if isinstance(error, PromptError | UsageError | MissingDependencyError):
            message = str(error)
            first = re.match(r"\w*", message)
            return cls(400, message, param=first[0] if first and first[0] in names else None)
        if isinstance(error, RecursionError):
            return cls(400, "the request holds too many lists or objects in each other")
        if isinstance(error, OndeviceError):
            return cls(500, str(error))
        _log.error("a request failed", exc_info=error)
        short = isinstance(error, MemoryError)
        failed = f"internal error ({type(error).__name__}): see the server's log"
        return cls(500, "not enough memory for this request: try a shorter prompt" if short else failed)

    @property
    def headers(self) -> dict[str, str]:
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if self.status == 408:  # the rest of the body may still arrive
            headers["Connection"] = "close"
        return headers | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})

    def openai(self) -> dict[str, Any]:
        """The body in the form of OpenAI and llama.cpp."""
        kind = self._kind or ERROR_TYPES.get(self.status, OTHER_ERROR_TYPES)[0]
        error = {"code": self.status, "message": self.message, "type": kind, "param": self.param}
        return {"error": {**error, **self.facts}}

    def anthropic(self) -> dict[str, Any]:
        """The body in Anthropic's form."""
        kind = ERROR_TYPES.get(self.status, OTHER_ERROR_TYPES)[1]
        details = {"details": self.facts["details"]} if "details" in self.facts else {}
        return {"type": "error", "error": {"type": kind, "message": self.message, **details}}

    def ollama(self) -> dict[str, Any]:
        """The body in Ollama's form."""
        return {"error": self.message}

    def body(self, path: str) -> dict[str, Any]:
        """The body in the form of the API at `path`."""
        if path.startswith("/api/"):
            return self.ollama()
        return self.anthropic() if path.startswith("/v1/messages") else self.openai()


@contextmanager
def as_request_error(names: Collection[str]) -> Iterator[None]:
    """Raise any other exception of the block as the `RequestError` that it is to a client, with the request's fields as
    `names`. One that is a `RequestError` passes: as its own cause, it would stay in memory until the garbage collector
    runs.
    """
    try:
        yield
    except RequestError:
        raise
    except Exception as error:
        raise RequestError.of(error, names) from error
