"""`response_format` and `tool_choice`: the form of a reply as callers describe it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ondevice.errors import UsageError, shown
from ondevice.grammar.complaints import is_readable
from ondevice.grammar.limits import DESCRIBING, check_lark, check_length, check_schema, check_words, intersects

Grammar = dict[str, Any]
"""One entry of llguidance's list of grammars."""

SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Fixed white space, as in Python's `json.dumps`. Small models that may choose white space write it without end, and
fixed text can be drafted. A schema may choose otherwise in `x-guidance`."""

VALUES = ("const", "enum", "default", "examples")
MAPS = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords of a schema that hold values, and that hold schemas by names."""

OPENING = {"additionalProperties", "patternProperties", "unevaluatedProperties", "minProperties"}
"""Keywords that speak of properties without a name."""

COUNTING = ("required", "minProperties")
"""Keywords that ask for properties, which another schema may describe."""


def answer_grammar(value: object) -> Grammar | None:
    """The grammar of the answer that `GenerationOptions.response_format` describes; None if any text is allowed.

    Raises:
        UsageError: an unknown form.
    """
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, Mapping) else None
    if not isinstance(value, Mapping) or not isinstance(kind, str) or kind not in _GRAMMARS:
        raise UsageError(
            f'response_format must be {{"type": ...}} with a type of {", ".join(_GRAMMARS)}, not {shown(value)}'
        )
    needed = () if kind in ("text", "json_object") else (kind,)
    _check_fields(value, ("type", *needed), needed, f"response_format of the type {kind}")
    return _GRAMMARS[kind](value)


def _schema(value: Mapping[str, Any]) -> Grammar:
    described = value["json_schema"]
    if not isinstance(described, Mapping):
        raise UsageError(f'json_schema must be {{"name": ..., "schema": ...}}, not {shown(described)}')
    _check_fields(described, ("name", "description", "schema", "strict"), ("schema",), "json_schema")
    schema, strict = described["schema"], described.get("strict")
    if not isinstance(schema, Mapping) or not isinstance(strict, bool | None):
        wrong, what = ("schema", "an object") if isinstance(strict, bool | None) else ("strict", "true or false")
        raise UsageError(f"json_schema's {wrong} must be {what}, not {shown(described[wrong])}")
    check_schema(schema)
    try:
        plain = json.loads(json.dumps(schema))
        settings = plain.get("x-guidance", SPACING)
        return {"json_schema": lenient(plain, settings) if strict is False else {**plain, "x-guidance": settings}}
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"json_schema's schema is not JSON: {error}") from error


def _choice(value: Mapping[str, Any]) -> Grammar:
    choices = value["choice"]
    if isinstance(choices, str) or not isinstance(choices, Sequence) or not choices:
        raise UsageError(f"choice must be a list of strings, not {shown(choices)}")
    for each in choices:
        if not isinstance(each, str) or not each:
            raise UsageError(f"choice must be a list of strings that are not empty, not one with {shown(each)}")
    check_words(choices)
    # One terminal: alternatives of a rule would cost a time in the square of their number, and 2,000 are possible.
    return {"lark_grammar": "start: WORD\nWORD: " + " | ".join(map(quoted, choices))}


def _regex(value: Mapping[str, Any]) -> Grammar:
    text = _text(value, "regex")
    check_length(text, "a regex")
    return {"lark_grammar": f"start: {pattern(text)}"}


def _lark(value: Mapping[str, Any]) -> Grammar:
    text = _text(value, "lark")
    check_lark(text)
    return {"lark_grammar": text}


_GRAMMARS: dict[str, Callable[[Mapping[str, Any]], Grammar | None]] = {
    "text": lambda value: None,
    "json_object": lambda value: {"json_schema": {"type": "object", "x-guidance": SPACING}},
    "json_schema": _schema,
    "regex": _regex,
    "choice": _choice,
    "lark": _lark,
}
"""Kind of answer -> its grammar. Each kind but the first two needs a field of its own name."""


def lenient(schema: Mapping[str, Any], settings: Any) -> dict[str, Any]:
    """A JSON schema of which only what can be enforced counts. Objects have no properties that it does not name, unless
    it says otherwise, as at llama.cpp: small models write further ones without end.

    Args:
        settings: its `x-guidance`.
    """
    held = _held(schema, closes=not intersects(schema, (*DESCRIBING, *COUNTING)))
    return {**held, "x-guidance": {"lenient": True, **settings} if isinstance(settings, Mapping) else settings}


def _held(schema: Any, *, closes: bool) -> Any:
    """A schema without the patterns that cannot be enforced, which llguidance refuses in any case.

    Args:
        closes: whether objects get no further properties: not where one may have those of several schemas.
    """
    if isinstance(schema, list | tuple):
        return [_held(each, closes=closes) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    held: dict[str, Any] = {}
    for name, value in schema.items():
        if name in VALUES:
            held[name] = value
        elif name in MAPS and isinstance(value, Mapping):
            held[name] = {key: _held(each, closes=closes) for key, each in value.items()}
        elif name != "pattern" or not isinstance(value, str) or is_readable(value):
            held[name] = _held(value, closes=closes)
    named, required = held.get("properties"), held.get("required", [])
    if closes and isinstance(named, Mapping) and not OPENING & held.keys() and _all_in(named, required):
        held["additionalProperties"] = False
    return held


def _all_in(named: Mapping[str, Any], required: Any) -> bool:
    return isinstance(required, list | tuple) and all(isinstance(name, str) and name in named for name in required)


def quoted(text: str) -> str:
    """A text as a literal of Lark."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def pattern(text: str) -> str:
    """A regular expression as Lark writes one."""
    return "/" + re.sub(r"(?s)\\.|/|\n", lambda found: {"/": r"\/", "\n": r"\n"}.get(found[0], found[0]), text) + "/"


def _text(value: Mapping[str, Any], name: str) -> str:
    text = value[name]
    if not isinstance(text, str) or not text:
        raise UsageError(f"{name} must be a string that is not empty, not {shown(text)}")
    return text


def _check_fields(value: Mapping[str, Any], known: Sequence[str], needed: Sequence[str], place: str) -> None:
    for name in needed:
        if name not in value:
            raise UsageError(f"{place} needs the field {name}")
    for name in value:
        if name not in known:
            raise UsageError(f"{place} has the fields {', '.join(known)}, and not {shown(name)}")


WORDS = ("auto", "none", "required")


@dataclass(frozen=True)
class ToolChoice:
    """Whether a reply calls functions, and which.

    Attributes:
        kind: "free": no constraint, but beside an answer of a form as "auto"; "none": no calls; "auto": well-formed
            calls or none; "required": one or more calls; "one": exactly one call.
        tools: declarations of the functions that may be called.
    """

    kind: Literal["free", "none", "auto", "required", "one"]
    tools: Sequence[Mapping[str, Any]] = ()

    @property
    def allows_calls(self) -> bool:
        """Whether the reply may be calls."""
        return bool(self.tools) and self.kind != "none"

    @classmethod
    def of(cls, value: object, tools: Sequence[Mapping[str, Any]] | None) -> ToolChoice:
        """The choice that `GenerationOptions.tool_choice` describes.

        Args:
            tools: declarations as the caller passed them; they are checked with the prompt.

        Raises:
            UsageError: an unknown form, or a function that was not declared.
        """
        if value is None:
            return cls("free", tools or ())
        if isinstance(value, str) and value in WORDS:
            if value != "none" and not tools:
                raise UsageError(f"tool_choice={value!r} needs tools, which are not declared")
            return cls(value, tools or ())  # type: ignore[arg-type]  # mypy does not narrow by a tuple
        function = value.get("function") if isinstance(value, Mapping) and value.get("type") == "function" else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str):
            raise UsageError(
                'tool_choice must be auto, none, required or {"type": "function", "function": {"name": ...}}, '
                f"not {shown(value)}"
            )
        chosen = [tool for tool in tools or () if _name(tool) == name]
        if not chosen:
            known = ", ".join(filter(None, map(_name, tools or ()))) or "none"
            raise UsageError(f"tool_choice names the function {shown(name)}, and these are declared: {known}")
        return cls("one", chosen[:1])


def _name(tool: object) -> str | None:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None
