"""What a caller may ask of one generation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from ondevice.decoding.sampling import LogitsProcessor, SamplingOptions
from ondevice.errors import BundleCorruptError, UsageError
from ondevice.progress import Progress, silent

DrafterName = Literal["auto", "mtp", "ngram", "none"]
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
    def read(cls, path: Path | None) -> GenerationDefaults:
        """Raises BundleCorruptError where the file is no JSON object."""
        if path is None:
            return cls()
        try:
            config = dict(json.loads(path.read_text("utf-8")))
        except (ValueError, TypeError) as error:
            raise BundleCorruptError(f"{path} is not a JSON object ({error}): export the bundle again") from error
        eos = config.get("eos_token_id")
        sampled: dict[str, Any] = {}
        if config.get("do_sample"):
            sampled = {name: config[name] for name in ("top_k", "top_p", "min_p") if config.get(name) is not None}
            sampled["temperature"] = config.get("temperature", 1.0)
        return cls(
            **sampled,
            repetition_penalty=config.get("repetition_penalty") or 1.0,
            eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
            suppress_tokens=tuple(config.get("suppress_tokens") or ()),
        )


@dataclass(frozen=True)
class GenerationOptions:
    """The keywords of `Model.stream` and `Model.generate`. None means: as the bundle's generation_config.json says.

    temperature : 0 is greedy
    stop : strings that end the text; they are not part of it
    drafter : `auto` takes the bundle's MTP drafter with n-grams as its fallback, or n-grams alone
    num_assistant_tokens : draft length of the `constant` schedule, first length of `heuristic`, longest of `auto`; None
        takes what the drafter ships with, and for `auto` no limit but its own
    num_assistant_tokens_schedule : `auto` drafts as many tokens as pay on this machine, none where none do
    logits_processors : change a row of logits before a token is chosen, for a grammar say; they see the draft path
    on_prefill : called after every chunk of a prompt with the tokens done and their number
    """

    max_new_tokens: int = 256
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | tuple[str, ...] | None = None
    drafter: DrafterName = "auto"
    num_assistant_tokens: int | None = None
    num_assistant_tokens_schedule: ScheduleName = "auto"
    logits_processors: Sequence[LogitsProcessor] = ()
    on_prefill: Progress = silent

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
        if self.num_assistant_tokens is not None:
            _whole("num_assistant_tokens", self.num_assistant_tokens)
        _choice("drafter", self.drafter, get_args(DrafterName))
        _choice("num_assistant_tokens_schedule", self.num_assistant_tokens_schedule, get_args(ScheduleName))
        if self.drafter == "none" and self.num_assistant_tokens is not None:
            raise UsageError("num_assistant_tokens says nothing where the drafter is none: leave one of them out")

    def sampling(self, defaults: GenerationDefaults) -> SamplingOptions:
        """These options where given, else the bundle's. A temperature of 0 leaves the bundle's filters out."""
        temperature = defaults.temperature if self.temperature is None else self.temperature
        penalty = defaults.repetition_penalty if self.repetition_penalty is None else self.repetition_penalty
        sampled = temperature != 0
        return SamplingOptions(
            temperature=temperature,
            top_k=defaults.top_k if self.top_k is None and sampled else self.top_k,
            top_p=defaults.top_p if self.top_p is None and sampled else self.top_p,
            min_p=defaults.min_p if self.min_p is None and sampled else self.min_p,
            repetition_penalty=penalty,
            seed=self.seed,
        )


def _whole(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(f"{name} must be a whole number from 1 on, not {value!r}")


def _choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UsageError(f"{name} must be one of {', '.join(choices)}, not {value!r}")
