"""The text of a generation as its rounds come in: detokenised, and cut at a stop string."""

from __future__ import annotations

from collections.abc import Iterable

from ondevice.text.detokenizer import Detokenizer
from ondevice.text.stop_strings import StopStrings
from ondevice.text.tokenizer import Tokenizer


class TextStream:
    """Feed it the token ids of each round, and `finish` at the end; what they return adds up to the reply's text."""

    def __init__(self, tokenizer: Tokenizer, stops: str | Iterable[str] | None = ()) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(stops)

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

    def feed(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens make final. Tokens after a stop string are ignored."""
        text = ""
        for token_id in token_ids:
            if self.stopped:
                break
            text += self._stops.push(self._detokenizer.feed(token_id))
        return text

    def finish(self) -> str:
        """The text still held back when no more tokens follow."""
        if self.stopped:
            return ""
        return self._stops.finish(self._detokenizer.flush())
