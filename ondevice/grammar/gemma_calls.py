"""The grammar of tool calls as Gemma 4 writes them, from the schemas of the tools' parameters."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote

from ondevice.errors import GrammarError, shown
from ondevice.grammar.complaints import is_readable
from ondevice.grammar.response_format import pattern, quoted

CALL = ("<|tool_call>", "<tool_call|>", '<|"|>')
"""Control tokens of a call: before it, after it, and around a string in it."""

Schema = Any
"""A JSON schema: a mapping, or True."""

WORD = "/[A-Za-z_][\\w.-]*/"
"""Pattern of a key that the schema does not name."""

ANY = "(?s:.*)"
"""Pattern of any text."""

PIECES = re.compile(r"(?s)\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.")
"""Pieces of a regular expression: escapes, classes and other characters."""

CLASSES = {r"\d": "[0-9]", r"\w": "[A-Za-z0-9_]"}
"""Classes that are wider in Rust's regular expressions than in those of a schema."""

SCALARS = {"integer", "number"}
SCALAR_KEYWORDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


class CallTokens(NamedTuple):
    """Ids of Gemma's control tokens around a call, and around a string in it."""

    opening: int
    closing: int
    quote: int


class CallRules:
    """Lark rules for tool calls as Gemma 4 writes them: one for each function, from the schema of its parameters.

    A call is `<|tool_call>call:NAME{key:value,...}<tool_call|>`: keys bare and in the order of jinja's `dictsort`, in
    which the template writes earlier calls; strings between `<|"|>`, in which nothing is escaped; other values as in
    JSON.

    Enforced of a schema: types, `properties` and `required`, `enum` and `const`, `items`, `prefixItems` and their
    number, `minLength`, `maxLength` and `pattern`, the limits of numbers, `anyOf`, `oneOf`, a single `allOf`, `$ref`
    within the schema, and `nullable`. An object that names its properties has no others. Other keywords are ignored, as
    are patterns that llguidance does not read: with look-around, references to groups, or anchors inside groups.

    Attributes:
        start: name of the rule for one call.
    """

    def __init__(self, tools: Iterable[Mapping[str, Any]], tokens: CallTokens) -> None:
        """
        Args:
            tools: checked declarations in OpenAI's form.

        Raises:
            GrammarError: a schema with a `$ref` that leads nowhere.
        """
        self._tokens = tokens
        self._rules: dict[str, str] = {}
        self._references: dict[tuple[int, str, Callable[[Schema], str]], str] = {}
        self._root: Schema = True
        calls = [self._call(tool["function"]) for tool in tools]
        self.start = self._rule(" | ".join(calls))

    @property
    def text(self) -> str:
        """All rules as Lark."""
        return "\n".join(f"{name}: {body}" for name, body in self._rules.items())

    def _call(self, function: Mapping[str, Any]) -> str:
        self._root = function.get("parameters") or {"type": "object", "properties": {}}
        opening = quoted(f"call:{function['name']}")
        return f"<[{self._tokens.opening}]> {opening} {self._arguments(self._root)} <[{self._tokens.closing}]>"

    def _arguments(self, schema: Schema) -> str:
        """An expression for an object of this schema, whatever else the schema allows."""
        if isinstance(schema, Mapping) and "properties" not in schema:
            if "$ref" in schema:
                return self._referred(schema["$ref"], self._arguments)
            if several := _several(schema):
                return f"({' | '.join(map(self._arguments, several))})"
        return self._object(schema)

    def _value(self, schema: Schema) -> str:
        """An expression for a value of this schema."""
        if not isinstance(schema, Mapping):
            return self._any()
        if "$ref" in schema:
            return self._referred(schema["$ref"], self._value)
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list) and values:
            options = [self._literal(value) for value in values]
        elif several := _several(schema):
            options = [self._value(each) for each in several]
        else:
            kinds = schema.get("type", "object" if "properties" in schema else None)
            options = [self._typed(kind, schema) for kind in (kinds if isinstance(kinds, list) else [kinds])]
        if schema.get("nullable"):
            options.append('"null"')
        return f"({' | '.join(options)})"

    def _typed(self, kind: object, schema: Mapping[str, Any]) -> str:
        if kind == "object":
            return self._object(schema)
        if kind == "array":
            return self._array(schema)
        if kind == "string":
            return self._string(schema)
        if str(kind) in SCALARS:
            limits = {name: schema[name] for name in SCALAR_KEYWORDS if name in schema}
            return self._rule(f"%json {json.dumps({'type': kind, **limits})}")
        return {"boolean": '("true" | "false")', "null": '"null"'}.get(str(kind)) or self._any()

    def _object(self, schema: Schema) -> str:
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        if not isinstance(properties, Mapping) or not properties:
            others = schema.get("additionalProperties", True) if isinstance(schema, Mapping) else True
            if properties is not None or others is False:
                return '"{" "}"'
            return self._listed("{", f'{WORD} ":" {self._value(others)}', "}")
        required = schema.get("required")
        needed = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
        # From the last property to the first: `later` is the rest after a property, `first` if none came before.
        later = first = ""
        for name, each in sorted(properties.items(), key=lambda item: item[0].lower(), reverse=True):
            field = self._rule(f"{quoted(f'{name}:')} {self._value(each)}")
            begun = f"{field} {later}"
            after = f'"," {field}' if name in needed else f'("," {field})?'
            first = self._rule(begun if name in needed else f"{begun} | {first}" if first else f"({begun})?")
            later = self._rule(f"{after} {later}")
        return f'"{{" {first} "}}"'

    def _array(self, schema: Mapping[str, Any]) -> str:
        first, items = schema.get("prefixItems"), schema.get("items", True)
        least, most = _bounds(schema, "minItems", "maxItems")
        if not isinstance(first, list) or not first[:most]:
            return self._listed("[", self._value(items), "]", least, most)
        fixed = ' "," '.join(map(self._value, first[:most]))
        if items is False or (most is not None and most <= len(first)):
            return f'"[" {fixed} "]"'
        further = f"{max(least - len(first), 0)},{'' if most is None else most - len(first)}"
        return f'"[" {fixed} ("," {self._value(items)}){{{further}}} "]"'

    def _listed(self, opening: str, item: str, closing: str, least: int = 0, most: int | None = None) -> str:
        if most == 0:
            return f'"{opening}" "{closing}"'
        item = self._rule(item)
        more = f'("," {item}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
        items = item if most == 1 else f"{item} {more}"
        return f'"{opening}" {items if least else f"({items})?"} "{closing}"'

    def _string(self, schema: Mapping[str, Any]) -> str:
        least, most = _bounds(schema, "minLength", "maxLength")
        text = f"/(?s:.{{{least},{'' if most is None else most}}})/"
        if isinstance(found := schema.get("pattern"), str) and is_readable(whole := _whole(found)):
            text = f"{text} & {pattern(whole)}"
        return f"<[{self._tokens.quote}]> {self._rule(text, 'T')} <[{self._tokens.quote}]>"

    def _literal(self, value: Any) -> str:
        """An expression for exactly this value."""
        if isinstance(value, str):
            return f"<[{self._tokens.quote}]> {quoted(value)} <[{self._tokens.quote}]>"
        if isinstance(value, Mapping):
            pairs = sorted(value.items(), key=lambda item: item[0].lower())
            fields = ' "," '.join(f"{quoted(f'{name}:')} {self._literal(item)}" for name, item in pairs)
            return f'"{{" {fields} "}}"'
        if isinstance(value, list):
            return '"[" ' + ' "," '.join(map(self._literal, value)) + ' "]"'
        return quoted(json.dumps(value))

    def _any(self) -> str:
        if "any" not in self._rules:
            self._rules["any"] = ""  # the rule refers to itself
            quote = self._tokens.quote
            alternatives = (
                f"<[{quote}]> /(?s:.*)/ <[{quote}]>",
                '%json {"type": "number"}',
                '"true" | "false" | "null"',
                self._listed("{", f'{WORD} ":" any', "}"),
                self._listed("[", "any", "]"),
            )
            names = [self._rule(each) for each in alternatives]
            self._rules["any"] = " | ".join(names)
        return "any"

    def _referred(self, reference: Any, described: Callable[[Schema], str]) -> str:
        known = (id(self._root), str(reference), described)
        if known not in self._references:
            schema = self._root
            try:
                for part in unquote(str(reference)).removeprefix("#").split("/")[1:]:
                    name = part.replace("~1", "/").replace("~0", "~")
                    schema = schema[int(name) if isinstance(schema, list) else name]
            except (LookupError, TypeError, ValueError) as error:
                raise GrammarError(f"a tool's parameters have no {shown(reference)}, which $ref names") from error
            self._references[known] = name = self._rule("")  # the rule may refer to itself
            self._rules[name] = described(schema)
        return self._references[known]

    def _rule(self, body: str, kind: str = "r") -> str:
        """Add a rule and return its name; a capital makes it a terminal."""
        name = f"{kind}{len(self._rules)}"
        self._rules[name] = body
        return name


def _several(schema: Mapping[str, Any]) -> list[Schema]:
    """The alternative schemas of a value, as far as rules can express them."""
    for keyword in ("anyOf", "oneOf", "allOf"):
        found = schema.get(keyword)
        if isinstance(found, list) and found and (keyword != "allOf" or len(found) == 1):
            return found
    return []


def _bounds(schema: Mapping[str, Any], least: str, most: str) -> tuple[int, int | None]:
    low, high = schema.get(least), schema.get(most)
    return (low if isinstance(low, int) else 0), (high if isinstance(high, int) else None)


def _whole(text: str) -> str:
    """A pattern for the whole string: that of a schema may match anywhere in it."""
    alternatives: list[list[str]] = [[]]
    depth = 0
    for piece in PIECES.findall(text):
        depth += (piece == "(") - (piece == ")")
        if piece == "|" and not depth:
            alternatives.append([])
        else:
            alternatives[-1].append(piece)
    whole = []
    for pieces in alternatives:
        begins, ends = pieces[:1] == ["^"], pieces[-1:] == ["$"]
        inner = "".join(pieces[begins : len(pieces) - ends])
        kept = re.sub(r"(?s)\\.", lambda found: CLASSES.get(found[0], found[0]), inner)
        whole.append(f"{'' if begins else ANY}(?:{kept}){'' if ends else ANY}")
    return "|".join(whole)
