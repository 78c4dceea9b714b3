"""Grammars to constraints: llguidance, and its index of a tokenizer's vocabulary."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from ondevice.errors import GrammarError, MissingDependencyError, UsageError, reason
from ondevice.grammar.matcher import Matcher, said
from ondevice.grammar.reply_grammar import CALL, Thoughts, reply_grammar
from ondevice.grammar.response_format import ResponseFormat
from ondevice.grammar.tool_choice import ToolChoice
from ondevice.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


class Compiler:
    """Of one model. The index is made once, when the first grammar comes; that takes a second for Gemma's 262,144
    tokens, and is done in a thread, while the prompt is read.
    """

    def __init__(self, tokenizer: Tokenizer | None, path: Path | None, vocab_size: int, end_ids: Iterable[int]) -> None:
        """
        Args:
            tokenizer, path: the text layer's, and the file that it was read from; None where the bundle has none.
            vocab_size: of the model, which may have more tokens than the tokenizer.
            end_ids: tokens that end a reply.
        """
        self._tokenizer = tokenizer
        self._path = path
        self._vocab_size = vocab_size
        self._end_ids = sorted(end_ids)
        controls = {} if tokenizer is None else tokenizer.control_texts
        self._control_ids = {text: token_id for token_id, text in controls.items()}
        self._index: LLTokenizer | None = None
        self._pool: ThreadPoolExecutor | None = None

    def constraint(
        self, answer: ResponseFormat, choice: ToolChoice, thinking: bool, prompt_ids: Sequence[int]
    ) -> Matcher | None:
        """What limits a reply; None where nothing does.

        Args:
            thinking: whether the model was told to think.

        Raises:
            UsageError: calls for a model that knows none, or no tokenizer.
            GrammarError: the grammar cannot be compiled. What only a tokenizer can tell is raised at the first token.
            MissingDependencyError: llguidance is not there.
        """
        thoughts = Thoughts.of(self._control_ids, prompt_ids, thinking)
        grammar = reply_grammar(answer, choice, thoughts, self._control_ids, self._end_ids)
        if grammar is None:
            return None
        if self._tokenizer is None:
            raise UsageError("a grammar needs a tokenizer, and this bundle has none")
        _check(grammar)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "ondevice-grammar")
        coming = self._pool.submit(self._matcher, grammar)
        return Matcher(coming.result, len(prompt_ids), self._vocab_size)

    def forbidden(self, choice: ToolChoice) -> list[int]:
        """Tokens that must not be said, where no function may be called."""
        opening = self._control_ids.get(CALL[0])
        return [] if choice.kind != "none" or opening is None else [opening]

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False)

    def _matcher(self, grammar: str) -> LLMatcher:
        from llguidance import LLMatcher, LLTokenizer

        if self._index is None:  # the pool has one thread
            try:
                self._index = LLTokenizer(self._tokenizer_json(), self._vocab_size, self._end_ids or None)
            except Exception as error:  # it says nothing narrower
                raise GrammarError(f"llguidance cannot read this bundle's tokenizer: {reason(error)}") from error
        matcher = LLMatcher(self._index, grammar, log_level=0)
        if matcher.is_error():
            raise GrammarError(f"this grammar cannot be compiled: {said(matcher.get_error())}")
        return matcher

    def _tokenizer_json(self) -> str:
        """The file, with all control tokens called special: others may stand in a text, for llguidance."""
        assert self._tokenizer is not None
        assert self._path is not None
        text = self._path.read_text("utf-8")
        if set(self._control_ids.values()) <= self._tokenizer.special_ids:
            return text
        whole = json.loads(text)
        for token in whole["added_tokens"]:
            token["special"] |= token["id"] in self._tokenizer.control_texts
        return json.dumps(whole)


def _check(grammar: str) -> None:
    """What can be told without a tokenizer, at once."""
    try:
        from llguidance import LLMatcher
    except ImportError as error:
        raise MissingDependencyError("llguidance", "grammar", what="a reply with a grammar") from error
    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    if failed:
        raise GrammarError(f"this grammar cannot be compiled: {said(messages[0])}")
