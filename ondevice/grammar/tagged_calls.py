"""The spelling of tool calls between tags, which Qwen3-Coder and Qwen3.5 write, and Seed-OSS in fewer lines."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from ondevice.grammar.call_rules import JSON_OBJECT, WORD, Brackets, CallRules, json_string, texts
from ondevice.grammar.response_format import pattern, quoted
from ondevice.text.declared import Schema, kinds, options
from ondevice.text.tagged_calls import FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END

_OTHER = "|".join(
    f"{PARAMETER_END[1:length]}(?:[^<{PARAMETER_END[length]}][^<]*)?" for length in range(1, len(PARAMETER_END))
)
_UNENDED = pattern(f"[^<]*(?:<(?:{_OTHER}))*")
"""Texts without the tag after a value: after each `<` something else follows. As a complement (`~`) it takes too many
steps beside a `maxLength`.
"""

_WORDS = {"true": ("True", "true"), "false": ("False", "false"), "null": ("None", "null")}
"""Templates write earlier calls with Python's words; models know those of JSON too."""
_SINGLE: Mapping[str, Sequence[Any]] = {"boolean": (True, False), "null": (None,)}
"""Values of the types that have few."""


class TaggedCalls(CallRules):
    """A call is `<function=NAME>`, for each argument `<parameter=KEY>`, its value and `</parameter>` in lines of their
    own, and `</function>`, with keys in the order of the schema. A string is written as it is, without `</parameter>`;
    another value as in JSON.
    """

    arguments = Brackets("", "", lambda name: quoted(f"{PARAMETER}{name}>\n"), f'"{PARAMETER}" {WORD} ">\\n"')
    objects = JSON_OBJECT
    comma = ", "
    words: ClassVar[Mapping[str, str]] = {word: quoted(word) for word in _WORDS}
    end: ClassVar[str] = f"\n{PARAMETER_END}\n"
    """Text after a value."""
    plain: ClassVar[str] = _UNENDED
    """Pattern of the texts that a string may be."""

    def called(self, name: str, arguments: str) -> str:
        opening, closing = quoted(f"{FUNCTION}{name}>\n"), quoted(f"{FUNCTION_END}\n")
        return f"{opening} {arguments} {closing}"

    def string(self, text: str) -> str:
        return quoted(json.dumps(text, ensure_ascii=False))

    def strings(self, schema: Mapping[str, Any]) -> str:
        return self.rule(json_string(schema))

    def _object(self, schema: Schema, brackets: Brackets) -> str:
        if brackets is self.objects:
            return super()._object(schema, brackets)
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        if isinstance(properties, Mapping) and properties:
            required = schema.get("required")
            needed = required if isinstance(required, list) else ()
            return " ".join(
                f"({brackets.key(name)} {self._argument(each)}){'' if name in needed else '?'}"
                for name, each in properties.items()
            )
        others = schema.get("additionalProperties", True) if isinstance(schema, Mapping) else True
        if properties is not None or others is False:
            return '""'
        return f"({brackets.any_key} {self._argument(others)})*"

    def _argument(self, schema: Schema) -> str:
        """A rule for a value of this schema and the tag after it."""
        if isinstance(schema, Mapping) and "$ref" in schema:
            return self._referred(schema["$ref"], self._argument)
        return self.rule(" | ".join(self._forms(schema if isinstance(schema, Mapping) else {})))

    def _forms(self, schema: Mapping[str, Any]) -> Iterator[str]:
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        words: list[Any] = [None] if schema.get("nullable") else []
        if isinstance(values, list) and values:
            words += [each for each in values if not isinstance(each, list | Mapping)]
            others = (self._literal(each) for each in values if isinstance(each, list | Mapping))
            yield from (f"{each} {quoted(self.end)}" for each in others)
        elif several := options(schema):
            yield from map(self._argument, several)
        else:
            for kind in kinds(schema) or ("",):
                words += _SINGLE.get(kind, ())
                if kind in ("", "string"):  # one terminal with the tag: the lexer reads the longest text
                    text = texts(schema if kind else {})
                    yield self.rule(f"({text} & {self.plain}) {quoted(self.end)}", "T")
                elif kind not in _SINGLE:
                    yield f"{self._typed(kind, schema)} {quoted(self.end)}"
        if words:
            yield self.rule(" | ".join(quoted(each + self.end) for word in words for each in _written(word)), "T")


class InlineTaggedCalls(TaggedCalls):
    """The same with a value between its tags in one line. A string does not begin with a line break, which would be
    read as one of the format.
    """

    arguments = Brackets("", "", lambda name: quoted(f"{PARAMETER}{name}>"), f'"{PARAMETER}" {WORD} ">"')
    end = f"{PARAMETER_END}\n"
    plain = rf"{_UNENDED} & /(?s:[^\n].*)?/"


def _written(value: Any) -> Sequence[str]:
    """How a single value is written."""
    if isinstance(value, str):
        return (value,)
    text = json.dumps(value)
    return _WORDS.get(text, (text,))
