"""Extension of griffe, which reads the docstrings for docs/api.md: lists of fields become Markdown lists.

The docstring of a class lists fields as `name, other : what they are`, with an indent for the lines that follow.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Class, Extension, Function

FIELD = re.compile(r"^(\w+(?:, \w+)*) : (.*(?:\n    .*)*)", re.MULTILINE)


def with_lists(text: str) -> str:
    """A docstring with its fields as a Markdown list."""

    def item(found: re.Match[str]) -> str:
        names = ", ".join(f"`{name}`" for name in found[1].split(", "))
        return f"- {names}: {found[2]}"

    return FIELD.sub(item, text)


class FieldLists(Extension):
    """Rewrites the docstrings of all classes and functions."""

    def on_class(self, *, cls: Class, **_: Any) -> None:
        self._rewrite(cls)

    def on_function(self, *, func: Function, **_: Any) -> None:
        self._rewrite(func)

    def _rewrite(self, found: Class | Function) -> None:
        if found.docstring is not None:
            found.docstring.value = with_lists(found.docstring.value)
