"""Token ids of a reply to its text, thoughts and tool calls, as rounds come in."""

from __future__ import annotations

from bisect import bisect_right
from codecs import getincrementaldecoder
from collections.abc import Iterable, Sequence

from ondevice.errors import UsageError
from ondevice.text.reply_parser import Parsed, ReplyParser, Trimmed
from ondevice.text.tokenizer import REPLACEMENT, Tokenizer


class ReplyStream:
    """Detokenises, parses and cuts a reply at a stop string or after a call.

    Call `feed` with the token ids of each round, and `finish` at the end; the sum of the results is the reply. Without
    a parser all of it is text. Stop strings are searched for in the answer, not in thoughts and calls: a line break
    that ends an answer must not end a thought.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: str | Iterable[str] | None = (),
        parser: ReplyParser | None = None,
        *,
        single_call: bool = False,
        before: Sequence[int] = (),
    ) -> None:
        """
        Args:
            single_call: whether the reply ends after its first tool call.
            before: the last token of the text that the reply continues; none where it begins a text.
        """
        self._detokenizer = Detokenizer(tokenizer, before)
        self._stops = StopStrings(stops)
        self._parser = parser
        self._answer = Trimmed(trims=parser is not None and parser.strips_text, at_start=not before)
        self._thoughts = Trimmed(trims=parser is not None and parser.strips_reasoning)
        self._single_call = single_call
        self._called = False
        """Whether the only call has ended the reply."""
        self._fed = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found, or the only call: the reply is complete, and generation can end."""
        return self._stops.found is not None or self._called

    @property
    def stop_string(self) -> str | None:
        """The stop string that was found."""
        return self._stops.found

    @property
    def final_tokens(self) -> int:
        """Number of tokens that belong to the reply for certain: fewer than were fed while a stop string may begin in
        them, and after one was found.
        """
        return self._fed if self._called else self._stops.final_tokens

    def feed(self, token_ids: Iterable[int]) -> Parsed:
        """The text, thoughts and calls that these tokens make final. Tokens after the end of the reply are ignored."""
        given = Parsed()
        for token_id in token_ids:
            if self.stopped:
                break
            self._fed += 1
            parsed = self._parsed(token_id)
            text = self._stops.push(parsed.text)
            if self._single_call and parsed.tool_calls:
                self._called = True
                text += self._stops.finish()
            given = given.then(self._trimmed(parsed, text))
        return given

    def finish(self) -> Parsed:
        """The parts that were held back, at the end of the reply."""
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
        calls = parsed.tool_calls[:1] if self._single_call else parsed.tool_calls
        return Parsed(self._answer.feed(text), self._thoughts.feed(parsed.reasoning), calls)


class StopStrings:
    """Cuts a stream of text before the stop string that is complete first.

    Every `push` is one token's text. The outcome depends on the text alone, not on how tokens or drafted batches
    divide it: of several stop strings the one that ends first wins, and of those that end together the longest, as if
    the text came character by character.
    """

    def __init__(self, stops: str | Iterable[str] | None = ()) -> None:
        self._stops = (stops,) if isinstance(stops, str | bytes) else tuple(stops or ())
        for stop in self._stops:
            if not isinstance(stop, str) or not stop:
                raise UsageError(f"a stop string must be a non-empty string, not {stop!r}")
        self._held = ""
        self._given = 0
        self._ends: list[int] = []
        """End of each token's text in the whole text."""
        self.found: str | None = None
        """The stop string that ended the text."""

    @property
    def final_tokens(self) -> int:
        """Number of tokens that belong to the reply for certain: no further text makes theirs part of a stop string.

        After a match these are all tokens of the text that is kept, including one that reaches beyond the cut. The
        number depends on the tokens alone, not on how rounds divide them.
        """
        count = bisect_right(self._ends, self._given)
        reached = self._ends[count - 1] if count else 0
        return count + 1 if self.found is not None and reached < self._given else count

    def push(self, text: str) -> str:
        """Add one token's text and return the text that is final now; after a match that is the empty text."""
        if self.found is not None:
            return ""
        self._ends.append(self._given + len(self._held) + len(text))
        return self._advance(text, last=False)

    def finish(self, text: str = "") -> str:
        """End the stream: add the last text, which belongs to no further token, and return the text held back."""
        if self.found is not None:
            return ""
        if self._ends:
            self._ends[-1] += len(text)
        return self._advance(text, last=True)

    def _advance(self, text: str, *, last: bool) -> str:
        self._held += text
        # by their ends, then by their beginnings
        matches = [(at + len(stop), at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if matches:
            _, cut, self.found = min(matches)
        else:
            cut = len(self._held) - (0 if last else self._open_suffix())
        text, self._held = self._held[:cut], self._held[cut:]
        self._given += len(text)
        return text

    def _open_suffix(self) -> int:
        """Length of the longest suffix of the held text that begins a stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return length
        return 0


class TokenOffsets:
    """Where the tokens of a text begin in it, in characters, as they come in.

    A token within a character begins where the character does. A control token that the text does not spell out, such
    as the one that begins every prompt, takes no room.
    """

    def __init__(self, tokenizer: Tokenizer, begin: int = 0, spelling: str = "", *, continues: bool = False) -> None:
        """
        Args:
            begin: where the first token begins.
            spelling: the text, if it may spell control tokens out, as a prompt may.
            continues: whether it continues another text, so that its first word keeps its space.
        """
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, tokenizer.any_word if continues else ())
        self._at = begin
        self._spelling = spelling
        self._run = getincrementaldecoder("utf-8")("ignore")
        """The characters of byte-fallback tokens, which the detokenizer holds back."""
        self._held = 0
        """Number of these that are complete."""

    def add(self, token_ids: Iterable[int]) -> list[int]:
        """Where the next tokens begin."""
        found = []
        for token_id in token_ids:
            if token_id in self._tokenizer.special_ids:
                self._at += len(self._detokenizer.interrupt())
                found.append(self._at)
                spelt = self._tokenizer.decode([token_id], keep_special=True)
                self._at += len(spelt) if self._spelling.startswith(spelt, self._at) else 0
                self._end_run()
            else:
                begin, own = self._at + self._held, self._tokenizer.token_bytes(token_id)
                self._at += len(self._detokenizer.feed(token_id))
                if token_id in self._tokenizer.byte_ids:
                    self._held += len(self._run.decode(own))
                else:
                    self._end_run()
                    # a character that was never completed is U+FFFD, and comes with this token's text
                    begin = max(begin, self._at - len(getincrementaldecoder("utf-8")("replace").decode(own)))
                found.append(begin)
        return found

    def _end_run(self) -> None:
        self._run.reset()
        self._held = 0


WINDOW = 16
"""Most tokens decoded at once. A character has at most 4 bytes and a token at least one, so 4 would be enough."""


class Detokenizer:
    """Incremental decoding: the sum of what `feed` and `flush` return is `Tokenizer.decode` of all tokens.

    A token's text depends on its neighbours: a character may be spread over several tokens, and decoders strip the
    space of the first word. So a short window of recent tokens is decoded, and its text beyond the text already
    returned is new. Three things are held back:

    1. A trailing U+FFFD: it may be the first bytes of a character that the next token completes.
    2. A run of byte-fallback tokens (`<0xE2>`): the decoder reads a whole run, and one bad byte late in it turns all
       of it into U+FFFD.
    3. Control tokens: they have no text, and do not end a run either.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()) -> None:
        """
        Args:
            before: the last token of the text that the sequence continues; none where it begins a text.
        """
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._run: list[int] = []
        self._given = 0
        """Number of characters of the window's text that were returned already."""
        self._follow(before)

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
        """The text that was held back, at the end of the sequence."""
        text = self._tokenizer.decode(self._window + self._run)[self._given :]
        self._window, self._run, self._given = [], [], 0
        return text

    def interrupt(self) -> str:
        """The text that was held back, where a token without text follows and more text after it."""
        last = (self._window + self._run)[-1:]
        text = self.flush()
        self._follow(last)
        return text

    def _follow(self, last: Sequence[int]) -> None:
        """Let the next text follow a token: its word is not the first, whose space some decoders strip."""
        before = self._tokenizer.decode(last)
        if before and REPLACEMENT not in before and not self._tokenizer.byte_ids.intersection(last):
            self._window, self._given = [*last], len(before)

    def _advance(self) -> str:
        text = self._tokenizer.decode(self._window)
        final = len(text) - text.endswith(REPLACEMENT)
        new = text[self._given : final]
        self._given = final
        if final == len(text) or len(self._window) > WINDOW:
            self._shorten(held=len(text) - final)
        return new

    def _shorten(self, held: int) -> None:
        """Keep as few tokens as still determine the text of the next one.

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
