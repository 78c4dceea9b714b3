"""What a chat template is told beside the messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ondevice.errors import UsageError

Tool = Mapping[str, Any]
"""A function that the model may call, as OpenAI declares it."""

OWN = ("messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "pad_token")
"""Variables that a template gets from elsewhere."""

THINKING = "enable_thinking"


@dataclass(frozen=True)
class ChatOptions:
    """
    tools : functions that the model may call: `{"type": "function", "function": {"name", "description", "parameters"}}`
    thinking : whether the model thinks before it answers, `enable_thinking` in templates; None leaves it to that
    template_options : further variables of the template, such as `preserve_thinking`

    Raises:
        UsageError: a value that makes no sense.
    """

    tools: Sequence[Tool] | None = None
    thinking: bool | None = None
    template_options: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.thinking is not None and not isinstance(self.thinking, bool):
            raise UsageError(f"thinking must be True, False or None, not {self.thinking!r:.99}")
        options = self.template_options
        if options is None:
            return
        if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
            raise UsageError(f"template_options must be a mapping of names to values, not {options!r:.99}")
        for name in options:
            if name in OWN or (name == THINKING and self.thinking is not None):
                raise UsageError(f"template_options cannot set {name}: it has an option of its own, or is not yours")

    def __bool__(self) -> bool:
        """Whether anything was chosen."""
        return bool(self.tools or self.template_options) or self.thinking is not None

    @property
    def thinks(self) -> bool:
        """Whether the model was told to think."""
        return bool(self.variables.get(THINKING))

    @property
    def variables(self) -> dict[str, Any]:
        """Of the template, but for `tools`."""
        made = dict(self.template_options or {})
        return made if self.thinking is None else {**made, THINKING: self.thinking}
