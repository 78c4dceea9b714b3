"""Token ids in, final text out, one token at a time."""

from __future__ import annotations

from ondevice.text.tokenizer import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

WINDOW = 16
"""Most tokens decoded at a time. A character has at most 4 bytes and a token at least one, so 4 would be enough."""


class Detokenizer:
    """Incremental decoding: what `feed` and `flush` return adds up to `Tokenizer.decode` of all tokens, always.

    A token's text depends on its neighbours: a character may be spread over several tokens, and decoders strip the
    space of the first word. So a short window of recent tokens is decoded, and what it says beyond the text already
    given is new. Three things are never given too early:

    1. A last U+FFFD: it may be the first bytes of a character that the next token completes.
    2. A run of byte-fallback tokens (`<0xE2>`): the decoder judges a whole run, and one bad byte late in it turns all
       of it into U+FFFD.
    3. Control tokens: they have no text, and do not end a run either.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._run: list[int] = []
        self._given = 0
        """Characters of the window's text that were returned already."""

    def feed(self, token_id: int) -> str:
        """The text that this token makes final; often empty."""
        if token_id in self._tokenizer.special_ids:
            return ""
        if token_id in self._tokenizer.byte_ids:
            self._run.append(token_id)
            return ""
        self._window += [*self._run, token_id]
        self._run = []
        return self._advance()

    def flush(self) -> str:
        """What was still held back, at the end of the sequence."""
        text = self._tokenizer.decode(self._window + self._run)[self._given :]
        self._window, self._run, self._given = [], [], 0
        return text

    def interrupt(self) -> str:
        """What was held back, because a token follows that is no text, and text after that."""
        last = (self._window + self._run)[-1:]
        text = self.flush()
        before = self._tokenizer.decode(last)
        if before and REPLACEMENT not in before and not self._tokenizer.byte_ids.intersection(last):
            # What comes is not the first word, whose space some decoders strip.
            self._window, self._given = last, len(before)
        return text

    def _advance(self) -> str:
        text = self._tokenizer.decode(self._window)
        final = len(text) - text.endswith(REPLACEMENT)
        new = text[self._given : final]
        self._given = final
        if final == len(text) or len(self._window) > WINDOW:
            self._shorten(held=len(text) - final)
        return new

    def _shorten(self, held: int) -> None:
        """Keep as few tokens as still decide how the next one reads.

        Cutting a character in half is harmless: its second half reads the same U+FFFD before and after the next token.
        An empty text is not: the decoder would strip the next word's space as if it were the first.
        """
        keep = 1 if held == 0 else 4
        while keep < len(self._window):
            text = self._tokenizer.decode(self._window[-keep:])
            if len(text) > held:
                self._window = self._window[-keep:]
                self._given = len(text) - held
                return
            keep *= 2
