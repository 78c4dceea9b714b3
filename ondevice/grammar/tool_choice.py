"""`tool_choice`: whether a reply calls functions, and which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ondevice.errors import UsageError

WORDS = ("auto", "none", "required")


@dataclass(frozen=True)
class ToolChoice:
    """
    kind : free leaves the model alone, none forbids calls, auto allows well-formed ones, required wants one or more,
        one wants a single call
    tools : declarations of those that may be called
    """

    kind: Literal["free", "none", "auto", "required", "one"]
    tools: Sequence[Mapping[str, Any]] = ()

    @classmethod
    def of(cls, value: object, tools: Sequence[Mapping[str, Any]] | None) -> ToolChoice:
        """What `GenerationOptions.tool_choice` describes.

        Args:
            tools: as the caller declared them; checked where the prompt is.

        Raises:
            UsageError: something else, or a function that was not declared.
        """
        if value is None:
            return cls("free")
        if isinstance(value, str) and value in WORDS:
            if value != "none" and not tools:
                raise UsageError(f"tool_choice={value!r} needs tools, which are not declared")
            return cls(value, tools or ())  # type: ignore[arg-type]  # mypy does not narrow by a tuple
        function = value.get("function") if isinstance(value, Mapping) and value.get("type") == "function" else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str):
            raise UsageError(
                'tool_choice must be auto, none, required or {"type": "function", "function": {"name": ...}}, '
                f"not {value!r:.99}"
            )
        chosen = [tool for tool in tools or () if _name(tool) == name]
        if not chosen:
            known = ", ".join(filter(None, map(_name, tools or ()))) or "none"
            raise UsageError(f"tool_choice names the function {name!r:.99}, and these are declared: {known}")
        return cls("one", chosen[:1])


def _name(tool: object) -> str | None:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None
