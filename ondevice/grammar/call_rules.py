"""The grammar of tool calls in a syntax other than JSON, from the schemas of the tools' parameters."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

from ondevice.errors import GrammarError, shown
from ondevice.grammar.complaints import is_readable
from ondevice.grammar.response_format import SPACING, lenient, pattern, quoted
from ondevice.text.declared import Schema, alternatives, referred

WORD = "/[A-Za-z_][\\w.-]*/"
"""Pattern of a key that the schema does not name."""

ANY = "(?s:.*)"
"""Pattern of any text."""

PIECES = re.compile(r"(?s)\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.")
"""Pieces of a regular expression: escapes, classes and other characters."""

CLASSES = {r"\d": "[0-9]", r"\w": "[A-Za-z0-9_]"}
"""Classes that are wider in Rust's regular expressions than in those of a schema."""

STRING_KEYWORDS = {"minLength": int, "maxLength": int, "pattern": str}
SCALARS = {"integer", "number"}
SCALAR_KEYWORDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


class Brackets(NamedTuple):
    """How an object is written.

    opening, closing : around its properties
    key : expression of a name and what stands before its value
    any_key : the same of any name
    """

    opening: str
    closing: str
    key: Callable[[str], str]
    any_key: str


JSON_OBJECT = Brackets(
    "{", "}", lambda name: quoted(f"{json.dumps(name, ensure_ascii=False)}: "), '%json {"type": "string"} ": "'
)


class CallRules(ABC):
    """Lark rules for tool calls: one for each function, from the schema of its parameters. Subclasses say how calls and
    their values are spelled.

    Enforced of a schema: types, `properties` and `required`, `enum` and `const`, `items`, `prefixItems` and their
    number, `minLength`, `maxLength` and `pattern`, the limits of numbers, `anyOf`, `oneOf`, a single `allOf`, `$ref`
    within the schema, and `nullable`. An object that names its properties has no others. Other keywords are ignored, as
    are patterns that llguidance does not read: with look-around, references to groups, or anchors inside groups.

    Attributes:
        start: name of the rule for one call.
        arguments: how the arguments of a call are written.
        objects: how an object in them is written.
        comma: between two values.
        words: expressions of JSON's words.
    """

    arguments: ClassVar[Brackets]
    objects: ClassVar[Brackets]
    comma: ClassVar[str]
    words: ClassVar[Mapping[str, str]]

    def __init__(self, tools: Iterable[Mapping[str, Any]]) -> None:
        """
        Args:
            tools: checked declarations in OpenAI's form.

        Raises:
            GrammarError: a schema with a `$ref` that leads nowhere.
        """
        self._rules: dict[str, str] = {}
        self._references: dict[tuple[int, str, Callable[[Schema], str]], str] = {}
        self._root: Schema = True
        calls = [self._call(tool["function"]) for tool in tools]
        self.start = self.rule(" | ".join(calls))

    @property
    def text(self) -> str:
        """All rules as Lark."""
        return "\n".join(f"{name}: {body}" for name, body in self._rules.items())

    @abstractmethod
    def called(self, name: str, arguments: str) -> str:
        """An expression for a call with these arguments."""

    @abstractmethod
    def string(self, text: str) -> str:
        """An expression for exactly this string."""

    @abstractmethod
    def strings(self, schema: Mapping[str, Any]) -> str:
        """An expression for the strings of a schema."""

    def ordered(self, pairs: Mapping[str, Any]) -> list[tuple[str, Any]]:
        """Properties in the order in which they are written."""
        return list(pairs.items())

    def _call(self, function: Mapping[str, Any]) -> str:
        self._root = function.get("parameters") or {"type": "object", "properties": {}}
        return self.called(function["name"], self._arguments(self._root))

    def _arguments(self, schema: Schema) -> str:
        """An expression for an object of this schema, whatever else the schema allows."""
        if isinstance(schema, Mapping) and "properties" not in schema:
            if "$ref" in schema:
                return self._referred(schema["$ref"], self._arguments)
            if options := alternatives(schema):
                return f"({' | '.join(map(self._arguments, options))})"
        return self._object(schema, self.arguments)

    def _value(self, schema: Schema) -> str:
        """An expression for a value of this schema."""
        if not isinstance(schema, Mapping):
            return self._any()
        if "$ref" in schema:
            return self._referred(schema["$ref"], self._value)
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list) and values:
            options = [self._literal(value) for value in values]
        elif several := alternatives(schema):
            options = [self._value(each) for each in several]
        else:
            kinds = schema.get("type", "object" if "properties" in schema else None)
            options = [self._typed(kind, schema) for kind in (kinds if isinstance(kinds, list) else [kinds])]
        if schema.get("nullable"):
            options.append(self.words["null"])
        return f"({' | '.join(options)})"

    def _typed(self, kind: object, schema: Mapping[str, Any]) -> str:
        if kind == "object":
            return self._object(schema, self.objects)
        if kind == "array":
            return self._array(schema)
        if kind == "string":
            return self.strings(schema)
        if str(kind) in SCALARS:
            limits = {name: schema[name] for name in SCALAR_KEYWORDS if name in schema}
            return self.rule(f"%json {json.dumps({'type': kind, **limits})}")
        if kind == "boolean":
            return f"({self.words['true']} | {self.words['false']})"
        return self.words["null"] if kind == "null" else self._any()

    def _object(self, schema: Schema, brackets: Brackets) -> str:
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        if not isinstance(properties, Mapping) or not properties:
            others = schema.get("additionalProperties", True) if isinstance(schema, Mapping) else True
            if properties is not None or others is False:
                return self._listed(brackets.opening, "", brackets.closing, most=0)
            return self._listed(brackets.opening, f"{brackets.any_key} {self._value(others)}", brackets.closing)
        required = schema.get("required")
        needed = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
        # From the last property to the first: `later` is the rest after a property, `first` if none came before.
        later = first = ""
        for name, each in reversed(self.ordered(properties)):
            field = self.rule(f"{brackets.key(name)} {self._value(each)}")
            begun = f"{field} {later}"
            after = f'"{self.comma}" {field}' if name in needed else f'("{self.comma}" {field})?'
            first = self.rule(begun if name in needed else f"{begun} | {first}" if first else f"({begun})?")
            later = self.rule(f"{after} {later}")
        return f'"{brackets.opening}" {first} "{brackets.closing}"'

    def _array(self, schema: Mapping[str, Any]) -> str:
        first, items = schema.get("prefixItems"), schema.get("items", True)
        least, most = bounds(schema, "minItems", "maxItems")
        if not isinstance(first, list) or not first[:most]:
            return self._listed("[", self._value(items), "]", least, most)
        fixed = f' "{self.comma}" '.join(map(self._value, first[:most]))
        if items is False or (most is not None and most <= len(first)):
            return f'"[" {fixed} "]"'
        further = f"{max(least - len(first), 0)},{'' if most is None else most - len(first)}"
        return f'"[" {fixed} ("{self.comma}" {self._value(items)}){{{further}}} "]"'

    def _listed(self, opening: str, item: str, closing: str, least: int = 0, most: int | None = None) -> str:
        if most == 0:
            return f'"{opening}" "{closing}"'
        item = self.rule(item)
        more = f'("{self.comma}" {item}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
        items = item if most == 1 else f"{item} {more}"
        return f'"{opening}" {items if least else f"({items})?"} "{closing}"'

    def texts(self, schema: Mapping[str, Any], character: str = ".") -> str:
        """A terminal for the texts of a schema's strings.

        Args:
            character: pattern of a character that they may have.
        """
        return self.rule(texts(schema, character), "T")

    def _literal(self, value: Any) -> str:
        """An expression for exactly this value."""
        if isinstance(value, str):
            return self.string(value)
        if isinstance(value, Mapping):
            fields = [f"{self.objects.key(name)} {self._literal(item)}" for name, item in self.ordered(value)]
            return self._joined(self.objects.opening, fields, self.objects.closing)
        if isinstance(value, list):
            return self._joined("[", map(self._literal, value), "]")
        text = json.dumps(value)
        return self.words.get(text) or quoted(text)

    def _joined(self, opening: str, items: Iterable[str], closing: str) -> str:
        return f'"{opening}" ' + f' "{self.comma}" '.join(items) + f' "{closing}"'

    def _any(self) -> str:
        if "any" not in self._rules:
            self._rules["any"] = ""  # the rule refers to itself
            alternatives = (
                self.strings({}),
                '%json {"type": "number"}',
                " | ".join(self.words.values()),
                self._listed(self.objects.opening, f"{self.objects.any_key} any", self.objects.closing),
                self._listed("[", "any", "]"),
            )
            names = [self.rule(each) for each in alternatives]
            self._rules["any"] = " | ".join(names)
        return "any"

    def _referred(self, reference: Any, described: Callable[[Schema], str]) -> str:
        known = (id(self._root), str(reference), described)
        if known not in self._references:
            try:
                schema = referred(self._root, reference)
            except (LookupError, TypeError, ValueError) as error:
                raise GrammarError(f"a tool's parameters have no {shown(reference)}, which $ref names") from error
            self._references[known] = name = self.rule("")  # the rule may refer to itself
            self._rules[name] = described(schema)
        return self._references[known]

    def rule(self, body: str, kind: str = "r") -> str:
        """Add a rule and return its name; a capital makes it a terminal."""
        name = f"{kind}{len(self._rules)}"
        self._rules[name] = body
        return name


def texts(schema: Mapping[str, Any], character: str = ".") -> str:
    """An expression for the texts of a schema's strings, as terminals may hold it.

    Args:
        character: pattern of a character that they may have.
    """
    least, most = bounds(schema, "minLength", "maxLength")
    text = f"/(?s:{character}{{{least},{'' if most is None else most}}})/"
    if isinstance(found := schema.get("pattern"), str) and is_readable(whole := _whole(found)):
        text = f"{text} & {pattern(whole)}"
    return text


def json_string(schema: Mapping[str, Any]) -> str:
    """An expression for the strings of a schema, written as in JSON."""
    return f"%json {json.dumps({'type': 'string', **lenient(string_limits(schema), SPACING)})}"


def string_limits(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of a schema that limit its strings."""
    return {name: schema[name] for name, kind in STRING_KEYWORDS.items() if isinstance(schema.get(name), kind)}


def bounds(schema: Mapping[str, Any], least: str, most: str) -> tuple[int, int | None]:
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
