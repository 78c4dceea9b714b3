"""Splits a reply into thoughts, tool calls and answer while its text comes in, by the bundle's response template.

The format of `response_template.json` is transformers' (`utils/chat_parsing`): named fields with an opening and a
closing delimiter; one field without an opening takes all other text. Supported are the fields `content`, `tool_calls`
and the thoughts, by any of their names, as text and JSON; calls also as a list of Python, which `python_calls` names,
and between tags, `tagged_calls`.

Inside this file a control token is one private-use character, so delimiters that are control tokens match only control
tokens: a model that writes `<|tool_call>` letter by letter, because a prompt injection asked for it, calls nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ondevice.errors import BundleCorruptError, reason
from ondevice.text.call_values import json_value, python_calls
from ondevice.text.messages import THOUGHTS, Tool, ToolCall
from ondevice.text.tagged_calls import tagged_calls
from ondevice.text.tokenizer import Tokenizer

ANSWER, CALLS = "content", "tool_calls"
PYTHON, TAGGED = "python_calls", "tagged_calls"
"""Content of a field of calls that are a list as in Python, and that are between tags or JSON; transformers knows none
of these names."""

VERSION = 1

MAX_BYTES = 1 << 20
"""Size of a response template: Gemma 4's has 750 bytes."""

MAX_HELD = 256
"""Characters of a delimiter: text that waits longer is none."""

MAX_REPETITIONS = 3
"""Repetitions in a delimiter's pattern, which comes with a checkpoint: matching takes the length of the held text to
this power."""

CONTROL, MAX_CONTROLS = 0xF0000, 1 << 12
"""First of the private-use characters that stand for control tokens, and how many there are."""

PRIVATE = re.compile(f"[{chr(CONTROL)}-{chr(CONTROL + MAX_CONTROLS - 1)}]")

TAIL = 64
"""Tokens at a prompt's end in which the beginning of the reply is looked for first."""

TEMPLATE_KEYS = {"version", "defaults", "fields", "start_anchor", "start_anchor_pattern"}
FIELD_KEYS = {
    "open", "open_pattern", "close", "close_pattern", "content", "content_args", "repeats", "join", "optional",
    "transform", "transform_each",
}  # fmt: skip


class Parsed(NamedTuple):
    """Parts of a reply that some text made final."""

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    def then(self, other: Parsed) -> Parsed:
        """These parts and the ones that came after them."""
        return Parsed(self.text + other.text, self.reasoning + other.reasoning, self.tool_calls + other.tool_calls)


class ReplyParser:
    """State machine over the text of a reply: its state is the field that the text belongs to.

    Call `feed` with text, `control` with control tokens, and `finish` at the end. Results depend on the whole reply,
    not on how it is divided: text that may be part of a delimiter is held back, and left out if the reply ends within a
    delimiter of control tokens. A call that is malformed or cut off is returned as text, as it was written: nothing
    that a model writes is an error. White space around the answer stays.
    """

    def __init__(
        self,
        template: ResponseTemplate,
        begun: str = "",
        *,
        tools: Sequence[Tool] = (),
        ends_calls: bool = True,
    ) -> None:
        """
        Args:
            begun: the part of the reply that the prompt has already, from `begun_reply`.
            tools: declarations of the functions that may be called, for values whose text does not tell their type.
            ends_calls: whether the end of the reply may stand for the control token after a call: a grammar ends a
                reply where it is complete, without the token after Llama's calls.
        """
        self._template = template
        self._tools = tools
        self._ends_calls = ends_calls
        self._held = ""
        """Text that may be part of a delimiter."""
        self._opening, self._groups = "", dict[str, str]()
        """Text and named groups of the delimiter that opened the current field."""
        self._body = ""
        """Text of an unfinished tool call."""
        self._said = set[str]()
        """Names of the fields that have text."""
        self._before = ""
        """Text between an earlier part of the current field and this one, which has no text yet."""
        self._is_header = False
        """Whether the current field is an answer that may still turn out to be the header of a message."""
        self._is_first = True
        """Whether nothing but white space has been said."""
        self._begin(template.rest, template.start)
        self._feed(begun, last=False)
        self._part.drop()

    @property
    def controls(self) -> Collection[int]:
        """Ids of the control tokens to pass to `control`."""
        return self._template.controls.keys()

    @property
    def strips_text(self) -> bool:
        """Whether white space around the answer is to be left out."""
        return any(each.strip for each in self._template.fields if each.name == ANSWER)

    @property
    def strips_reasoning(self) -> bool:
        """Whether white space around the thoughts is to be left out."""
        return any(each.strip for each in self._template.fields if each.name not in (ANSWER, CALLS))

    def feed(self, text: str) -> Parsed:
        """Parse text of ordinary tokens."""
        return self._feed(PRIVATE.sub("\N{REPLACEMENT CHARACTER}", text), last=False)

    def control(self, token_id: int) -> Parsed:
        """Parse a control token."""
        return self._feed(self._template.controls.get(token_id, ""), last=False)

    def finish(self) -> Parsed:
        """Parse the text held back, at the end of the reply."""
        return Parsed() if self._is_header else self._feed("", last=True)

    def _feed(self, new: str, *, last: bool) -> Parsed:
        text, at, given = self._held + new, 0, Parsed()
        while (found := self._next(text, at, last=last)) is not None:
            field, delimiter, place = found
            given = given.then(self._inside(text[at : place.start()]))
            given = given.then(self._leave(place[0] if field is None else ""))
            ended = self._field if field is None else None
            self._begin(self._template.rest if field is None else field, delimiter, ended)
            if field is not None:
                self._opening = place[0]
                self._groups = {name: value for name, value in place.groupdict().items() if value}
            at = place.end()
        end = min((self._held_from(text, at, *each) for each in self._watched()), default=len(text))
        given = given.then(self._inside(text[at:end]))
        self._held = text[end:]
        if not last:
            return given
        is_call = self._field is not None and self._field.name == CALLS
        if is_call or not PRIVATE.search(self._held):  # a control token in it: it is a delimiter that is cut off
            given = given.then(self._inside(self._held))
        return given.then(self._leave(""))

    def _begin(self, field: Field | None, delimiter: Delimiter | None = None, ended: Field | None = None) -> None:
        """Begin a part of a reply after a delimiter: what a field holds, or None for text that is dropped.

        After the beginning of a message an answer begins: gpt-oss may leave out the header, as where a system message
        demands nothing but JSON. So it does after thoughts that are no message of their own, as GLM-Z1's.

        Args:
            ended: the field that the delimiter closed, if it closed one.
        """
        begins = delimiter is self._template.start or (ended is not None and ended.leads)
        self._is_header = begins and self._template.answer is not None
        field = self._template.answer if self._is_header else field
        self._field, self._part, self._before = field, Trimmed(trims=False), ""
        if field is not None and field.join is not None:
            self._part = Trimmed(trims=field.strip)
            self._before = field.join if field.name in self._said else ""

    def _watched(self) -> Iterator[tuple[Field | None, Delimiter]]:
        """Delimiters that count in this state, each with the field that it opens; None for the end of this field."""
        if self._field is self._template.rest or self._is_header:
            yield from ((each, each.opening) for each in self._template.fields if each.opening is not None)
            if self._template.answer is not None:
                yield self._template.answer, self._template.start
        elif self._field is not None and self._field.closing is None and self._field.opening is not None:
            yield self._field, self._field.opening  # Mistral's calls: the next one ends this one
        if self._field is not None and self._field.closing is not None:
            yield None, self._field.closing

    def _next(self, text: str, at: int, *, last: bool) -> tuple[Field | None, Delimiter, re.Match[str]] | None:
        """The first delimiter, the longest of several, if no further text can change that."""
        watched = list(self._watched())
        found = [
            (field, each, place)
            for field, each in watched
            if (place := each.find(text, at)) is not None and self._may_begin(field, text[at : place.start()])
        ]
        if not found:
            return None
        first = min(found, key=lambda each: (each[2].start(), -each[2].end()))
        if not last and min(self._held_from(text, at, *each) for each in watched) <= first[2].start():
            return None
        return first

    def _held_from(self, text: str, at: int, field: Field | None, delimiter: Delimiter) -> int:
        """Where the text begins that may be this delimiter."""
        place = delimiter.held(text, at)
        return place if self._may_begin(field, text[at:place]) else len(text)

    def _may_begin(self, field: Field | None, before: str) -> bool:
        """Whether a field may begin after this text of the current one: a header has nothing before it, and thoughts
        nothing in the whole reply where letters open them, which an answer may spell.
        """
        if field is None or not (self._is_header or field.comes_first):
            return True
        return (self._is_header or self._is_first) and not PRIVATE.sub("", before).strip()

    def _inside(self, text: str) -> Parsed:
        """Take text of the current field."""
        if self._field is None or not text:
            return Parsed()
        if self._field.name == CALLS:
            self._body += text
            self._is_first = False
            return Parsed()
        text = self._part.feed(PRIVATE.sub("", text))
        if text:
            self._is_header = False
            self._is_first = self._is_first and not text.strip()
            self._said.add(self._field.name)
            text, self._before = self._before + text, ""
        return Parsed(text) if self._field.name == ANSWER else Parsed(reasoning=text)

    def _leave(self, closing: str) -> Parsed:
        """End the current field, which the text `closing` closed."""
        if self._field is None or self._field.name != CALLS:
            return Parsed()
        body, self._body = self._body.rstrip(self._template.ends), ""
        if not closing and self._ends_calls and self._field.closing is not None:
            ended = self._field.closing.find(body + self._template.ends[:1], 0)
            if ended is not None:
                body, closing = body[: ended.start()], body[ended.start() :]
        is_spelled = PRIVATE.search(self._opening) is None
        if closing and self._template.answer is not None and not is_spelled:
            body = body.strip() or "{}"  # gpt-oss may write nothing for a function without parameters
        try:
            return Parsed(tool_calls=self._field.calls(body, self._groups, self._tools))
        except (ValueError, TypeError, KeyError, AttributeError):
            if self._template.answer is None:
                return Parsed(self._template.written(f"{self._opening}{body}{closing}"))
            self._begin(self._template.answer)
            return self._inside(f"{self._opening}{body}" if is_spelled else body)  # an answer's first line, no header


class Trimmed:
    """Strips white space at both ends of a text; trailing white space is held back until more text comes."""

    def __init__(self, *, trims: bool, at_start: bool = True) -> None:
        self._trims, self._at_start = trims, at_start
        self._held = ""

    def feed(self, text: str) -> str:
        if not self._trims:
            return text
        text = self._held + text
        if self._at_start:
            text = text.lstrip()
            self._at_start = not text
        kept = text.rstrip()
        self._held = text[len(kept) :]
        return kept

    def drop(self) -> None:
        """Drop the white space that is held back."""
        self._held = ""


def begun_reply(template: ResponseTemplate, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> str | None:
    """The part of a reply that a prompt has already; None if it opens no reply, and goes on as plain text."""
    if template.controls and template.controls.keys().isdisjoint(prompt_ids):
        return None
    length = TAIL
    while True:
        text = "".join(_text_parts(template, tokenizer, prompt_ids[-length:]))
        place, start = None, 0
        while (found := template.start.find(text, start)) is not None:
            place, start = found, found.end()
        if place is not None:
            return text[place.end() :]
        if length >= len(prompt_ids):
            return None
        length *= 8


def _text_parts(template: ResponseTemplate, tokenizer: Tokenizer, token_ids: Sequence[int]) -> Iterator[str]:
    """Text of tokens, with the characters that stand for control tokens."""
    run: list[int] = []
    for token_id in [*token_ids, None]:
        if token_id is not None and token_id not in template.controls:
            run.append(token_id)
            continue
        yield PRIVATE.sub("", tokenizer.decode(run))
        run = []
        if token_id is not None:
            yield template.controls[token_id]


class ResponseTemplate:
    """A parsed `response_template.json`.

    Attributes:
        fields: all fields.
        rest: the field without an opening; None if text outside of all fields is dropped.
        answer: the field of the answer, if it has an opening; such an opening is not text, nor is that of a call.
        start: the text of a prompt that a reply follows.
        ends: the characters of the control tokens that end an answer.
        controls: the characters that stand for control tokens, by token id.
    """

    def __init__(self, spec: Any, tokenizer: Tokenizer) -> None:
        """
        Raises:
            ValueError, TypeError, KeyError: a template that this version does not support.
        """
        if not isinstance(spec, Mapping) or spec.get("version", VERSION) != VERSION or set(spec) - TEMPLATE_KEYS:
            raise ValueError(f"it is not a response template of version {VERSION}: {spec!r:.99}")
        if not isinstance(spec.get("fields"), Mapping) or not spec["fields"]:
            raise ValueError("it has no fields")
        texts = tokenizer.control_texts
        written = json.dumps(spec, ensure_ascii=False).replace("\\", "")
        used = sorted(token_id for token_id, text in texts.items() if text in written)
        self.controls = {token_id: chr(CONTROL + number) for number, token_id in enumerate(used[:MAX_CONTROLS])}
        self._texts = {character: texts[token_id] for token_id, character in self.controls.items()}
        spec = self._with_characters(spec)
        start = _delimiter(spec, "start_anchor")
        if start is None:
            raise ValueError("it does not say which text a reply follows")
        self.start = start
        self.fields = tuple(Field.of(name, field) for name, field in spec["fields"].items())
        rest = [field for field in self.fields if field.opening is None]
        if len(rest) > 1:
            raise ValueError("more than one field has no beginning")
        self.rest = rest[0] if rest else None
        self.answer = next((each for each in self.fields if each.name == ANSWER and each.opening is not None), None)
        closing = None if self.rest is None else self.rest.closing
        self.ends = "".join(each for each in self.controls.values() if closing is not None and closing.find(each, 0))

    @classmethod
    def from_file(cls, path: Path, tokenizer: Tokenizer) -> ResponseTemplate:
        """Read a template.

        Raises:
            BundleCorruptError: it cannot be read, or is not supported.
        """
        try:
            if path.stat().st_size > MAX_BYTES:
                raise ValueError(f"it has more than {MAX_BYTES} bytes")
            return cls(json.loads(path.read_text("utf-8")), tokenizer)
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise BundleCorruptError(
                f"{path} is not a response template ({reason(error)}): export the bundle again"
            ) from error

    def written(self, text: str) -> str:
        """The text with control tokens as they are written."""
        return PRIVATE.sub(lambda found: self._texts.get(found[0], ""), text)

    def _with_characters(self, value: Any) -> Any:
        """The template with a character for each control token, in patterns too, where `\\|` is a bar."""
        if isinstance(value, Mapping):
            return {key: self._with_characters(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._with_characters(item) for item in value]
        if isinstance(value, str):
            for character, text in sorted(self._texts.items(), key=lambda item: -len(item[1])):
                value = re.sub("".join(rf"\\?{re.escape(each)}" for each in text), character, value)
        return value


@dataclass(frozen=True)
class Field:
    """One field of a response template.

    Attributes:
        opening: None for the field of all text that no other field has.
        comes_first: whether it is the beginning of a reply or nothing: thoughts that no control token opens, once.
        leads: whether it holds thoughts that are opened once, before all else.
        closing: None for a field that goes on to its next opening, or to the end of the reply.
        strip: whether white space at both ends is left out.
        join: text between the parts of a field that is opened several times; None for none, and for parts as they are.
        content: how the text is to be read.
        unquoted_keys: whether keys of JSON may be bare words.
        string_marks: pairs of marks around strings of JSON, in which nothing is escaped.
        transform: the shape of a call, with `{content}` for the value and `{name}` for groups of the opening.
        transform_each: whether the value is a list of calls; a single one may stand without a list.
    """

    name: str
    opening: Delimiter | None
    comes_first: bool
    leads: bool
    closing: Delimiter | None
    strip: bool
    join: str | None
    content: str
    unquoted_keys: bool
    string_marks: list[tuple[str, str]]
    transform: Any
    transform_each: bool

    @classmethod
    def of(cls, name: str, spec: Any) -> Field:
        """
        Raises:
            ValueError, TypeError, KeyError: a field that this version does not support.
        """
        if not isinstance(spec, Mapping) or set(spec) - FIELD_KEYS:
            raise ValueError(f"{spec!r:.99} has something that is not understood")
        if name not in (ANSWER, CALLS, *THOUGHTS):
            raise ValueError(f"the field {name!r:.99} is not understood")
        kind, args = spec.get("content", "text"), dict(spec.get("content_args", {}))
        if kind not in (("json", PYTHON, TAGGED) if name == CALLS else ("text",)):
            raise ValueError(f"the field {name} holds {kind!r:.99}, which is not understood")
        opening = _delimiter(spec, "open")
        is_spelled = opening is not None and opening.is_spelled
        leads = name in THOUGHTS and not spec.get("repeats")
        return cls(
            name,
            opening,
            comes_first=leads and is_spelled,
            leads=leads,
            closing=_delimiter(spec, "close"),
            strip=bool(args.get("strip", True)),
            join=None if spec.get("join") is None else str(spec["join"]),
            content=kind,
            unquoted_keys=bool(args.get("unquoted_keys", False)),
            string_marks=[(str(opening), str(closing)) for opening, closing in args.get("string_delims", [])],
            transform=spec.get("transform", "{content}"),
            transform_each=bool(spec.get("transform_each", False)),
        )

    def calls(self, body: str, groups: Mapping[str, str], tools: Sequence[Tool]) -> tuple[ToolCall, ...]:
        """The tool calls that the text of this field holds.

        Args:
            groups: named groups of the opening.
            tools: declarations of the functions.

        Raises:
            ValueError, TypeError, KeyError, AttributeError: the text is malformed, or lacks something that the
                transform names.
        """
        marks = "".join(mark for pair in self.string_marks for mark in pair)
        text = PRIVATE.sub(lambda found: found[0] if found[0] in marks else "", body)
        if self.content == PYTHON:
            value = python_calls(text)
        elif self.content == TAGGED:
            value = tagged_calls(text, tools)
        else:
            value = json_value(text, self.string_marks, bare_keys=self.unquoted_keys)
        if not self.transform_each:
            scopes = [{**groups, "content": value}]
        else:
            scopes = [{**groups, **item} for item in (value if isinstance(value, list) else [value])]
        return tuple(_call(_transformed(self.transform, scope)) for scope in scopes)


def _transformed(transform: Any, scope: Mapping[str, Any]) -> Any:
    """The transform with `{name}` and `{name.key}` replaced by their values in `scope`."""
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


class Delimiter:
    """A regular expression that also says which text may still become a match.

    Python's `re` has no partial matches. So a second expression is made, which matches every proper beginning of a
    match: for `ab*c` those are the empty text, `a`, and `a` with any number of `b`.
    """

    def __init__(self, pattern: str) -> None:
        """
        Args:
            pattern: characters, classes, groups, alternatives and repetitions that hold no other repetition, and only
                `?` alternatives.

        Raises:
            ValueError: it has anything else, too many repetitions, or matches the empty text.
        """
        try:
            self._whole = re.compile(pattern, re.DOTALL)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"the pattern {pattern!r:.99} is none: {error}") from error
        piece = _piece(_tokens(pattern))
        if piece.repetitions > MAX_REPETITIONS:
            raise ValueError(f"the pattern {pattern!r:.99} has more than {MAX_REPETITIONS} repetitions")
        self._begun = re.compile(f"(?:{piece.begun})\\Z", re.DOTALL)
        if self._whole.fullmatch(""):
            raise ValueError(f"the pattern {pattern!r:.99} matches nothing at all")
        self.is_spelled = PRIVATE.search(pattern) is None
        """Whether it holds no control token."""

    def find(self, text: str, start: int) -> re.Match[str] | None:
        """The first match from `start` on."""
        return self._whole.search(text, start)

    def held(self, text: str, start: int) -> int:
        """Where the text begins that may be, or may still change, a match; the end of the text if there is none."""
        found = self._begun.search(text, max(start, len(text) - MAX_HELD))
        return len(text) if found is None else found.start()


def _delimiter(spec: Mapping[str, Any], name: str) -> Delimiter | None:
    if (pattern := spec.get(f"{name}_pattern")) is not None:
        return Delimiter(pattern)
    texts = spec.get(name)
    return None if texts is None else Delimiter(literals([texts] if isinstance(texts, str) else texts))


def literals(texts: Iterable[str]) -> str:
    """The pattern of any of these texts, the longest first."""
    return "|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True))


class _Piece(NamedTuple):
    """Part of a pattern: the expression itself, that of its proper beginnings, the number of repetitions in it, and
    whether it has alternatives.
    """

    whole: str
    begun: str = ""
    repetitions: int = 0
    branches: bool = False


_TOKEN = re.compile(
    r"(?P<open>\((?:\?:|\?P<\w+>)?(?!\?))|(?P<close>\))|(?P<bar>\|)|(?P<repeat>(?:[*+?]|\{\d*,?\d*\})\??)"
    r"|(?P<atom>\\[^\dAbBZzGNuUx]|\[\^?\]?(?:\\.|[^\]\\])*\]|[^\\$^({])",
    re.DOTALL,
)


def _tokens(pattern: str) -> Iterator[tuple[str, str]]:
    at = 0
    while at < len(pattern):
        found = _TOKEN.match(pattern, at)
        if found is None or found.lastgroup is None:
            raise ValueError(f"the pattern {pattern!r:.99} has something that is not understood at {at}")
        yield found.lastgroup, found[0]
        at = found.end()


def _piece(tokens: Iterator[tuple[str, str]]) -> _Piece:
    """The alternatives up to the end of a group or of the pattern, whose brackets `re` has checked.

    Where the pieces of a sequence are p, q and r, its beginnings are those of p; or p and those of q; or p, q and those
    of r. For `ab|c` the whole is `(?:ab|c)`, and the beginnings are `(?:(?:a|)|)`: `a` or nothing of the first
    sequence, nothing of the second. A repetition `p+` has begun after any number of p and a beginning of one more.
    """
    sequences: list[list[_Piece]] = [[]]
    for kind, text in tokens:
        sequence = sequences[-1]
        if kind == "close":
            break
        if kind == "bar":
            sequences.append([])
        elif kind == "open":
            sequence.append(_piece(tokens))
        elif kind == "atom":
            sequence.append(_Piece(text))
        elif not sequence or sequence[-1].repetitions or (sequence[-1].branches and text != "?"):
            # a text could be read in so many ways that a search would take for ever, as by `(?:a|aa)*b`
            raise ValueError(f"a pattern repeats a repetition or alternatives: {text!r}")
        else:
            piece = sequence.pop()
            sequence.append(_Piece(piece.whole + text, f"{piece.whole}*{piece.begun}", 1))
    begun = []
    for sequence in sequences:
        beginnings = sequence[-1].begun if sequence else ""
        for piece in reversed(sequence[:-1]):
            beginnings = f"(?:{piece.whole}{beginnings}|{piece.begun})"
        begun.append(beginnings)
    whole = "|".join("".join(piece.whole for piece in sequence) for sequence in sequences)
    repetitions = sum(piece.repetitions for sequence in sequences for piece in sequence)
    branches = len(sequences) > 1 or any(piece.branches for piece in sequences[0])
    return _Piece(f"(?:{whole})", f"(?:{'|'.join(begun)})", repetitions, branches)
