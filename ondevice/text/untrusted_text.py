"""Control tokens that an untrusted text spells become plain characters, however they are spelled.

These texts are untrusted: the messages of users and tools, the names and arguments of calls (a model repeats text that
it read), the declarations of tools (they come from servers) and all other variables that an application passes to the
template. A system message is the application's own. Text of the model keeps its control tokens, because templates look
for them to drop old thoughts; not so gpt-oss's, which refuses them: there a model that explains its format only spells
them.

1. Before the template is rendered, a mark (the character MARK) is put into every control token that an untrusted text
   spells. The text's first or last character gets one too where the template or the next text may complete a control
   token there (`<` before `think>`). So conditions in the template find no control token either.
2. The marks are taken out of the rendered text, which is encoded in one piece, as transformers encodes it. A control
   token in the result is forged if a mark was inside of it. If no token is forged, the ids are final.
3. Otherwise the text is cut at the marks inside forged tokens, and its parts are encoded again, until no token is
   forged. Then the parts between two control tokens of the template are joined and encoded in one piece, if the
   tokenizer can read special tokens as text; added tokens that are not special can only be cut.
"""

from __future__ import annotations

import re
import secrets
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from ondevice.errors import PromptError
from ondevice.text.chat_template import ChatTemplate
from ondevice.text.tokenizer import Found, Tokenizer

MARK = "\U000e01ef"
"""Variation selector 256, which no text needs, and which is removed from untrusted texts. Python prints it in a list as
it is, unlike private characters.
"""

UNTRUSTED = ("user", "tool")
"""Roles whose messages neither the application nor the model writes."""


class _Part(NamedTuple):
    """A part of a text: where it begins, its token ids, and the control tokens among them, placed in the whole text."""

    start: int
    ids: list[int]
    controls: list[Found]


class UntrustedText:
    """Renders a chat and encodes it, with control tokens only where the template, the application or the model wrote
    them.

    Control tokens are the special tokens and the added tokens that act as such: those that `acting` names, and those
    that the chat template writes. Other added tokens are ordinary text: of Gemma 3's 6,415, most are runs of line
    breaks and HTML tags.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate, acting: Iterable[int] = (), *, answers: bool = False
    ) -> None:
        """
        Args:
            acting: ids of the tokens that end a reply, of media, and of the response template.
            answers: whether the text of the model is untrusted too.
        """
        self._tokenizer, self._template, self._acting = tokenizer, template, frozenset(acting)
        self._roles = (*UNTRUSTED, "assistant") if answers else UNTRUSTED

    def render(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], begun: str | None = None
    ) -> str:
        """The text that the template makes of messages and other variables, with marks.

        Args:
            begun: the text of the last message, after which the text ends; None opens a reply after all messages.

        Raises:
            PromptError: the template refuses them, or does not write the last message.
        """
        marked = {name: _each(value, self._marked) for name, value in variables.items()}
        safe = [{**message, **self._marked_fields(message)} for message in messages]
        if begun is None:
            return self._template.render(safe, **marked)
        end = secrets.token_hex(16)  # after the text: templates trim white space, and close the message
        safe[-1]["content"] = (self._marked(begun) if "assistant" in self._roles else begun) + end
        text, found, _ = self._template.render(safe, add_generation_prompt=False, **marked).rpartition(end)
        if not found:
            raise PromptError("this bundle's chat template does not write the last message: it cannot be continued")
        return text

    def encode(self, text: str) -> list[int]:
        """Token ids of a rendered text."""
        if MARK not in text:
            return self._tokenizer.encode(text, add_special_tokens=False)
        pieces = text.split(MARK)
        plain, marks = "".join(pieces), list(accumulate(map(len, pieces[:-1])))
        parts = self._cut(plain, lambda start, stop: _marks_inside(marks, start, stop))
        return parts[0].ids if len(parts) == 1 else self._joined(plain, parts)

    @cached_property
    def ids(self) -> frozenset[int]:
        """Ids of the control tokens."""
        tokenizer, written = self._tokenizer, self._template.written
        normalized = tokenizer.normalized(written)
        # A single character or white space acts as what it is, and has no other spelling.
        acting = {
            token_id
            for token_id, token in tokenizer.added.items()
            if len(token.content.strip()) > 1
            and (
                token_id in self._acting
                or token.content in written
                or (token.normalized and tokenizer.normalized(token.content) in normalized)
            )
        }
        return tokenizer.special_ids | acting

    @cached_property
    def _texts(self) -> frozenset[str]:
        """Texts of the control tokens, as they are and normalised."""
        texts = {self._tokenizer.text_of(token_id) for token_id in self.ids}
        if not self._is_literal:
            texts |= set(map(self._tokenizer.normalized, texts))
        return frozenset(texts - {""})

    @cached_property
    def _is_literal(self) -> bool:
        """Whether a control token has one spelling: none is found in normalised text, or made by the model itself."""
        tokenizer = self._tokenizer
        normalizes = any(tokenizer.added[each].normalized for each in self.ids if each in tokenizer.added)
        makes = self.ids - self._unknown
        return not (normalizes and tokenizer.normalizes) and all(
            makes.isdisjoint(tokenizer.made_by_model(tokenizer.text_of(each))) for each in makes
        )

    @cached_property
    def _unknown(self) -> frozenset[int]:
        """The special token of characters that the vocabulary lacks; none where it has all bytes."""
        return self.ids & set(self._tokenizer.encode("\U0010fffd", add_special_tokens=False))

    @cached_property
    def _beginnings(self) -> frozenset[str]:
        return frozenset(text[:length] for text in self._texts for length in range(1, len(text)))

    @cached_property
    def _ends(self) -> frozenset[str]:
        return frozenset(text[start:] for text in self._texts for start in range(1, len(text)))

    @cached_property
    def _firsts(self) -> frozenset[str]:
        """First characters, mostly one or two: few texts have them, and only these are searched for every token."""
        return frozenset(text[0] for text in self._texts)

    @cached_property
    def _lasts(self) -> frozenset[str]:
        return frozenset(text[-1] for text in self._texts)

    @cached_property
    def _middles(self) -> frozenset[str]:
        """Texts that the template may extend on both sides to a control token, as by `'<' ~ name ~ '>'`. Names and
        words that the template itself compares with are left out.
        """
        written = self._template.written
        made = set[str]()
        for text in self._texts:
            starts = [start for start in range(1, len(text)) if text[:start] in written]
            stops = [stop for stop in range(2, len(text)) if text[stop:] in written]
            made |= {text[start:stop] for start in starts for stop in stops if start < stop}
        return frozenset(made.difference(re.findall(r"[.'\"](\w+)", written)))

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._texts), default=0)

    def _marked_fields(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """The untrusted fields of a message. A role and a part's type are words that were checked."""
        role, content = message["role"], message.get("content")
        if role not in (*UNTRUSTED, "assistant"):
            return {}
        made = {name: _each(value, self._marked) for name, value in message.items() if name not in ("role", "content")}
        if role not in self._roles or "content" not in message:
            return made
        marked = _each(content, self._marked)
        if isinstance(content, list):
            marked = [{**new, "type": old["type"]} for new, old in zip(marked, content, strict=True)]
        return {**made, "content": marked}

    def _marked(self, text: str) -> str:
        """An untrusted text with marks."""
        text = text.replace(MARK, "")
        marks = list[int]()
        for control in self._texts if any(first in text for first in self._firsts) else ():
            start = text.find(control)
            while start >= 0:
                marks += _inside(start, start + len(control))
                start = text.find(control, start + 1)
        if not self._is_literal:
            marks = self._found(text, marks)
        marks += self._marks_at_ends(text)
        if not marks:
            return text
        places = sorted({0, *marks, len(text)})
        pieces = [text[start:stop] for start, stop in pairwise(places)]
        return (MARK if 0 in marks else "") + MARK.join(pieces) + (MARK if len(text) in marks else "")

    def _found(self, text: str, marks: Iterable[int]) -> list[int]:
        """The given marks and further ones, so that the tokenizer finds no control token between two of them."""
        known, found = list[int](), set(marks)

        def inside(start: int, stop: int) -> list[int]:
            found.update(places := _inside(start, stop))
            return [*places, *_marks_inside(known, start, stop)]

        while True:
            known = sorted(found)
            self._cut(text, inside)
            if len(found) == len(known):
                return known

    def _marks_at_ends(self, text: str) -> list[int]:
        """Positions of marks before the first and after the last character of a text, where a control token may reach
        across the end of the text. White space at the ends, which templates trim, does not count as its characters.
        """
        core = text.strip()
        if not core:
            return []
        start = text.index(core[0])
        near = self._longest if self._is_literal else 8 * self._longest  # normalised, it may be shorter
        heads, tails = [core[:near]], [core[-near:]]
        if not self._is_literal:
            heads, tails = ([*each, *map(self._tokenizer.normalized, each)] for each in (heads, tails))
        lengths = range(1, self._longest)
        ended = (head for head in heads if not self._lasts.isdisjoint(head))
        begun = (tail for tail in tails if not self._firsts.isdisjoint(tail))
        marks = [start] if any(head[:length] in self._ends for head in ended for length in lengths) else []
        if any(tail[-length:] in self._beginnings for tail in begun for length in lengths) or (
            len(core) <= near and not self._middles.isdisjoint(heads)
        ):
            marks.append(start + len(core))
        return marks

    def _cut(self, text: str, inside: Callable[[int, int], list[int]]) -> list[_Part]:
        """The parts of a text after it was cut inside its forged tokens.

        Args:
            inside: gets start and stop of a control token; returns the positions to cut at, none if it is not forged.
        """
        done, left = list[_Part](), [(0, text)]
        while left:
            parts = [*{part for _, part in left}]  # a text of forged tokens repeats itself
            encoded = dict(zip(parts, self._tokenizer.find(parts, self.ids), strict=True))
            cut = list[tuple[int, str]]()
            for begin, part in left:
                ids, found = encoded[part]
                controls = [
                    Found(each.number, begin + each.start, begin + each.stop)
                    for each in found
                    if self._is_control(ids[each.number], part[each.start : each.stop])
                ]
                stop = begin + len(part)
                places = {place for each in controls for place in inside(*_core(each, text)) if begin < place < stop}
                if places:
                    ends = [begin, *sorted(places), stop]
                    cut += [(start, text[start:end]) for start, end in pairwise(ends)]
                elif len(part) == 1 and controls and inside(begin, begin + 1):
                    done.append(_Part(begin, self._tokenizer.bytes_of(part), []))
                else:
                    done.append(_Part(begin, ids, controls))
            left = cut
        return sorted(done)

    def _is_control(self, token_id: int, text: str) -> bool:
        """Whether a token acts as a control token: the token of unknown characters does so only in its own spelling."""
        return token_id not in self._unknown or text.strip() == self._tokenizer.text_of(token_id)

    def _joined(self, text: str, parts: Sequence[_Part]) -> list[int]:
        """Token ids of a text that was cut. Parts between two control tokens are encoded in one piece, where that makes
        no control token of them.
        """
        made, pieces, start = list[int](), list[list[int]](), 0

        def finish(stop: int) -> None:
            if len(pieces) > 1:
                [(ids, found)] = self._tokenizer.find([text[start:stop]], self.ids, parse_special=False)
                if not any(
                    self._is_control(ids[each.number], text[start:stop][each.start : each.stop]) for each in found
                ):
                    pieces[:] = [ids]
            for ids in pieces:
                made.extend(ids)
            pieces.clear()

        for part in parts:
            number = 0
            for control in part.controls:
                pieces.append(part.ids[number : control.number])
                finish(control.start)
                made.append(part.ids[control.number])
                number, start = control.number + 1, control.stop
            pieces.append(part.ids[number:])
        finish(len(text))
        return made


def _inside(start: int, stop: int) -> list[int]:
    """Positions of the marks of a control token: after its first character, or on both sides of a single character."""
    return [start + 1] if stop - start > 1 else [start, stop]


def _marks_inside(marks: Sequence[int], start: int, stop: int) -> list[int]:
    """Marks at the positions `_inside` a control token, ascending. marks : all of them, ascending"""
    first, last = bisect_right(marks, start), bisect_left(marks, stop)
    if stop - start > 1:
        return [*marks[first:last]]
    return [start, stop] if marks[first - 1 : first] == [start] and marks[last : last + 1] == [stop] else []


def _core(token: Found, text: str) -> tuple[int, int]:
    """Start and stop of a token in a text, without the white space around it that some added tokens include."""
    found = text[token.start : token.stop]
    start = token.start + len(found) - len(found.lstrip())
    return (start, start + len(found.strip())) if found.strip() else (token.start, token.stop)


def _each(value: Any, change: Callable[[str], str]) -> Any:
    """The value with every string in it changed, including keys."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_each(key, change): _each(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [_each(item, change) for item in value]
    return value
