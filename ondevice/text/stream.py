"""A reply as its rounds come in: detokenised, parsed, and cut at a stop string."""

from __future__ import annotations

from collections.abc import Iterable

from ondevice.text.detokenizer import Detokenizer
from ondevice.text.reply_parser import Parsed, ReplyParser
from ondevice.text.stop_strings import StopStrings
from ondevice.text.tokenizer import Tokenizer


class ReplyStream:
    """Feed it the token ids of each round, and `finish` at the end; what they return adds up to the reply.

    Without a parser all of it is text. Stop strings are looked for in the answer, not in thoughts and calls: a line
    break that ends an answer must not end a thought.
    """

    def __init__(
        self, tokenizer: Tokenizer, stops: str | Iterable[str] | None = (), parser: ReplyParser | None = None
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(stops)
        self._parser = parser
        self._answer = _Trimmed(at_start=parser is not None and parser.strips_text)
        self._thoughts = _Trimmed(at_start=parser is not None and parser.strips_reasoning)

    @property
    def stopped(self) -> bool:
        """A stop string was found: the text is complete, generation can end."""
        return self._stops.matched

    @property
    def final_tokens(self) -> int:
        """Of all tokens fed, how many belong to the reply for certain: fewer than fed while a stop string may begin in
        them, and after one was found.
        """
        return self._stops.final_tokens

    def feed(self, token_ids: Iterable[int]) -> Parsed:
        """What these tokens make final. Tokens after a stop string are ignored."""
        given = Parsed()
        for token_id in token_ids:
            if self.stopped:
                break
            parsed = self._parsed(token_id)
            given = given.then(self._trimmed(parsed, self._stops.push(parsed.text)))
        return given

    def finish(self) -> Parsed:
        """What was still held back when no more tokens follow."""
        if self.stopped:
            return Parsed()
        text = self._detokenizer.flush()
        parsed = Parsed(text) if self._parser is None else self._parser.feed(text).then(self._parser.finish())
        return self._trimmed(parsed, self._stops.finish(parsed.text))

    def _parsed(self, token_id: int) -> Parsed:
        if self._parser is None:
            return Parsed(self._detokenizer.feed(token_id))
        if token_id in self._parser.controls:
            return self._parser.feed(self._detokenizer.interrupt()).then(self._parser.control(token_id))
        return self._parser.feed(self._detokenizer.feed(token_id))

    def _trimmed(self, parsed: Parsed, text: str) -> Parsed:
        return Parsed(self._answer.feed(text), self._thoughts.feed(parsed.reasoning), parsed.tool_calls)


class _Trimmed:
    """Text without the white space at both ends: at the end, it is kept back until more text comes."""

    def __init__(self, *, at_start: bool) -> None:
        self._trims = self._at_start = at_start
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
