"""A function that the model wants called."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass, field
from typing import Any


def _new_id() -> str:
    return f"call_{secrets.token_hex(12)}"


@dataclass(frozen=True)
class ToolCall:
    """
    name : of the function, as it was declared
    arguments : by name
    id : what the message with its result gives as `tool_call_id`; every call has another
    """

    name: str
    arguments: dict[str, Any]
    id: str = field(default_factory=_new_id, compare=False)

    def as_openai(self) -> dict[str, Any]:
        """The entry of `tool_calls` in a message; the arguments are a string of JSON there."""
        function = {"name": self.name, "arguments": json.dumps(self.arguments, ensure_ascii=False)}
        return {"id": self.id, "type": "function", "function": function}
