"""Tokenizer of a bundle (`tokenizer.json`): strings to token ids and back."""

from __future__ import annotations

import base64
import json
import math
import re
import threading
from collections.abc import Sequence, Set
from functools import cache, cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from ondevice import machine
from ondevice.errors import BundleCorruptError, PromptError, pass_on, reason

MAX_GROWTH, MAX_ADDED, MAX_PROCESSOR = 64, 1024, 1 << 14
"""Most characters that a normaliser or a decoder may make of one, and add to a text; bytes of JSON of a post-processor,
which names each token that it puts around a text. Published ones make 1 of 1, and have 2 KB."""

LONG = 1 << 14
"""Characters from which a text is encoded without keeping other threads from running."""

INSIDE = "\x00"
"""A character that no token has together with others, so that it changes none after it."""

MAX_AT_ONCE = 1 << 12
"""Texts that are encoded at once: each takes a kilobyte."""

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""The text of bytes that are not UTF-8."""


@cache
def _byte_characters() -> dict[str, int]:
    """The bytes that characters stand for in byte-level vocabularies, as GPT-2 has them. To make them takes 0.5 ms."""
    own = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(256 + number): byte for number, byte in enumerate(others)}


class Found(NamedTuple):
    """A token in a text: its number among the text's tokens, and its first character and the one after its last."""

    number: int
    start: int
    stop: int


class Tokenizer:
    """A Hugging Face tokenizer with fixed rules for `<bos>` and for control tokens.

    Args:
        backend: the tokenizer of the `tokenizers` package.
        bos_token_id: the token that is put in front of every text, or None for none.
    """

    def __init__(self, backend: tokenizers.Tokenizer, bos_token_id: int | None = None) -> None:
        # A checkpoint's tokenizer.json may carry the truncation and padding of its training run.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._bos_token_id = bos_token_id
        self._lock = threading.Lock()

    @classmethod
    def from_file(cls, path: str | Path, bos_token_id: int | None = None) -> Tokenizer:
        """Read a `tokenizer.json`.

        Raises:
            BundleCorruptError: the file is missing, or is not a tokenizer.
        """
        path = Path(path)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise BundleCorruptError(f"cannot read {path} ({error}): export the bundle again") from error
        try:
            _check_charsmaps(data)
            backend = tokenizers.Tokenizer.from_buffer(data)  # a string of Gemma's 33 MB would take 0.1 s, and 90 MB
            _check_growth(backend)
        except BaseException as error:  # the library raises nothing narrower
            pass_on(error)
            raise BundleCorruptError(f"{path} is not a tokenizer ({reason(error)}): export the bundle again") from error
        machine.return_free_memory()  # 280 of 390 MB after the parsing of Gemma's
        return cls(backend, bos_token_id)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included. The model may have more rows."""
        return int(self._backend.get_vocab_size())

    @property
    def vocabulary(self) -> dict[str, int]:
        """Token ids by the text of the token."""
        return self._backend.get_vocab()

    @cached_property
    def added(self) -> dict[int, tokenizers.AddedToken]:
        """Tokens that are found in a text before it is divided into others, by id."""
        return self._backend.get_added_tokens_decoder()

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of special tokens, which `decode` leaves out."""
        return frozenset(token_id for token_id, token in self.added.items() if token.special)

    @cached_property
    def control_texts(self) -> dict[int, str]:
        """Texts of the tokens by which replies are read, by id: special tokens, and added tokens in angle brackets,
        which some tokenizers do not mark as special.
        """
        return {
            token_id: token.content
            for token_id, token in self.added.items()
            if token.content and (token.special or (token.content[0] == "<" and token.content[-1] == ">"))
        }

    @cached_property
    def byte_ids(self) -> frozenset[int]:
        """Ids of the byte-fallback tokens `<0x00>` to `<0xFF>` that the vocabulary has."""
        ids = (self._backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        return frozenset(token_id for token_id in ids if token_id is not None)

    @cached_property
    def any_word(self) -> list[int]:
        """A token that is a word by itself: what is decoded after it keeps its space. Empty if there is none."""
        ordinary = (number for number in range(self.vocab_size) if number not in self.added)
        words = (number for number in ordinary if number not in self.byte_ids and self.decode([number]).isalnum())
        return list(islice(words, 1))

    @cached_property
    def longest(self) -> int:
        """Length of the longest token in characters, or in bytes for byte-level vocabularies."""
        return max(map(len, self._backend.get_vocab()), default=1)

    def text_of(self, token_id: int | None) -> str:
        """Text of a token in the vocabulary; empty for None and for ids outside of it."""
        return "" if token_id is None else self._backend.id_to_token(token_id) or ""

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
            add_special_tokens: put `<bos>` in front, exactly once, also where the text starts with it. A rendered chat
                template writes its own: pass False.
            parse_special: read a special token written in the text as that token, not as plain characters.

        Raises:
            PromptError: `text` is not a string, or not valid Unicode.
            BundleCorruptError: the tokenizer fails.
        """
        ids = list(self._encoded([text], add_special_tokens, parse_special)[0].ids)
        return self._with_one_bos(ids[: len(ids) - self._put_behind]) if add_special_tokens else ids

    @cached_property
    def _put_behind(self) -> int:
        """Number of tokens that the tokenizer puts after a text, as the one that ends it: a reply continues it."""
        added = self._encoded(["a"], True, True)[0].special_tokens_mask
        return added[::-1].index(0) if 0 in added else 0

    def encode_inside(self, text: str) -> list[int]:
        """Token ids of a text that continues another one: control tokens in it are plain characters, and it gets no
        space in front, as SentencePiece puts one at the beginning of a text.
        """
        if self._prefix:
            text = INSIDE + text
        ids = self.encode(text, add_special_tokens=False, parse_special=False)
        return ids[len(self._prefix) :]

    @cached_property
    def _prefix(self) -> list[int]:
        """The tokens of INSIDE at the beginning of a text, where a space is put in front of it; else none."""
        ids = self.encode(INSIDE, add_special_tokens=False, parse_special=False)
        return ids if b"".join(map(self.token_bytes, ids)) != INSIDE.encode() else []

    def find(
        self, texts: Sequence[str], wanted: Set[int], *, parse_special: bool = True
    ) -> list[tuple[list[int], list[Found]]]:
        """For each text its token ids, without `<bos>`, and those of `wanted` among them with their places.

        Args, raises: as `encode`.
        """
        made = []
        for first in range(0, len(texts), MAX_AT_ONCE):
            some = texts[first : first + MAX_AT_ONCE]
            for encoding in self._encoded(some, False, parse_special, with_places=True):
                ids = encoding.ids
                numbers = [] if wanted.isdisjoint(ids) else [at for at, token in enumerate(ids) if token in wanted]
                made.append((ids, [Found(at, *(encoding.token_to_chars(at) or (0, 0))) for at in numbers]))
        return made

    @property
    def normalizes(self) -> bool:
        """Whether texts are normalised."""
        return self._backend.normalizer is not None

    def normalized(self, text: str) -> str:
        """The text in which added tokens with `normalized` are found."""
        return text if self._backend.normalizer is None else str(self._backend.normalizer.normalize_str(text))

    def made_by_model(self, text: str) -> list[int]:
        """Token ids that the model makes of a text by itself, without added tokens and normalisation; none if it cannot
        read it.
        """
        try:
            return [token.id for token in self._backend.model.tokenize(text)]
        except BaseException as error:
            pass_on(error)
            return []

    def bytes_of(self, text: str) -> list[int]:
        """Byte-fallback tokens of a text; none if the vocabulary lacks them."""
        ids = [self._backend.token_to_id(f"<0x{byte:02X}>") for byte in text.encode()]
        return [token_id for token_id in ids if token_id is not None]

    def _encoded(
        self, texts: Sequence[str], add_special_tokens: bool, parse_special: bool, *, with_places: bool = False
    ) -> list[tokenizers.Encoding]:
        try:
            # This option belongs to the shared backend, not to a call.
            with self._lock:
                self._backend.encode_special_tokens = not parse_special
                if len(texts) == 1 and len(texts[0]) < LONG:
                    return [self._backend.encode(texts[0], add_special_tokens=add_special_tokens)]
                encode = self._backend.encode_batch if with_places else self._backend.encode_batch_fast
                return list(encode([*texts], add_special_tokens=add_special_tokens))
        except (TypeError, UnicodeEncodeError) as error:
            raise PromptError(_why_not_text(texts[0])) from error
        except BaseException as error:
            raise _failure("encode", error) from error

    def fewest_tokens(self, text: str) -> int:
        """A lower bound of the number of tokens of a text, without encoding it, which takes 200 bytes per character.

        A token has at most as many characters as the longest one of the vocabulary; 64 are allowed for words outside of
        the vocabulary.
        """
        return len(text) // max(self.longest, 64)

    def decode(self, token_ids: Sequence[int], *, keep_special: bool = False) -> str:
        """The text of tokens, control tokens left out unless kept. Bytes that are not UTF-8 become U+FFFD."""
        try:
            return str(self._backend.decode(list(token_ids), skip_special_tokens=not keep_special))
        except BaseException as error:
            raise _failure("decode", error) from error

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token's text, also where they are a part of a character; control tokens included."""
        text = self.text_of(token_id)
        if token_id in self.byte_ids:
            return bytes([int(text[3:5], 16)])
        before, length = self._before
        decoded = self.decode([*before, token_id], keep_special=True)[length:]
        if REPLACEMENT in decoded and text and all(character in _byte_characters() for character in text):
            return bytes(_byte_characters()[character] for character in text)
        return decoded.encode()

    @cached_property
    def _before(self) -> tuple[list[int], int]:
        """A word, after which tokens are decoded as inside a text, and its length: some decoders strip the space of
        the first word.
        """
        return self.any_word, len(self.decode(self.any_word, keep_special=True))

    def _with_one_bos(self, ids: list[int]) -> list[int]:
        bos = self._bos_token_id
        if bos is None:
            return ids
        start = 0
        while start < len(ids) and ids[start] == bos:
            start += 1
        return [bos, *ids[start:]]


def _failure(doing: str, error: BaseException) -> BundleCorruptError:
    pass_on(error)
    return BundleCorruptError(f"the tokenizer cannot {doing} this ({reason(error)}): export the bundle again")


_TABLE = "precompiled_charsmap"
ESCAPED_LETTER = re.compile(rb"\\u00[5-7]")
"""An escape in JSON that may hide a letter of a name. Escapes of control characters are in many vocabularies."""


def _check_charsmaps(data: bytes) -> None:
    """Refuse a normaliser's table that claims to be longer than it is, for which the library would abort the process,
    or that has no trie, for which each encoding would fail.

    Raises:
        ValueError: there is such a table.
    """
    # Gemma's tokenizer has no such table, and parsing its 33 MB takes half a second.
    if b"Precompiled" in data or ESCAPED_LETTER.search(data):
        json.loads(data, object_pairs_hook=_with_good_tables)


def _with_good_tables(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. All of its fields are looked at: the library reads each of several with one name."""
    fields = dict(pairs)
    if _TABLE in fields:
        for table in (base64.b64decode(value or "") for name, value in pairs if name == _TABLE):
            if not 4 <= int.from_bytes(table[:4], "little") <= len(table) - 4:
                raise ValueError("its character map is damaged")
    return fields


def _check_growth(backend: tokenizers.Tokenizer) -> None:
    """Refuse steps that make a text many times as long: some replacements in a row, in a file of 8 KB, ask for more
    memory than there is, for which the library aborts the process.

    Raises:
        ValueError: there are such steps.
    """
    for step in (backend.normalizer, backend.decoder):
        factor, added = _growth(json.loads(step.__getstate__())) if step is not None else (1, 0)
        if factor > MAX_GROWTH or added > MAX_ADDED:
            raise ValueError("it makes texts many times as long")
    if (processor := backend.post_processor) is not None:
        state = processor.__getstate__()
        if len(state) > MAX_PROCESSOR or _growth(json.loads(state))[0] > 1:
            raise ValueError("it puts too many tokens around a text")


def _growth(node: Any) -> tuple[int, int]:
    """The most characters that a step, or a list of steps, makes of one character, and those that it adds to a text."""
    if isinstance(node, list):
        grown = [_growth(each) for each in node]
        return math.prod(factor for factor, _ in grown), sum(added for _, added in grown)
    if not isinstance(node, dict):
        return 1, 0
    factor, more = _growth([*node.values()])
    content = len(node["content"]) if isinstance(node.get("content"), str) else 0
    if node.get("type") == "Replace":  # a regular expression, or no text, may be found between characters too
        factor *= max(1, content) if node["pattern"].get("String") else 1 + content
    if isinstance(pieces := node.get("single"), list):  # of a post-processor: tokens, and places of the text
        factor *= max(1, sum("Sequence" in piece for piece in pieces))
    return factor, more + len(node.get("prepend") or "")


def _why_not_text(text: object) -> str:
    if isinstance(text, str):
        return "the prompt holds half a surrogate pair, which is not text: decode it as UTF-8 before passing it on"
    return f"a prompt is a string, a list of messages or a list of token ids, not {type(text).__name__}"
