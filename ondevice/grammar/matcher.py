"""Grammars as the loop's `Constraint`: compiled by llguidance, and its matcher for one reply."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ondevice.errors import GrammarError, UsageError
from ondevice.generate.request import TokenMask
from ondevice.grammar.call_forms import call_opening
from ondevice.grammar.complaints import UNREADABLE, complaint, said
from ondevice.grammar.limits import library_limits
from ondevice.grammar.reply_grammar import Parts, reply_grammar
from ondevice.grammar.response_format import Grammar, ToolChoice
from ondevice.grammar.vocabulary import GrammarVocabulary
from ondevice.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher


MOST_BEHIND = 16
"""Tokens at a prompt's end in which the letters that begin thoughts are looked for."""


class Compiler:
    """Compiles the grammars of one model.

    The index of the vocabulary is made once, for the first grammar. It takes 1.8 s for Gemma's 262,144 tokens, in a
    thread, during the prefill of the prompt.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, vocab_size: int, end_ids: Iterable[int], *, tags: bool = False
    ) -> None:
        """
        Args:
            tokenizer: the bundle's; None if it has none.
            vocab_size: vocabulary size of the model, which may be larger than that of the tokenizer.
            end_ids: tokens that end a reply.
            tags: whether the chat template writes calls between tags.
        """
        self._tags = tags
        self._vocab_size = vocab_size
        self._end_ids = sorted(end_ids)
        self._vocabulary = None if tokenizer is None else GrammarVocabulary(tokenizer, vocab_size, self._end_ids)
        controls = {} if tokenizer is None else tokenizer.control_texts
        self._control_ids = {text: token_id for token_id, text in controls.items()}
        self._pool = ThreadPoolExecutor(1, "ondevice-grammar")  # starts its thread with the first grammar
        self._closed = False

    def constraint(
        self,
        answer: Grammar | None,
        choice: ToolChoice,
        thinks: bool | None,
        prompt_ids: Sequence[int],
        begun: str = "",
    ) -> Matcher | None:
        """The constraint of a reply; None if there is none.

        Args:
            thinks: whether the reply may begin with thoughts; None as for `Parts.of`.
            begun: the part of the answer that the prompt ends with.

        Raises:
            UsageError: calls are wanted and the model has no tokens for them, the bundle has no tokenizer, or the model
                was closed meanwhile.
            GrammarError: the grammar cannot be compiled. Errors that depend on the tokenizer are raised at the first
                token.
            MissingDependencyError: llguidance is not installed.
        """
        parts = Parts.of(self._control_ids, self._end_ids, prompt_ids, thinks, self._tail(prompt_ids))
        grammar = reply_grammar(answer, choice, parts, self._control_ids, self._end_ids, tags=self._tags)
        if grammar is None:
            return None
        if self._vocabulary is None:
            raise UsageError("a grammar needs a tokenizer, and this bundle has none")
        _check(grammar)
        try:
            coming = self._pool.submit(self._matcher, grammar, begun)
        except RuntimeError as error:
            if not self._closed:
                raise
            raise UsageError("this model is closed: load it again") from error
        return Matcher(coming.result, len(prompt_ids), self._vocab_size)

    def _tail(self, prompt_ids: Sequence[int]) -> str:
        """Text of the prompt after its last control token, or as much as may begin thoughts."""
        if self._vocabulary is None:
            return ""
        controls, last = set(self._control_ids.values()), list[int]()
        for token in prompt_ids[: -MOST_BEHIND - 1 : -1]:
            if token in controls:
                break
            last.insert(0, token)
        return self._vocabulary.tokenizer.decode([token for token in last if token >= 0])

    def forbidden(self, choice: ToolChoice) -> list[int]:
        """Tokens that the reply must not contain: the opening of a call, if `choice` forbids calls."""
        opening = call_opening(self._control_ids)
        return [] if choice.kind != "none" or opening is None else [opening]

    def close(self) -> None:
        """Compile nothing more; later grammars are a UsageError."""
        self._closed = True
        self._pool.shutdown(wait=False)

    def _matcher(self, grammar: str, begun: str) -> LLMatcher:
        from llguidance import LLMatcher

        assert self._vocabulary is not None
        matcher = LLMatcher(self._vocabulary.index(), grammar, log_level=0, limits=library_limits())
        if matcher.is_error():
            raise GrammarError(f"this grammar cannot be compiled: {said(matcher.get_error())}")
        tokens = self._vocabulary.tokenizer.encode_inside(begun)
        if matcher.try_consume_tokens(tokens) < len(tokens):
            raise GrammarError("the last message does not begin a text of the form that the reply must have")
        return matcher


def _check(grammar: str) -> None:
    """Raise at once the errors that do not depend on the tokenizer."""
    message = complaint(grammar)
    if message is not None:
        if UNENFORCED.match(message):
            message += ": leave it out"
            message += "" if LENIENT in grammar else ", or set strict to false, which ignores it"
        raise GrammarError(f"this grammar cannot be compiled: {message}")


LENIENT = '"lenient": true'
"""Setting of a schema of which `strict` is false already."""

UNENFORCED = re.compile(rf"Unimplemented keys|Unknown format|oneOf constraints|{UNREADABLE.pattern}")
"""Errors of llguidance about something in a JSON schema that cannot be enforced."""

NO_TEXT = "NoExtensionBias"
"""llguidance's error where a grammar is not at its end and allows no token."""

ALL = np.uint32(0xFFFFFFFF)


@dataclass
class _State:
    """State of the grammar after a token, computed as far as it was needed.

    Attributes:
        over: whether the reply is complete.
        forced: the tokens that the grammar forces, one after another; empty if it allows several, None if not computed.
        mask: bits of the allowed tokens, uint32 words; None if not computed yet.
    """

    over: bool
    forced: Sequence[int] | None = None
    mask: TokenMask | None = None


class Matcher:
    """State of one reply's grammar: llguidance's matcher as the loop's `Constraint`.

    A copy of the matcher moves ahead along the paths of drafted tokens. States on the current path are kept, because
    checking a draft, drafting and verifying need the same ones.

    To go back is to copy the matcher again. llguidance's `rollback` (up to 1.9.1) goes back by the lengths of the
    tokens' texts, which is the wrong place after a forced `<[id]>` that is not a control token, and it fails for
    grammars with `stop` or `max_tokens`.

    Masks are computed row by row as verification reaches them. That suffices for trees, and computes no mask for rows
    after a token that the target refuses, as llguidance's call for all rows of a chain would.

    Where the grammar allows only one text, its tokens must be those that the tokenizer makes of it, not others of the
    same characters: the model was trained on these, and they can be drafted.
    """

    def __init__(self, made: Callable[[], LLMatcher], position: int, vocab_size: int) -> None:
        """
        Args:
            made: returns the matcher; waits for it, because it is made during the prefill of the prompt.
            position: number of tokens of the prompt.
            vocab_size: vocabulary size of the model.
        """
        self.position = position
        self._made = made
        self._words = (vocab_size + 31) // 32
        self._taken: LLMatcher
        """After the taken tokens."""
        self._matcher: LLMatcher
        """After `_ahead`: `_taken` itself, or a copy."""
        self._ahead: list[int] = []
        self._states: list[_State] = []
        """States after the taken tokens, and after each token of `_ahead`."""
        self._buffers: list[TokenMask] = []
        """Buffers of masks, by the number of tokens ahead."""

    @property
    def finished(self) -> bool:
        self._wait()
        return self._states[0].over

    def allows(self, path: Sequence[int]) -> bool:
        return self._reach(path) is not None

    def forced(self, path: Sequence[int]) -> int | None:
        state = self._reach(path)
        return None if state is None else self._forced_at(state, len(path))

    def mask(self, path: Sequence[int]) -> TokenMask:
        while len(self._buffers) <= len(path):
            self._buffers.append(np.zeros(self._words, np.uint32))
        buffer = self._buffers[len(path)]
        state = self._reach(path)
        if state is None:
            buffer[:] = 0
            return buffer
        if state.mask is None:
            if (token := self._forced_at(state, len(path))) is not None:
                buffer[:] = 0
                buffer[token >> 5] = np.uint32(1 << (token & 31))
            elif state.over:
                buffer[:] = ALL
            else:
                self._back(len(path))
                self._matcher.unsafe_compute_mask_ptr(buffer.ctypes.data, buffer.nbytes)
                self._check()
            state.mask = buffer
        return buffer

    def take(self, tokens: Sequence[int]) -> int:
        """
        Raises:
            GrammarError: the grammar does not allow the tokens, or became too large to follow.
        """
        self._wait()
        taken = 0
        while taken < len(tokens):
            state = self._reach(tokens[: taken + 1], taking=taken + 1 == len(tokens))
            if state is None:
                raise GrammarError(f"the grammar does not allow the token {tokens[taken]}, which was chosen")
            taken += 1
            if state.over:
                break
        self._back(taken)
        self._taken, self._ahead, self._states = self._matcher, [], self._states[-1:]
        if self._states[0].mask is not None:  # it lies in the buffer of another state
            self._buffers[0], self._buffers[taken] = self._buffers[taken], self._buffers[0]
        self.position += taken
        self._forced_at(self._states[0], 0)  # the next choice needs it anyway; here its time is not the drafter's
        return taken

    def _reach(self, path: Sequence[int], *, taking: bool = False) -> _State | None:
        """The state after a path; None if the path is not allowed.

        Args:
            taking: the reply continues with the path, so that no copy is needed for its first token.
        """
        self._wait()
        shared, most = 0, min(len(path), len(self._ahead))
        while shared < most and path[shared] == self._ahead[shared]:
            shared += 1
        if shared == len(path):
            return self._states[shared]
        self._back(shared)
        for token in path[shared:]:
            state = self._states[-1]
            forced = self._forced_at(state, len(self._ahead))
            if state.over or (forced is not None and forced != token):
                return None
            if self._matcher is self._taken and not taking:
                self._matcher = self._taken.deep_copy()
            if not self._matcher.try_consume_tokens([token]):
                self._check()
                return None
            self._ahead.append(token)
            later = (state.forced or ())[1:]  # the tokens of a long forced text are made once, not at each of them
            self._states.append(_State(self._matcher.is_stopped(), later or None))
        return self._states[-1]

    def _forced_at(self, state: _State, ahead: int) -> int | None:
        if state.over:
            return None
        if state.forced is None:
            self._back(ahead)
            state.forced = self._matcher.compute_ff_tokens()
            self._check()
        return state.forced[0] if state.forced else None

    def _back(self, ahead: int) -> None:
        """Go back to the state after the first `ahead` tokens of `_ahead`."""
        if ahead < len(self._ahead):
            del self._ahead[ahead:], self._states[ahead + 1 :]
            self._matcher = self._taken
            if self._ahead:
                self._matcher = self._taken.deep_copy()
                consumed = self._matcher.try_consume_tokens(self._ahead)
                assert consumed == len(self._ahead)

    def _check(self) -> None:
        if self._matcher.is_error():
            message = self._matcher.get_error()
            if repr(KeyboardInterrupt) in message:  # raised within `GrammarVocabulary.__call__`
                raise KeyboardInterrupt
            found = said(message)
            if found == NO_TEXT:
                found = "it allows no text here, as a schema that is only a reference to itself"
            raise GrammarError(f"the grammar cannot be followed any further: {found}")

    def _wait(self) -> None:
        """Wait for the matcher before the first token."""
        if not self._states:
            self._taken = self._matcher = self._made()
            self._states = [_State(self._matcher.is_stopped())]
