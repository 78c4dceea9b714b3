"""A grammar's state in one reply: llguidance's matcher as the loop's `Constraint`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ondevice.decoding.constraint import Mask
from ondevice.errors import GrammarError, one_line

if TYPE_CHECKING:
    from llguidance import LLMatcher

ALL = np.uint32(0xFFFFFFFF)

PICTURE = re.compile(r"\s*(\^+|\d+ \| .*)?\s*")
"""A line of a message that shows the place of a mistake, or nothing."""


@dataclass
class Place:
    """Behind a token: what is known already of the tokens that may follow.

    over : the reply is complete
    forced : the only one; None where there are several, False where nobody asked
    """

    over: bool
    forced: int | bool | None = False
    mask: Mask | None = None


class Matcher:
    """Follows the paths that it is asked about, forward and back. What it finds at a place stays while the reply goes
    on from there: checking a draft, guessing and verifying ask for the same.

    Masks are made row by row, where the verification comes by: trees need nothing more, and no mask is made for a row
    behind a token that the target refuses, as by llguidance's call for all rows of a chain.

    Where only one text may follow, its tokens are those that the tokenizer makes of it, and not others of the same
    characters: that is what the model was trained on, and it can be drafted.
    """

    def __init__(self, made: Callable[[], LLMatcher], position: int, vocab_size: int) -> None:
        """
        Args:
            made: waits for the matcher, which is made while the prompt is read.
            position: tokens of the prompt.
            vocab_size: of the model.
        """
        self.position = position
        self._made = made
        self._words = (vocab_size + 31) // 32
        self._matcher: LLMatcher
        self._ahead: list[int] = []
        self._places: list[Place] = []
        """Behind the tokens that were taken, and behind each of those ahead."""
        self._rooms: list[Mask] = []
        """Where masks are written, by the number of tokens ahead."""

    @property
    def finished(self) -> bool:
        self._wait()
        return self._places[0].over

    def allows(self, path: Sequence[int]) -> bool:
        return self._reach(path) is not None

    def forced(self, path: Sequence[int]) -> int | None:
        place = self._reach(path)
        return None if place is None else self._forced_at(place, len(path))

    def mask(self, path: Sequence[int]) -> Mask:
        while len(self._rooms) <= len(path):
            self._rooms.append(np.zeros(self._words, np.uint32))
        room = self._rooms[len(path)]
        place = self._reach(path)
        if place is None:
            room[:] = 0
            return room
        if place.mask is None:
            if (token := self._forced_at(place, len(path))) is not None:
                room[:] = 0
                room[token >> 5] = np.uint32(1 << (token & 31))
            elif place.over:
                room[:] = ALL
            else:
                self._back(len(path))
                self._matcher.unsafe_compute_mask_ptr(room.ctypes.data, room.nbytes)
                self._check()
            place.mask = room
        return room

    def take(self, tokens: Sequence[int]) -> int:
        """
        Raises:
            GrammarError: the grammar became too large to follow, or does not allow them.
        """
        self._wait()
        taken = 0
        while taken < len(tokens):
            place = self._reach(tokens[: taken + 1])
            if place is None:
                raise GrammarError(f"the grammar does not allow the token {tokens[taken]}, which was chosen")
            taken += 1
            if place.over:
                break
        self._back(taken)
        self._ahead, self._places = [], self._places[-1:]
        if self._places[0].mask is not None:  # it lies in the room of another place
            self._rooms[0], self._rooms[taken] = self._rooms[taken], self._rooms[0]
        self.position += taken
        self._forced_at(self._places[0], 0)  # the next choice asks for it in any case, and it is no drafter's expense
        return taken

    def _reach(self, path: Sequence[int]) -> Place | None:
        """The place behind a path; None where it is not allowed."""
        self._wait()
        shared, most = 0, min(len(path), len(self._ahead))
        while shared < most and path[shared] == self._ahead[shared]:
            shared += 1
        if shared == len(path):
            return self._places[shared]
        self._back(shared)
        for token in path[shared:]:
            place = self._places[-1]
            forced = self._forced_at(place, len(self._ahead))
            if place.over or (forced is not None and forced != token):
                return None
            if not self._matcher.try_consume_tokens([token]):
                self._check()
                return None
            self._ahead.append(token)
            self._places.append(Place(self._matcher.is_stopped()))
        return self._places[-1]

    def _forced_at(self, place: Place, ahead: int) -> int | None:
        if place.over:
            return None
        if place.forced is False:
            self._back(ahead)
            tokens = self._matcher.compute_ff_tokens()
            place.forced = tokens[0] if tokens else None
        return place.forced

    def _back(self, ahead: int) -> None:
        """To behind so many of the tokens ahead."""
        if ahead < len(self._ahead):
            self._matcher.rollback(len(self._ahead) - ahead)
            del self._ahead[ahead:], self._places[ahead + 1 :]

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(f"the grammar cannot be followed any further: {said(self._matcher.get_error())}")

    def _wait(self) -> None:
        """For the matcher, before the first token."""
        if not self._places:
            self._matcher = self._made()
            self._places = [Place(self._matcher.is_stopped())]


def said(message: str) -> str:
    """What llguidance says in one line, without its pictures of the place and of the parser's state."""
    lines = message.partition("<state>")[0].partition("; following special tokens")[0].splitlines()
    return one_line(" ".join(line.strip() for line in lines if not PICTURE.fullmatch(line)))[:300].strip()
