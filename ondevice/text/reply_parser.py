"""A reply as its text comes in: thoughts, calls and the answer, told apart by the bundle's response template."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ondevice.text.delimiter import Delimiter, Place
from ondevice.text.response_template import ANSWER, CALLS, PRIVATE, Field, ResponseTemplate
from ondevice.text.tokenizer import Tokenizer
from ondevice.text.tool_call import ToolCall

TAIL = 64
"""Tokens of a prompt in which the beginning of the reply is looked for first."""


class Parsed(NamedTuple):
    """What some text of a reply made final."""

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    def then(self, other: Parsed) -> Parsed:
        """This, and what came after it."""
        return Parsed(self.text + other.text, self.reasoning + other.reasoning, self.tool_calls + other.tool_calls)


@dataclass
class _Found:
    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    tool_calls: list[ToolCall] = field(default_factory=list)

    def parsed(self) -> Parsed:
        return Parsed("".join(self.text), "".join(self.reasoning), tuple(self.tool_calls))


class ReplyParser:
    """Feed it text, `control` tokens in between, and `finish`; what is given depends on the whole, not on its pieces.

    A call whose text cannot be read, or that was cut off, is given as text, as it was written: nothing that a model
    writes is an error. White space around the answer is not left out here.
    """

    def __init__(self, template: ResponseTemplate, begun: str = "") -> None:
        """
        Args:
            begun: what the prompt has of the reply already, as `begun_reply` finds it.
        """
        self._template = template
        self._opened_fields = [(each, each.opening) for each in template.fields if each.opening is not None]
        self._buffer = ""
        self._field = template.rest
        self._opened = ""
        """How the field at hand began."""
        self._groups: dict[str, str] = {}
        self._body = ""
        """Of a call that goes on."""
        self._found = _Found()
        self._feed(begun, last=False)
        self._found = _Found()

    @property
    def controls(self) -> Collection[int]:
        """The control tokens that are its business."""
        return self._template.controls.keys()

    @property
    def strips_text(self) -> bool:
        """Whether white space around the answer is to be left out."""
        return any(each.strip for each in self._template.fields if each.name == ANSWER)

    @property
    def strips_reasoning(self) -> bool:
        return any(each.strip for each in self._template.fields if each.name not in (ANSWER, CALLS))

    def feed(self, text: str) -> Parsed:
        """Text of ordinary tokens."""
        return self._feed(PRIVATE.sub("\N{REPLACEMENT CHARACTER}", text), last=False)

    def control(self, token_id: int) -> Parsed:
        """A control token."""
        return self._feed(self._template.controls.get(token_id, ""), last=False)

    def finish(self) -> Parsed:
        """The reply has ended."""
        return self._feed("", last=True)

    def _feed(self, text: str, *, last: bool) -> Parsed:
        self._buffer += text
        at = 0
        while (found := self._next(at, last=last)) is not None:
            next_field, place = found
            self._take(self._buffer[at : place.start])
            self._end(self._buffer[place.start : place.end] if next_field is None else "")
            self._field = self._template.rest if next_field is None else next_field
            if next_field is not None:
                self._opened, self._groups = self._buffer[place.start : place.end], place.groups
            at = place.end
        held = len(self._buffer)
        if not last:
            held = min((each.held(self._buffer, at) for _, each in self._watched()), default=held)
        self._take(self._buffer[at:held])
        self._buffer = self._buffer[held:]
        if last:
            self._end("")
        given, self._found = self._found.parsed(), _Found()
        return given

    def _watched(self) -> list[tuple[Field | None, Delimiter]]:
        """Delimiters that count now, with the field that begins there; None for the end of this one."""
        this = self._field
        ends: list[tuple[Field | None, Delimiter]] = []
        if this is not None and this.closing is not None:
            ends = [(None, this.closing)]
        if this is not self._template.rest:
            return ends
        return [*self._opened_fields, *ends]

    def _next(self, at: int, *, last: bool) -> tuple[Field | None, Place] | None:
        """The delimiter that comes first, of several the longest, if nothing to come can change that."""
        watched = self._watched()
        places = [(found, place) for found, each in watched if (place := each.find(self._buffer, at)) is not None]
        if not places:
            return None
        found, place = min(places, key=lambda each: (each[1].start, -each[1].end))
        if not last and min(each.held(self._buffer, at) for _, each in watched) <= place.start:
            return None
        return found, place

    def _take(self, text: str) -> None:
        """Text of the field at hand."""
        if self._field is None or not text:
            return
        if self._field.name == CALLS:
            self._body += text
        else:
            into = self._found.text if self._field.name == ANSWER else self._found.reasoning
            into.append(PRIVATE.sub("", text))

    def _end(self, closing: str) -> None:
        """The field at hand is over."""
        if self._field is None or self._field.name != CALLS:
            return
        body, self._body = self._body, ""
        try:
            calls = self._field.calls(body, self._groups)
        except (ValueError, TypeError, KeyError, AttributeError):
            self._found.text.append(self._template.written(f"{self._opened}{body}{closing}"))
        else:
            self._found.tool_calls += calls


def begun_reply(template: ResponseTemplate, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> str | None:
    """What a prompt has of the reply, for `ReplyParser`; None where it opens none, and goes on as plain text."""
    if template.controls and template.controls.keys().isdisjoint(prompt_ids):
        return None
    length = TAIL
    while True:
        text = _text(template, tokenizer, prompt_ids[-length:])
        place, start = None, 0
        while (found := template.start.find(text, start)) is not None:
            place, start = found, found.end
        if place is not None:
            return text[place.end :]
        if length >= len(prompt_ids):
            return None
        length *= 8


def _text(template: ResponseTemplate, tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """The text of tokens, with the characters of control tokens."""
    parts, run = [], list[int]()
    for token_id in token_ids:
        if token_id in template.controls:
            parts += [PRIVATE.sub("", tokenizer.decode(run)), template.controls[token_id]]
            run = []
        else:
            run.append(token_id)
    return "".join([*parts, PRIVATE.sub("", tokenizer.decode(run))])
