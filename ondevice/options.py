"""What a caller may ask of one generation."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Real
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Literal, TypedDict, get_args

from ondevice.decoding.logits_processor import LogitsProcessor
from ondevice.decoding.logprobs import MOST, Logprobs
from ondevice.decoding.sampling_options import SamplingOptions
from ondevice.drafters import registry
from ondevice.drafters.draft_model import DraftSampling
from ondevice.drafters.protocol import Drafter
from ondevice.errors import BundleCorruptError, UsageError, reason
from ondevice.grammar.response_format import ResponseFormat
from ondevice.grammar.tool_choice import ToolChoice
from ondevice.progress import Progress, silent
from ondevice.text.chat_options import ChatOptions, Tool

ScheduleName = Literal["auto", "heuristic", "constant"]


@dataclass(frozen=True)
class GenerationDefaults:
    """A bundle's generation_config.json, as far as it says anything here. Without `do_sample`: greedy."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    eos_token_ids: tuple[int, ...] = ()
    suppress_tokens: tuple[int, ...] = ()

    @classmethod
    def read(cls, path: Path | None, vocab_size: int) -> GenerationDefaults:
        """
        Args:
            path: the file; None where the bundle has none.
            vocab_size: above every token id.

        Raises:
            BundleCorruptError: it is no JSON object, or a value makes no sense.
        """
        if path is None:
            return cls()
        try:
            return cls._of(dict(json.loads(path.read_text("utf-8"))), vocab_size)
        except UsageError as error:
            raise BundleCorruptError(f"{path}: {error}: export the bundle again") from error
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise BundleCorruptError(
                f"{path} is not a JSON object ({reason(error)}): export the bundle again"
            ) from error

    @classmethod
    def _of(cls, config: Mapping[str, Any], vocab_size: int) -> GenerationDefaults:
        sampled: dict[str, Any] = {}
        if config.get("do_sample"):
            sampled = {name: config[name] for name in ("top_k", "top_p", "min_p") if config.get(name) is not None}
            sampled["temperature"] = 1.0 if config.get("temperature") is None else config["temperature"]
        penalty = 1.0 if config.get("repetition_penalty") is None else config["repetition_penalty"]
        checked = SamplingOptions(**{"temperature": 0.0, **sampled}, repetition_penalty=penalty)
        return cls(
            temperature=checked.temperature,
            top_k=checked.top_k,
            top_p=checked.top_p,
            min_p=checked.min_p,
            repetition_penalty=checked.repetition_penalty,
            eos_token_ids=_token_ids(config, "eos_token_id", vocab_size),
            suppress_tokens=_token_ids(config, "suppress_tokens", vocab_size),
        )


@dataclass(frozen=True)
class GenerationOptions:
    """The keywords of `Model.stream` and `Model.generate`. None means: as the bundle's generation_config.json says.

    temperature : 0 is greedy
    presence_penalty, frequency_penalty, logit_bias : by OpenAI's names; see `SamplingOptions`
    logprobs, top_logprobs : tell how likely the model found each token, and so many of the likeliest ones beside it, up
        to 20, before temperature, filters and penalties; the same with and without drafts
    stop : strings that end the text; they are not part of it
    drafter : a name of `ondevice.drafters.registry`, `none`, a drafter of the application's own, which serves one
        generation at a time, or the path of a bundle with the same vocabulary: a draft model, alone, or with `auto+`
        before it beside all that the bundle offers. It is opened when first asked for; None is what `load` was told
    draft_sampling : above temperature 0 a draft model draws `coupled` with the target's noise, so that a seed's text is
        what it is without drafts; or with `ratio`, alone, from its own distribution, which is verified by the ratio
        rule: distributed alike, but a seed's text is then another, and depends on how many tokens are drafted
    num_assistant_tokens : draft length of the `constant` schedule, first length of `heuristic`, longest of `auto`; None
        takes what the drafter ships with, and for `auto` no limit but its own
    num_assistant_tokens_schedule : `auto` drafts as many tokens as pay on this machine, none where none do
    logits_processors : change a row of logits before a token is chosen, to shun some say; they see the draft path
    tools, thinking, template_options : for a prompt of messages: see `ChatOptions`
    response_format : the form of the answer, which no token may leave: `{"type": "json_object"}`,
        `{"type": "json_schema", "json_schema": {"schema": ..., "strict": ...}}`, `{"type": "regex", "regex": ...}`,
        `{"type": "choice", "choice": ["yes", "no"]}` or `{"type": "lark", "lark": ...}`, a grammar as llguidance reads
        it. A schema with something in it that cannot be held to is refused, unless `strict` is False. Needs the extra
        `[grammar]`
    tool_choice : `auto` lets the model call tools, and holds calls to their declarations; `required` has it call one or
        more, `{"type": "function", "function": {"name": ...}}` that one, and `none` none. None leaves the model alone
    on_prefill : called after every chunk of a prompt with the tokens done and their number; and again later where a
        draft model begins to read a long text
    copies : of the prompt's keys and values, kept when it has been read, for as many other generations of the same
        prompt, which then need not read it: several replies to one prompt
    """

    max_new_tokens: int = 256
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    stop: str | Sequence[str] | None = None
    drafter: str | PathLike[str] | Drafter | None = None
    draft_sampling: DraftSampling = "coupled"
    num_assistant_tokens: int | None = None
    num_assistant_tokens_schedule: ScheduleName = "auto"
    logits_processors: Sequence[LogitsProcessor] | None = ()
    tools: Sequence[Tool] | None = None
    thinking: bool | None = None
    template_options: Mapping[str, Any] | None = None
    response_format: Mapping[str, Any] | None = None
    tool_choice: str | Mapping[str, Any] | None = None
    on_prefill: Progress | None = silent
    copies: int = 0

    @classmethod
    def of(cls, keywords: Mapping[str, Any]) -> GenerationOptions:
        """Raises UsageError for a keyword that does not exist, naming those that do."""
        names = [field.name for field in fields(cls)]
        for keyword in keywords:
            if keyword not in names:
                raise UsageError(f"unknown option {keyword!r}: there are {', '.join(names)}")
        return cls(**keywords)

    def __post_init__(self) -> None:
        _whole("max_new_tokens", self.max_new_tokens)
        _whole("copies", self.copies, least=0)
        if self.num_assistant_tokens is not None:
            _whole("num_assistant_tokens", self.num_assistant_tokens)
        if not isinstance(self.logprobs, bool):
            raise UsageError(f"logprobs must be True or False, not {self.logprobs!r:.99}")
        top = self.top_logprobs
        if not isinstance(top, int) or isinstance(top, bool) or not 0 <= top <= MOST:
            raise UsageError(f"top_logprobs must be a whole number from 0 to {MOST}, not {top!r:.99}")
        if self.stop is not None and not isinstance(self.stop, Iterable):
            raise UsageError(f"stop must be a string or a list of strings, not {self.stop!r:.99}")
        if isinstance(self.drafter, PathLike):
            object.__setattr__(self, "drafter", fspath(self.drafter))
        named = isinstance(self.drafter, str) or self.drafter is None
        if not named and not _has(self.drafter, "name", "begin", "forget", "forecast", "draft", "observe"):
            _choice("drafter", self.drafter, registry.names())
        _choice("draft_sampling", self.draft_sampling, get_args(DraftSampling))
        processors = self.logits_processors
        if processors is not None and not (isinstance(processors, Sequence) and all(map(callable, processors))):
            raise UsageError(f"logits_processors must be a list of functions, not {processors!r:.99}")
        if self.on_prefill is not None and not callable(self.on_prefill):
            raise UsageError(f"on_prefill must be a function, not {self.on_prefill!r:.99}")
        _choice("num_assistant_tokens_schedule", self.num_assistant_tokens_schedule, get_args(ScheduleName))
        if self.drafter == registry.NONE and self.num_assistant_tokens is not None:
            raise UsageError("num_assistant_tokens says nothing where the drafter is none: leave one of them out")
        _ = self.chat, self.answer, self.choice

    @property
    def chat(self) -> ChatOptions:
        """What the chat template is told."""
        return ChatOptions(self.tools, self.thinking, self.template_options)

    @property
    def wanted_logprobs(self) -> Logprobs | None:
        """None where nobody asked for them."""
        return Logprobs(self.top_logprobs) if self.logprobs or self.top_logprobs else None

    @property
    def answer(self) -> ResponseFormat:
        """What form the answer has."""
        return ResponseFormat.of(self.response_format)

    @property
    def choice(self) -> ToolChoice:
        """What may be called."""
        return ToolChoice.of(self.tool_choice, self.tools)

    def sampling(self, defaults: GenerationDefaults) -> SamplingOptions:
        """These options where given, else the bundle's. A temperature of 0 leaves the bundle's filters out."""
        temperature = defaults.temperature if self.temperature is None else self.temperature
        penalty = defaults.repetition_penalty if self.repetition_penalty is None else self.repetition_penalty
        sampled = not (isinstance(temperature, Real) and temperature == 0)  # what is no number is refused below
        return SamplingOptions(
            temperature=temperature,
            top_k=defaults.top_k if self.top_k is None and sampled else self.top_k,
            top_p=defaults.top_p if self.top_p is None and sampled else self.top_p,
            min_p=defaults.min_p if self.min_p is None and sampled else self.min_p,
            repetition_penalty=penalty,
            seed=self.seed,
            presence_penalty=0.0 if self.presence_penalty is None else self.presence_penalty,
            frequency_penalty=0.0 if self.frequency_penalty is None else self.frequency_penalty,
            logit_bias=self.logit_bias,
        )


class GenerationKeywords(TypedDict, total=False):
    """The fields of `GenerationOptions`, as keywords of `Model.stream` and `Model.generate`."""

    max_new_tokens: int
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    seed: int | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    logprobs: bool
    top_logprobs: int
    stop: str | Sequence[str] | None
    drafter: str | PathLike[str] | Drafter | None
    draft_sampling: DraftSampling
    num_assistant_tokens: int | None
    num_assistant_tokens_schedule: ScheduleName
    logits_processors: Sequence[LogitsProcessor] | None
    tools: Sequence[Tool] | None
    thinking: bool | None
    template_options: Mapping[str, Any] | None
    response_format: Mapping[str, Any] | None
    tool_choice: str | Mapping[str, Any] | None
    on_prefill: Progress | None
    copies: int


def _whole(name: str, value: object, least: int = 1) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UsageError(f"{name} must be a whole number from {least} on, not {value!r:.99}")


def _choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise UsageError(f"{name} must be one of {', '.join(choices)}, not {value!r:.99}")


def _has(value: object, *names: str) -> bool:
    return all(hasattr(value, name) for name in names)


def _token_ids(config: Mapping[str, Any], name: str, vocab_size: int) -> tuple[int, ...]:
    """A token id, a list of them, or none."""
    value = config.get(name)
    found = [] if value is None else value if isinstance(value, list) else [value]
    for token in found:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
            raise UsageError(f"{name} must hold token ids from 0 to {vocab_size - 1}, not {token!r:.99}")
    return tuple(found)
