"""Options of one generation, and the defaults that a bundle's generation_config.json gives."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Literal, TypedDict, get_args

from ondevice.bundle_format.vision import BUDGETS
from ondevice.engines.protocol import MAX_SESSIONS
from ondevice.errors import BundleCorruptError, UsageError, near, reason, shown
from ondevice.generate.drafters import registry
from ondevice.generate.drafters.draft_model import DraftSampling
from ondevice.generate.drafters.protocol import Drafter
from ondevice.generate.request import LogitsProcessor, SamplingOptions
from ondevice.generate.sampling.sampler import MAX_TOP_LOGPROBS, Logprobs
from ondevice.grammar.response_format import Grammar, ToolChoice, answer_grammar
from ondevice.progress import Progress, silent
from ondevice.text.messages import ChatOptions, Tool

ScheduleName = Literal["auto", "heuristic", "constant"]


@dataclass(frozen=True)
class GenerationDefaults:
    """The fields of a bundle's generation_config.json that are used here. Without `do_sample` decoding is greedy."""

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
            path: the file; None if the bundle has none.
            vocab_size: number of token ids, to check those in the file.

        Raises:
            BundleCorruptError: not a JSON object, or an invalid value.
        """
        if path is None:
            return cls()
        try:
            return cls.of(dict(json.loads(path.read_text("utf-8"))), vocab_size)
        except UsageError as error:
            raise BundleCorruptError(f"{path}: {error}: export the bundle again") from error
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise BundleCorruptError(
                f"{path} is not a JSON object ({reason(error)}): export the bundle again"
            ) from error

    @classmethod
    def of(cls, config: Mapping[str, Any], vocab_size: int) -> GenerationDefaults:
        """
        Raises:
            UsageError: an invalid value.
        """
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


class PromptKeywords(TypedDict, total=False):
    """The fields of `GenerationOptions` that decide how a prompt is encoded, as typed keywords of `Model.encode`."""

    tools: Sequence[Tool] | None
    thinking: bool | str | None
    template_options: Mapping[str, Any] | None
    continue_final: bool
    image_tokens: int | None


class GenerationKeywords(PromptKeywords, total=False):
    """The fields of `GenerationOptions` as typed keywords of `Model.stream` and `Model.generate`."""

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
    prompt_logprobs: bool
    stop: str | Sequence[str] | None
    ignore_eos: bool
    drafter: str | PathLike[str] | Drafter | None
    draft_sampling: DraftSampling
    num_assistant_tokens: int | None
    num_assistant_tokens_schedule: ScheduleName
    logits_processors: Sequence[LogitsProcessor] | None
    response_format: Mapping[str, Any] | None
    tool_choice: str | Mapping[str, Any] | None
    parallel_tool_calls: bool
    on_prefill: Progress | None
    copies: int


@dataclass(frozen=True)
class GenerationOptions:
    """The keywords of `Model.stream` and `Model.generate`. None takes the value of the bundle's generation_config.json.

    max_new_tokens : tokens to generate at most; 0 only reads the prompt
    temperature : 0 is greedy
    presence_penalty, frequency_penalty, logit_bias : as in OpenAI's API; see `SamplingOptions`
    logprobs, top_logprobs : return the log probability of each token, and those of up to 20 most likely alternatives,
        before temperature, filters and penalties; the same with and without drafts
    prompt_logprobs : return the log probabilities of the prompt's own tokens too, with as many alternatives: in
        `reply.prompt_logprobs`, one entry for every token after the first. The whole prompt is computed, without its
        cached beginning
    stop : strings that end the text; they are not part of it
    ignore_eos : never choose a token that ends the reply: it has `max_new_tokens` tokens, as to measure a speed.
        An error with `response_format`, or a `tool_choice` that restricts the reply
    drafter : a name of `ondevice.generate.drafters.registry`, `none`, a `Drafter` object of the application, which
        serves one generation at a time, or a draft model: the path of a bundle with the same vocabulary. `auto+` before
        the path combines it with all drafters of the bundle. A draft model is opened when it is first used. None takes
        the drafter given to `load`
    draft_sampling : how a draft model draws above temperature 0. `coupled` uses the target's noise, so a seed gives the
        same text as without drafts. `ratio` draws from the draft model's own distribution and verifies by the ratio
        rule: the text has the same distribution, but a seed gives another text, which depends on the draft lengths
    num_assistant_tokens : draft length of the `constant` schedule, length that `heuristic` begins with in a model's
        first generation, maximum of `auto`. None takes the number that came with the bundle's MTP drafter, 4 without
        one and for a draft model, and for `auto` 16
    num_assistant_tokens_schedule : `auto` drafts as many tokens as pay on this machine, and none if none do
    logits_processors : functions that change a row of logits before a token is chosen, for example to exclude tokens;
        for a drafted row they get the context that includes the draft
    tools, thinking, template_options : for a prompt of messages; see `ChatOptions`
    continue_final : continue the text of the last message, an assistant's, instead of answering it. The reply is the
        rest of its text, without thoughts before it; `response_format` holds for the whole message
    response_format : restricts the answer to a form: `{"type": "json_object"}`,
        `{"type": "json_schema", "json_schema": {"schema": ..., "strict": ...}}`, `{"type": "regex", "regex": ...}`,
        `{"type": "choice", "choice": ["yes", "no"]}` or `{"type": "lark", "lark": ...}`, a grammar in llguidance's
        syntax. A schema with a keyword that cannot be enforced is an error, unless `strict` is False. Needs the extra
        `[grammar]`
    tool_choice : `auto` allows calls and makes them follow the tools' declarations; `required` demands at least one
        call, `{"type": "function", "function": {"name": ...}}` a call of that function, `none` forbids calls. None does
        not restrict the model; beside a `response_format`, it may call as with `auto`
    parallel_tool_calls : whether a reply may have several calls; False ends it after the first one
    image_tokens : the most tokens that each picture of the prompt may take: 70, 140, 280, 560 or 1120. More show more
        detail and take longer. None takes the model's own number, mostly 280
    on_prefill : called after every chunk of the prompt with the number of tokens done and in total; called again later
        if a draft model has to read a long text
    copies : number of copies of the prompt's keys and values to keep when it has been read, for as many other
        generations of the same prompt (several replies to one prompt), which then do not read it again; 16 at most
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
    prompt_logprobs: bool = False
    stop: str | Sequence[str] | None = None
    ignore_eos: bool = False
    drafter: str | PathLike[str] | Drafter | None = None
    draft_sampling: DraftSampling = "coupled"
    num_assistant_tokens: int | None = None
    num_assistant_tokens_schedule: ScheduleName = "auto"
    logits_processors: Sequence[LogitsProcessor] | None = ()
    tools: Sequence[Tool] | None = None
    thinking: bool | str | None = None
    template_options: Mapping[str, Any] | None = None
    continue_final: bool = False
    response_format: Mapping[str, Any] | None = None
    tool_choice: str | Mapping[str, Any] | None = None
    parallel_tool_calls: bool = True
    image_tokens: int | None = None
    on_prefill: Progress | None = silent
    copies: int = 0

    chat: ChatOptions = field(init=False, repr=False)
    """The options of the chat template."""
    answer: Grammar | None = field(init=False, repr=False)
    """The grammar of `response_format`; None if any text is allowed."""
    choice: ToolChoice = field(init=False, repr=False)
    """`tool_choice`, checked against `tools`."""

    @classmethod
    def of(
        cls, keywords: Mapping[str, Any], names: Iterable[str] = GenerationKeywords.__annotations__
    ) -> GenerationOptions:
        """Make options from keywords, of which there may be those in `names`.

        Raises:
            UsageError: a keyword that does not exist; the message lists those that do.
        """
        for keyword in keywords:
            if keyword not in names:
                raise UsageError(
                    f"unknown option {keyword!r}{near(str(keyword), names) or '.'} There are {', '.join(names)}"
                )
        return cls(**keywords)

    def __post_init__(self) -> None:
        self._set(
            max_new_tokens=check_whole("max_new_tokens", self.max_new_tokens, 0),
            copies=check_whole("copies", self.copies, 0, MAX_SESSIONS),
            top_logprobs=check_whole("top_logprobs", self.top_logprobs, 0, MAX_TOP_LOGPROBS),
        )
        tokens = self.image_tokens
        if tokens is not None and not (isinstance(tokens, Integral) and tokens in BUDGETS):
            raise UsageError(f"image_tokens must be one of {', '.join(map(str, BUDGETS))}, not {shown(tokens)}")
        if self.num_assistant_tokens is not None:
            self._set(num_assistant_tokens=check_whole("num_assistant_tokens", self.num_assistant_tokens))
        for name in ("logprobs", "prompt_logprobs", "ignore_eos", "parallel_tool_calls"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"{name} must be True or False, not {shown(getattr(self, name))}")
        if self.stop is not None and not isinstance(self.stop, str):
            try:
                self._set(stop=tuple(self.stop))
            except TypeError as error:  # also of an array without a dimension, which is an Iterable
                raise UsageError(f"stop must be a string or a list of strings, not {shown(self.stop)}") from error
        if isinstance(self.drafter, PathLike):
            self._set(drafter=fspath(self.drafter))
        named = isinstance(self.drafter, str) or self.drafter is None
        if not named and not _has_attributes(self.drafter, "name", "begin", "forget", "forecast", "draft", "observe"):
            _check_choice("drafter", self.drafter, registry.names())
        _check_choice("draft_sampling", self.draft_sampling, get_args(DraftSampling))
        processors = self.logits_processors
        if processors is not None and not (isinstance(processors, Sequence) and all(map(callable, processors))):
            raise UsageError(f"logits_processors must be a list of functions, not {shown(processors)}")
        if self.on_prefill is not None and not callable(self.on_prefill):
            raise UsageError(f"on_prefill must be a function, not {shown(self.on_prefill)}")
        _check_choice("num_assistant_tokens_schedule", self.num_assistant_tokens_schedule, get_args(ScheduleName))
        if self.drafter == registry.NONE and self.num_assistant_tokens is not None:
            raise UsageError("num_assistant_tokens has no effect with the drafter none: leave one of them out")
        chat = ChatOptions(self.tools, self.thinking, self.template_options, self.continue_final)
        answer = answer_grammar(self.response_format)
        self._set(chat=chat, answer=answer, choice=ToolChoice.of(self.tool_choice, self.tools))

    def _set(self, **checked: object) -> None:
        """Set fields of this frozen object, which only `__post_init__` does."""
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def wanted_logprobs(self) -> Logprobs | None:
        """The requested log probabilities; None if there was no request."""
        return Logprobs(self.top_logprobs) if self.logprobs or self.top_logprobs else None

    @property
    def wanted_prompt_logprobs(self) -> Logprobs | None:
        """The requested log probabilities of the prompt; None if there was no request."""
        return Logprobs(self.top_logprobs) if self.prompt_logprobs else None

    def sampling(self, defaults: GenerationDefaults) -> SamplingOptions:
        """Sampling options: these if given, else the bundle's. At temperature 0 the bundle's filters are left out."""
        temperature = defaults.temperature if self.temperature is None else self.temperature
        penalty = defaults.repetition_penalty if self.repetition_penalty is None else self.repetition_penalty
        sampled = not (isinstance(temperature, Real) and temperature == 0)  # SamplingOptions refuses other types
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


def check_whole(name: str, value: object, least: int = 1, most: int | None = None) -> int:
    """An option as an int, also of numpy's types. Raises UsageError unless it is a whole number from `least` to `most`;
    None sets no upper limit.
    """
    if isinstance(value, Integral) and not isinstance(value, bool):
        number = int(value)
        if number >= least and (most is None or number <= most):
            return number
    limits = f"of at least {least}" if most is None else f"from {least} to {most}"
    raise UsageError(f"{name} must be a whole number {limits}, not {shown(value)}")


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise UsageError(f"{name} must be one of {', '.join(choices)}, not {shown(value)}")


def _has_attributes(value: object, *names: str) -> bool:
    return all(hasattr(value, name) for name in names)


def _token_ids(config: Mapping[str, Any], name: str, vocab_size: int) -> tuple[int, ...]:
    """A field that holds one token id, a list of them, or nothing."""
    value = config.get(name)
    found = [] if value is None else value if isinstance(value, list) else [value]
    for token in found:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
            raise UsageError(f"{name} must hold token ids from 0 to {vocab_size - 1}, not {shown(token)}")
    return tuple(found)
