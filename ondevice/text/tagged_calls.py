"""Tool calls between tags, as Qwen3-Coder, Qwen3.5 and Seed-OSS write them.

A value is the text between two tags, of Qwen's in lines of its own. Nothing in it tells the string "2" from the number
2: the declaration does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from ondevice.text.call_values import WORDS, json_value, python_value
from ondevice.text.declared import Schema, kind_of, kinds, plain_schemas

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"

_OPENED = re.compile(rf"\s*+{FUNCTION}\s*+(?P<name>[\w.-]++)\s*+>\s*+")
_KEY = re.compile(rf"{PARAMETER}(?P<key>[^>\n]++)>(?P<line>\n?)")
_VALUE_END = re.compile(
    rf"(?P<line>\n?){PARAMETER_END}\s*+(?={PARAMETER}[^>\n]++>|{FUNCTION_END}\s*+(?:{FUNCTION}|\Z))"
)  # a value may spell the tags itself: only one where the format goes on ends it
_CLOSED = re.compile(rf"{FUNCTION_END}\s*+")

_NUMBERS = {"integer", "number"}


def tagged_calls(text: str, tools: Iterable[Mapping[str, Any]] = ()) -> list[Any]:
    """The calls of a text such as `<function=get_weather>\\n<parameter=city>\\nBern\\n</parameter>\\n</function>`, each
    as `{"name": ..., "arguments": {...}}`. Any other text is JSON, of one call: older models write it.

    Args:
        tools: declarations of the functions. A value is read as it is declared, and stays a text where it cannot be.
            One without a declaration is what JSON makes of it, or else a text.

    Raises:
        ValueError: it is malformed.
    """
    if not text.lstrip().startswith(FUNCTION):
        return [json_value(text)]
    declared = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
    made, at = [], 0
    while at < len(text):
        opened = _OPENED.match(text, at)
        if opened is None:
            raise ValueError("text behind the calls")
        arguments, at = {}, opened.end()
        root = declared.get(opened["name"])
        while (found := _KEY.match(text, at)) is not None:
            end = _VALUE_END.search(text, found.end())
            if end is None:
                raise ValueError("a value without an end")
            key = found["key"].strip()
            value = text[found.end() : end.start()]
            if value and found["line"] != end["line"]:  # at one end alone, a line break belongs to the value
                value = f"{found['line']}{value}{end['line']}"
            arguments[key] = _value(value, _schema(root, key), root)
            at = end.end()
        closed = _CLOSED.match(text, at)
        if closed is None:
            raise ValueError("a call without an end")
        made.append({"name": opened["name"], "arguments": arguments})
        at = closed.end()
    return made


def _schema(root: Schema, key: str) -> Schema:
    """The schema of an argument; True where none is declared."""
    found = []
    for each in plain_schemas(root, root):
        properties = each.get("properties")
        if isinstance(properties, Mapping) and key in properties:
            found.append(properties[key])
        elif isinstance(others := each.get("additionalProperties"), Mapping):
            found.append(others)
    return {"anyOf": found} if found else True


def _value(text: str, schema: Schema, root: Schema) -> Any:
    """The value that is written as a text, of a type that the schema allows."""
    allowed = [kinds(each) for each in plain_schemas(schema, root)]
    known = {kind for each in allowed for kind in each} if all(allowed) else set()
    if known == {"string"}:
        return text
    word = text.strip()
    try:
        if word in WORDS:
            value = WORDS[word]
        elif known and "string" not in known:
            value = python_value(word)
        else:
            value = json_value(word)
    except ValueError:
        return text
    kind = kind_of(value)
    if kind == "string" or not known:
        return text if kind == "string" else value
    return value if kind in known or (kind in _NUMBERS and known & _NUMBERS) else text
