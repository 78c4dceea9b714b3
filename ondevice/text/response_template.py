"""A bundle's `response_template.json`: where in a reply its thoughts, calls and answer begin and end.

The format is transformers' (`utils/chat_parsing`): named fields, of which one has no beginning and takes all that no
other does. What is read here are the fields `content`, `tool_calls` and the thoughts, by any of their names, as texts
and JSON. Delimiters that are control tokens only match control tokens: a model that writes `<|tool_call>` letter by
letter, because a stranger had it do so, calls nothing.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ondevice.errors import BundleCorruptError, reason
from ondevice.text.delimiter import Delimiter, literals
from ondevice.text.loose_json import Dialect, parse
from ondevice.text.messages import THOUGHTS
from ondevice.text.tokenizer import Tokenizer
from ondevice.text.tool_call import ToolCall

ANSWER, CALLS = "content", "tool_calls"
VERSION = 1

MOST_BYTES = 1 << 20
"""Of a template: Gemma 4's has 750."""

CONTROL = 0xF0000
"""The private-use character that stands for the first control token; each has its own, which no other text holds."""

MOST_CONTROLS = 1 << 12

PRIVATE = re.compile(f"[{chr(CONTROL)}-{chr(CONTROL + MOST_CONTROLS - 1)}]")

SHAPE = {
    "": {"version", "defaults", "fields", "start_anchor", "start_anchor_pattern"},
    "field": {
        "open", "open_pattern", "close", "close_pattern", "content", "content_args", "repeats", "join", "optional",
        "transform", "transform_each",
    },
}  # fmt: skip


PLAIN = Dialect()


@dataclass(frozen=True)
class Field:
    """
    opening : None for the field that takes what no other does
    closing : None for a field that goes on to the end
    strip : whether white space at both ends is left out
    """

    name: str
    opening: Delimiter | None
    closing: Delimiter | None
    strip: bool = True
    dialect: Dialect = PLAIN
    transform: Any = None
    transform_each: bool = False

    def calls(self, body: str, groups: Mapping[str, str]) -> tuple[ToolCall, ...]:
        """The calls that the text of this field is.

        Raises:
            ValueError: it is none, or KeyError, for a part that the transform names and is not there.
        """
        marks = "".join(itertools.chain(*self.dialect.string_marks))
        value = parse(PRIVATE.sub(lambda found: found[0] if found[0] in marks else "", body), self.dialect)
        if not self.transform_each:
            return (_call(_transformed(self.transform, {**groups, "content": value})),)
        return tuple(_call(_transformed(self.transform, {**groups, **item})) for item in value)


class ResponseTemplate:
    """
    Attributes:
        fields: all of them.
        rest: the field without one; None where other text is dropped.
        start: what the reply begins behind, in a prompt.
        controls: the characters that stand for control tokens, by token id.
    """

    def __init__(self, spec: Any, tokenizer: Tokenizer) -> None:
        """
        Raises:
            ValueError: not what this version understands.
        """
        _check(spec)
        texts = tokenizer.control_texts
        written = json.dumps(spec, ensure_ascii=False).replace("\\", "")
        used = sorted(token_id for token_id, text in texts.items() if text in written)
        self.controls = {token_id: chr(CONTROL + number) for number, token_id in enumerate(used[:MOST_CONTROLS])}
        self._texts = {character: texts[token_id] for token_id, character in self.controls.items()}
        spec = self._controlled(spec)
        start = _delimiter(spec, "start_anchor")
        if start is None:
            raise ValueError("it does not say what a reply begins behind")
        self.start = start
        self.fields = tuple(_field(name, field) for name, field in spec["fields"].items())
        rest = [field for field in self.fields if field.opening is None]
        if len(rest) > 1:
            raise ValueError("more than one field has no beginning")
        self.rest = rest[0] if rest else None

    @classmethod
    def from_file(cls, path: Path, tokenizer: Tokenizer) -> ResponseTemplate:
        """Read a template.

        Raises:
            BundleCorruptError: it cannot be read or understood.
        """
        try:
            if path.stat().st_size > MOST_BYTES:
                raise ValueError(f"it has more than {MOST_BYTES} bytes")
            return cls(json.loads(path.read_text("utf-8")), tokenizer)
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise BundleCorruptError(
                f"{path} is no response template ({reason(error)}): export the bundle again"
            ) from error

    def written(self, text: str) -> str:
        """The text with control tokens as they are written."""
        return PRIVATE.sub(lambda found: self._texts.get(found[0], ""), text)

    def _controlled(self, value: Any) -> Any:
        """The template with characters for control tokens, in patterns too, where `\\|` is a bar."""
        if isinstance(value, Mapping):
            return {key: self._controlled(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._controlled(item) for item in value]
        if isinstance(value, str):
            for character, text in sorted(self._texts.items(), key=lambda item: -len(item[1])):
                value = re.sub("".join(rf"\\?{re.escape(each)}" for each in text), character, value)
        return value


def _check(spec: Any) -> None:
    if not isinstance(spec, Mapping) or spec.get("version", VERSION) != VERSION:
        raise ValueError(f"it is no response template of version {VERSION}")
    fields = spec.get("fields")
    if not isinstance(fields, Mapping) or not fields:
        raise ValueError("it has no fields")
    for shape, each in [("", spec), *(("field", field) for field in fields.values())]:
        if not isinstance(each, Mapping) or set(each) - SHAPE[shape]:
            raise ValueError(f"{each!r:.99} has something that is not understood")


def _field(name: str, spec: Mapping[str, Any]) -> Field:
    if name not in (ANSWER, CALLS, *THOUGHTS):
        raise ValueError(f"the field {name!r:.99} is not understood")
    kind, args = spec.get("content", "text"), dict(spec.get("content_args", {}))
    if kind != ("json" if name == CALLS else "text"):
        raise ValueError(f"the field {name} holds {kind!r:.99}, which is not understood")
    marks = args.get("string_delims", [])
    return Field(
        name,
        _delimiter(spec, "open"),
        _delimiter(spec, "close"),
        strip=bool(args.get("strip", True)),
        dialect=Dialect(bool(args.get("unquoted_keys", False)), [(str(a), str(b)) for a, b in marks]),
        transform=spec.get("transform", "{content}"),
        transform_each=bool(spec.get("transform_each", False)),
    )


def _delimiter(spec: Mapping[str, Any], name: str) -> Delimiter | None:
    if (pattern := spec.get(f"{name}_pattern")) is not None:
        return Delimiter(pattern)
    texts = spec.get(name)
    if texts is None:
        return None
    return Delimiter(literals([texts] if isinstance(texts, str) else texts))


def _transformed(transform: Any, scope: Mapping[str, Any]) -> Any:
    """The transform with `{name}` and `{name.key}` replaced by what they stand for."""
    if isinstance(transform, Mapping):
        return {key: _transformed(item, scope) for key, item in transform.items()}
    if isinstance(transform, list):
        return [_transformed(item, scope) for item in transform]
    found = re.fullmatch(r"\{(\w+(?:\.\w+)*)\}", transform) if isinstance(transform, str) else None
    if found is None:
        return transform
    value: Any = scope
    for key in found[1].split("."):
        value = value[key]
    return value


def _call(value: Any) -> ToolCall:
    function = value.get("function", value)
    name, arguments = function["name"], function.get("arguments")
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError("no call")
    return ToolCall(name, arguments)
