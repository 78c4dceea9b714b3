"""The spelling of tool calls as in Python, which LFM2 writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

from ondevice.grammar.call_rules import JSON_OBJECT, WORD, Brackets, CallRules, json_string, string_limits
from ondevice.grammar.response_format import quoted

_PLAIN = r"[^'\\]"
_SINGLE = r"""/'(?s:[^'\\]|\\['"\\nrt]|'\p{L})*'/"""
"""Strings between single quotes. Models know apostrophes without a backslash: no string ends before a letter."""


class PythonCalls(CallRules):
    """A call is `NAME(key=value, ...)`, with keys in the order of the schema. LFM2.5's template writes earlier calls
    with strings between single quotes, lists as in Python and mappings as in JSON. Here the words of both languages and
    quotes of both kinds are allowed everywhere.
    """

    arguments = Brackets("(", ")", lambda name: quoted(f"{name}="), f'{WORD} "="')
    objects = JSON_OBJECT
    comma = ", "
    words: ClassVar[Mapping[str, str]] = {
        "true": '("True" | "true")',
        "false": '("False" | "false")',
        "null": '("None" | "null")',
    }

    def called(self, name: str, arguments: str) -> str:
        return f"{quoted(name)} {arguments}"

    def string(self, text: str) -> str:
        written = [json.dumps(text, ensure_ascii=False)]
        if "'" not in text and "\\" not in text:
            written.append(f"'{text}'")
        return f"({' | '.join(map(quoted, written))})"

    def strings(self, schema: Mapping[str, Any]) -> str:
        single = f'"\'" {self.texts(schema, _PLAIN)} "\'"' if string_limits(schema) else _SINGLE
        return f"({self.rule(single, 'T')} | {self.rule(json_string(schema))})"
