"""Schemas of a function's parameters: which types a value may have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote

Schema = Any
"""A JSON schema: a mapping, or True."""

MOST = 100
"""Alternatives of a value; one of more may be anything."""


def alternatives(schema: Mapping[str, Any]) -> list[Schema]:
    """The alternative schemas of a value, as far as they are one list."""
    for keyword in ("anyOf", "oneOf", "allOf"):
        found = schema.get(keyword)
        if isinstance(found, list) and found and (keyword != "allOf" or len(found) == 1):
            return found
    return []


def referred(root: Schema, reference: object) -> Schema:
    """The schema that a `$ref` names.

    Raises:
        LookupError, TypeError, ValueError: there is none.
    """
    schema = root
    for part in unquote(str(reference)).removeprefix("#").split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        schema = schema[int(name) if isinstance(schema, list) else name]
    return schema


def options(schema: Mapping[str, Any]) -> list[Schema]:
    """The alternative schemas of a value, each with the type that stands beside them; none for that of an object."""
    if "properties" in schema:
        return []
    kind = {"type": schema["type"]} if "type" in schema else {}
    return [{**kind, **each} if isinstance(each, Mapping) else each for each in alternatives(schema)]


def plain_schemas(schema: Schema, root: Schema) -> list[Mapping[str, Any]]:
    """Schemas of which a value must follow one, without references and alternatives: {} is that of any value.

    Args:
        root: the schema of all parameters, in which references are.
    """
    found: list[Mapping[str, Any]] = []
    left, known = [schema], set[str]()
    while left:
        each = left.pop()
        if not isinstance(each, Mapping) or len(left) + len(found) >= MOST:
            return [{}]
        if "$ref" in each:
            if (reference := str(each["$ref"])) in known:
                continue
            known.add(reference)
            try:
                left.append(referred(root, reference))
            except (LookupError, TypeError, ValueError):
                return [{}]
        elif "enum" not in each and "const" not in each and (several := options(each)):
            left += several
        else:
            found.append(each)
        if each.get("nullable"):
            found.append({"type": "null"})
    return found


def kinds(schema: Mapping[str, Any]) -> Sequence[str]:
    """Names of the types that a schema without references and alternatives allows; none for any type."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and values:
        return sorted({kind_of(value) for value in values})
    kind = schema.get("type", "object" if "properties" in schema else None)
    named = kind if isinstance(kind, list) else [kind]
    return [str(each) for each in named] if all(each in KINDS for each in named) else []


def kind_of(value: object) -> str:
    """The name of a value's type."""
    if value is None:
        return "null"
    return next((name for kind, name in NAMES if isinstance(value, kind)), "object")


NAMES = ((bool, "boolean"), (str, "string"), (int, "integer"), (float, "number"), (list, "array"))
KINDS = ("null", "object", *(name for _, name in NAMES))
