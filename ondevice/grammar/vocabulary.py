"""A model's vocabulary as llguidance knows it: the bytes of its tokens, their index, and the tokenizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, cast

from ondevice import machine
from ondevice.errors import GrammarError, reason
from ondevice.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer, TokenizerWrapper

ASCII = {bytes([character]) for character in range(ord(" "), ord("~") + 1)}


class GrammarVocabulary:
    """A tokenizer with the attributes of llguidance's `TokenizerWrapper`, which its index reads and calls.

    If llguidance were given the tokenizer's file, it would parse that a second time, and keep it: for Gemma's 262,144
    tokens an index took 3.8 s in place of 1.8, and 220 MB in place of 110. It cannot read Metaspace decoders either.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, size: int, end_ids: Iterable[int]) -> None:
        """
        Args:
            tokenizer: the bundle's.
            size: vocabulary size of the model, which may be larger than that of the tokenizer.
            end_ids: tokens that end a reply.
        """
        self.tokenizer = tokenizer
        self._size = size
        self._end_ids = [*end_ids]
        self._index: LLTokenizer | None = None

    def index(self) -> LLTokenizer:
        """The index, which the first call makes. Calls do not overlap.

        Raises:
            GrammarError: the tokens do not spell every text, or llguidance fails.
        """
        from llguidance import LLTokenizer

        if self._index is None:
            try:
                self._index = LLTokenizer(cast("TokenizerWrapper", self), self._size, self._end_ids or None)
            except Exception as error:  # the library raises nothing narrower
                raise GrammarError(f"llguidance cannot read this bundle's tokenizer: {reason(error)}") from error
            machine.return_free_memory()
        return self._index

    @property
    def tokens(self) -> list[bytes]:
        """The bytes of each token; read once. Without ASCII characters among them a mask could be empty."""
        tokens = [self.tokenizer.token_bytes(token) for token in range(self._size)]
        if not ASCII.issubset(tokens):
            raise ValueError("its tokens do not spell every text")
        return tokens

    @property
    def special_token_ids(self) -> list[int]:
        """All control tokens: llguidance allows other tokens inside texts."""
        return sorted(self.tokenizer.control_texts)

    @property
    def eos_token_id(self) -> int:
        """A token that ends a reply, which llguidance wants; 0 if there is none."""
        return self._end_ids[0] if self._end_ids else 0

    def __call__(self, text: str) -> list[int]:
        """The tokens of a text that the grammar forces. An exception becomes an error of the matcher."""
        return self.tokenizer.encode_inside(text)
