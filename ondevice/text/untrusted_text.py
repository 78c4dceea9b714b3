"""Untrusted text in a chat becomes plain characters, never a control token, however it is spelled.

Untrusted are the messages of users and tools, the names and arguments of calls (a model repeats text that it read), the
declarations of tools (they come from servers) and all other variables that an application passes to the template. A
system message is the application's own. Text of the model keeps its control tokens, because templates look for them to
drop old thoughts.

The template renders these texts as `MarkedText`, so each character of the prompt is known to be untrusted or not. The
prompt is encoded in one piece, as transformers encodes it, and then its token ids are looked at: a control token of
which one character is untrusted was forged. Only then, and only between the two control tokens of the template around
it, the text is encoded in parts. So a prompt without a forged token costs no more than its encoding, and tokens are
found as the tokenizer itself finds them: normalised, in lower case, without the spaces around them, or joined from
pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

from ondevice.text.chat_template import ChatTemplate
from ondevice.text.marked_text import MarkedText
from ondevice.text.tokenizer import Found, Tokenizer

UNTRUSTED = ("user", "tool")
"""Roles whose messages neither the application nor the model writes."""


def marked_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with marks on their untrusted texts."""
    return [{**message, **_marked_fields(message)} for message in messages]


def marked_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with marks on all texts in them, including keys."""
    return {name: _marked(value) for name, value in values.items()}


def _marked(value: Any) -> Any:
    if isinstance(value, str):
        return MarkedText(value)
    if isinstance(value, Mapping):
        return {_marked(key): _marked(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_marked(item) for item in value]
    return value


def _marked_fields(message: Mapping[str, Any]) -> dict[str, Any]:
    """The untrusted fields of a message. A role and the type of a part are one of a few words, which were checked."""
    role, content = message["role"], message.get("content")
    if role not in (*UNTRUSTED, "assistant"):
        return {}
    made = marked_values({name: value for name, value in message.items() if name not in ("role", "content")})
    if role == "assistant" or "content" not in message:
        return made
    if isinstance(content, list):
        return {**made, "content": [{**_marked(part), "type": part["type"]} for part in content]}
    return {**made, "content": _marked(content)}


class ControlTokens:
    """The tokens that act as control in a bundle's chats; encodes prompts in which only trusted text has them.

    These are the special tokens, those that end a reply, the placeholders of pictures and sounds, and every added token
    that the chat template or the response template writes. Other added tokens are ordinary text: of Gemma 3's 6,415,
    most are runs of line breaks and HTML tags.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, acting: Iterable[int] = ()) -> None:
        """
        Args:
            tokenizer, template: the bundle's; kept under these names.
            acting: ids of the tokens that end a reply, of placeholders, and of the response template.
        """
        self.tokenizer, self.template, self._acting = tokenizer, template, frozenset(acting)

    @cached_property
    def ids(self) -> frozenset[int]:
        """Ids of the control tokens."""
        tokenizer, written = self.tokenizer, self.template.written
        ordinary = {each: token for each, token in tokenizer.added.items() if not token.special}
        normalized = tokenizer.normalized(written) if any(token.normalized for token in ordinary.values()) else ""
        found = {
            each
            for each, token in ordinary.items()
            if token.content in written or (token.normalized and tokenizer.normalized(token.content) in normalized)
        }
        # A single character or white space acts as what it is, and cannot be written in another way.
        spelled = {each for each in found | self._acting if len(tokenizer.text_of(each).strip()) > 1}
        return tokenizer.special_ids | spelled

    def encode(self, prompt: str) -> list[int]:
        """Token ids of a rendered prompt."""
        [(ids, found)] = self.tokenizer.encode_and_find([str.__str__(prompt)], self.ids)
        if not isinstance(prompt, MarkedText):
            return ids
        if self._can_be_undone:
            kept = [token.token_id for token in found if not self._is_forged(token, prompt)]
            if kept != self._written_alone(prompt):
                return self._in_parts(prompt)
        made, begin, start, forged = list[int](), 0, 0, list[Found]()
        for token in [*found, Found(len(ids), -1, len(prompt), len(prompt))]:
            if token.token_id >= 0 and self._is_forged(token, prompt):
                forged.append(token)
                continue
            made += self._between(prompt, start, token.start, forged) if forged else ids[begin : token.number]
            made += ids[token.number : token.number + 1]
            begin, start, forged = token.number + 1, token.stop, []
        return made

    @cached_property
    def _unknown(self) -> frozenset[int]:
        """The special token of characters that the vocabulary lacks, which is none where it has all bytes."""
        [(ids, _)] = self.tokenizer.encode_and_find(["\U0010fffd"], (), parse_special=False)
        return self.tokenizer.special_ids & frozenset(ids)

    @cached_property
    def _can_be_undone(self) -> bool:
        """Whether untrusted text next to a control token of the template can keep it from being found."""
        normalizes = self.tokenizer.normalized("A \ufb01") != "A \ufb01"
        added = (self.tokenizer.added[each] for each in self.ids if each in self.tokenizer.added)
        return any(token.single_word or (token.normalized and normalizes) for token in added)

    def _is_forged(self, token: Found, text: MarkedText) -> bool:
        start, stop = _core(token, text)
        return text.touches(start, stop) and self._acts(token, text)

    def _acts(self, token: Found, text: str) -> bool:
        """Whether this is no token of characters that the vocabulary lacks."""
        start, stop = _core(token, text)
        return token.token_id not in self._unknown or text[start:stop] == self.tokenizer.text_of(token.token_id)

    def _written_alone(self, prompt: MarkedText) -> list[int]:
        """The control tokens of the trusted parts."""
        parts = [part for part, untrusted in prompt.parts() if not untrusted]
        encoded = self.tokenizer.encode_and_find(parts, self.ids)
        return [token.token_id for _, found in encoded for token in found]

    def _between(self, prompt: MarkedText, start: int, stop: int, forged: Sequence[Found]) -> list[int]:
        """Token ids of the text between two control tokens of the template, where others were forged."""
        text = prompt.cut(start, stop)
        if all(prompt.covers(*_core(token, prompt)) for token in forged):
            [(ids, found)] = self.tokenizer.encode_and_find([str.__str__(text)], self.ids, parse_special=False)
            if not any(self._acts(token, text) for token in found):
                return ids
        return self._in_parts(text)

    def _in_parts(self, text: str) -> list[int]:
        """Token ids of a text whose trusted and untrusted parts are encoded one by one."""
        made = list[int]()
        for part, untrusted in text.parts() if isinstance(text, MarkedText) else [(text, False)]:
            made += self._as_text(part) if untrusted else self.tokenizer.encode(part, add_special_tokens=False)
        return made

    def _as_text(self, text: str) -> list[int]:
        """Token ids of an untrusted text, without control tokens.

        Special tokens are not looked for. What is found of others is cut behind its first letter, and both sides are
        encoded again, until nothing is found. A single character that has no other token is left out.
        """
        done, left = dict[int, list[int]](), {0: text}
        while left:
            parts = sorted(set(left.values()))  # a text of forged tokens repeats itself
            encoded = self.tokenizer.encode_and_find(parts, self.ids, parse_special=False)
            found = {
                part: (ids, [token for token in tokens if self._acts(token, part)])
                for part, (ids, tokens) in zip(parts, encoded, strict=True)
            }
            cut = dict[int, str]()
            for place, part in left.items():
                ids, tokens = found[part]
                if not tokens:
                    done[place] = ids
                elif len(part) > 1:
                    cut |= {place + start: part[start:stop] for start, stop in _cuts(part, tokens)}
            left = cut
        return [token for place in sorted(done) for token in done[place]]


def _core(token: Found, text: str) -> tuple[int, int]:
    """Where a token's own characters begin and end: without the white space around it that some tokens take along."""
    found = str.__getitem__(text, slice(token.start, token.stop))
    start = token.start + len(found) - len(found.lstrip())
    return (start, start + len(found.strip())) if found.strip() else (token.start, token.stop)


def _cuts(text: str, found: Iterable[Found]) -> Iterator[tuple[int, int]]:
    """The parts of a text of several characters that is cut in each token."""
    places = {0, len(text)}
    for token in found:
        start, stop = _core(token, text)
        places.add(min(start + 1, len(text) - 1))
        if stop - start < 2:
            places.add(start)
    return pairwise(sorted(places))
