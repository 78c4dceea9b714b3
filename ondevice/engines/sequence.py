"""The part of `Session` that both engines share: tokens, commits, rewinds, snapshots, forks and files of one sequence.

An engine's session inherits from `CachedSequence` and adds how rows are computed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Self

from ondevice.arrays import Float32Array
from ondevice.bundle_format.graph_io import AttentionKind
from ondevice.engines import session_file
from ondevice.engines.kv_cache import HeldRows, KVCache
from ondevice.engines.protocol import DraftStep, TokenTree
from ondevice.engines.session_file import SessionOrigin
from ondevice.engines.states import HeldStates, RecurrentStates
from ondevice.errors import SessionFileError, UsageError

SNAPSHOTS = 8
"""Most snapshots of a sequence, oldest dropped first. A chat takes one at the end of each prompt."""

SNAPSHOT_BYTES = 1 << 26
"""Most bytes of a sequence's snapshots together. One takes 7 MB at Gemma 4 E2B's shape in fp16."""


@dataclass(frozen=True)
class Snapshot:
    """Copies of what the sliding cache and the states held at an earlier length."""

    rows: HeldRows
    states: HeldStates | None

    @property
    def length(self) -> int:
        return self.rows.length

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes + (0 if self.states is None else self.states.nbytes)


class CachedSequence(ABC):
    """Committed and pending rows of one sequence, in caches of its own. Methods without a docstring: see `Session`."""

    exact_trees = True

    def __init__(
        self, caches: Mapping[AttentionKind, KVCache], origin: SessionOrigin, states: RecurrentStates | None = None
    ) -> None:
        """
        Args:
            caches: empty caches, by kind of attention.
            origin: the bundle, engine and options that a file of this sequence must have been written with.
            states: the states of layers with the gated delta rule; None without any.
        """
        self._caches = caches
        self._states = states
        self._origin = origin
        self._tokens: list[int] = []
        self._pending: TokenTree | None = None
        self._snapshots: tuple[Snapshot, ...] = ()
        self._closed = False

    @property
    def tokens(self) -> Sequence[int]:
        return self._tokens

    @property
    def length(self) -> int:
        return len(self._tokens)

    @property
    def pending(self) -> int:
        return 0 if self._pending is None else len(self._pending)

    @property
    def nbytes(self) -> int:
        states = 0 if self._states is None else self._states.nbytes
        snapshots = sum(kept.nbytes for kept in self._snapshots)
        return states + snapshots + sum(cache.nbytes for cache in self._caches.values())

    @property
    def unread(self) -> Sequence[int]:
        """The last committed tokens, which the recurrent states do not include yet; the next forward adds them."""
        return self._tokens[self._read :]

    @property
    def drafts(self) -> DraftStep | None:
        return None

    @property
    def closed(self) -> bool:
        return self._closed

    @abstractmethod
    def max_rows(self, block: int = 1) -> int: ...

    @abstractmethod
    def draft_step(self, token: int, hidden: Float32Array, depth: int = 0) -> DraftStep: ...

    @abstractmethod
    def _sibling(self) -> Self:
        """A new, empty sequence of the same engine."""

    def commit(self, path: Sequence[int]) -> None:
        self.check_open()
        pending = self._pending
        if pending is None or not pending.is_path(path):
            raise ValueError(f"{list(path)} is not a path of rows of the last forward")
        if list(path) != list(range(len(path))):
            for cache in self._caches.values():
                cache.gather(self.length, path)
        tokens = pending.tokens.tolist()
        self._pending = None
        self._tokens += [tokens[row] for row in path]
        if self._states is not None and pending.is_chain and len(path) == len(pending):
            self._states.advance(self.length)

    def rewind(self, length: int) -> int:
        self.check_open()
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot rewind to {length} from {self.length}")
        self._pending = None
        if self._in_place(length):
            del self._tokens[length:]
        else:
            self._restore(self._best_snapshot(length), length)
        self._snapshots = tuple(kept for kept in self._snapshots if kept.length <= self.length)
        return self.length

    def snapshot(self) -> None:
        self.check_open()
        if not self.length or any(kept.length == self.length for kept in self._snapshots):
            return
        if "sliding" not in self._caches:  # full caches hold every position
            return
        if self.unread or (self._states is not None and self._states.lost):  # there are no states of this length
            return
        held = None if self._states is None else self._states.held()
        kept = [*self._snapshots, Snapshot(self._caches["sliding"].held(self.length).copy(), held)][-SNAPSHOTS:]
        while len(kept) > 1 and sum(each.nbytes for each in kept) > SNAPSHOT_BYTES:
            kept.pop(0)
        self._snapshots = tuple(kept)

    def fork(self, length: int | None = None) -> Self:
        self.check_open()
        wanted = self.length if length is None else length
        if not 0 <= wanted <= self.length:
            raise ValueError(f"cannot fork {wanted} of {self.length} tokens")
        snapshot = None if self._in_place(wanted) else self._best_snapshot(wanted)
        reached = wanted if self._in_place(wanted) else self._reach(snapshot, wanted)
        other = self._sibling()
        for kind, cache in self._caches.items() if reached else ():
            held = snapshot.rows if snapshot and kind == "sliding" else cache.held(reached, self._read)
            other._caches[kind].adopt(held)
        if self._states is not None and other._states is not None and reached:
            other._states.adopt((snapshot and snapshot.states) or self._states.held())
        other._tokens = self._tokens[:reached]
        other._snapshots = tuple(kept for kept in self._snapshots if kept.length <= reached)
        return other

    def save(self, path: str | PathLike[str]) -> None:
        self.check_open()
        if not self.length:
            raise UsageError("an empty sequence cannot be saved: run a prompt first")
        self.check_states()
        held = {kind: cache.held(self.length, self._read) for kind, cache in self._caches.items()}
        states = None if self._states is None else self._states.held()
        session_file.write(path, self._origin, self._tokens, held, states)

    def load(self, path: str | PathLike[str], vocab_size: int, most: int) -> None:
        """Replace this sequence by the one that `save` wrote to a file; arguments and errors: `session_file.read`."""
        states = None if self._states is None else self._states.held()
        tokens, held = session_file.read(path, self._origin, self._caches, vocab_size, most, states=states)
        if self._states is not None and states is not None and len(tokens) - states.length > self._states.most_rows:
            raise SessionFileError(path, f"it is damaged (states behind {states.length} of {len(tokens)} tokens)")
        for kind, cache in self._caches.items():
            cache.adopt(held[kind])
        if self._states is not None and states is not None:
            self._states.adopt(states)
        self._tokens = tokens

    def close(self) -> None:
        self._closed = True
        self._caches, self._states, self._snapshots, self._tokens, self._pending = {}, None, (), [], None

    def check_open(self) -> None:
        """Raise UsageError if the session was closed."""
        if self._closed:
            raise UsageError("this session is closed: open another")

    @property
    def _read(self) -> int:
        """The number of tokens that the states include; all of them without states."""
        return self.length if self._states is None else self._states.length

    def draft_position(self, depth: int) -> int:
        """The position of a draft step of an MTP layer; ValueError if so many drafted tokens cannot precede it."""
        if depth and not 0 < depth < self.max_rows():
            raise ValueError(f"{depth} drafted tokens cannot precede another: {self.max_rows()} rows follow here")
        return self.length + depth

    def check_states(self) -> None:
        """Raise ValueError if an interrupt has left no states."""
        if self._states is not None and self._states.lost:
            raise ValueError("states were lost in an interrupt: rewind this session")

    def _in_place(self, length: int) -> bool:
        behind = self._states is None or (not self._states.lost and self._states.length <= length)
        return behind and all(cache.can_rewind(length) for cache in self._caches.values())

    def _best_snapshot(self, length: int) -> Snapshot | None:
        """The snapshot from which most of the first `length` tokens can be kept."""
        return max(self._snapshots, key=lambda kept: self._reach(kept, length), default=None)

    def _reach(self, snapshot: Snapshot | None, length: int) -> int:
        """How many of the first `length` tokens can be kept with a snapshot's rows."""
        if snapshot is None:
            return 0
        reached = min(length, snapshot.length)
        if snapshot.states is not None and snapshot.length > length:
            return 0
        return reached if self._caches["sliding"].can_adopt(snapshot.rows, reached) else 0

    def _restore(self, snapshot: Snapshot | None, length: int) -> None:
        reached = self._reach(snapshot, length)
        tokens, self._tokens = self._tokens, []  # after an interrupt here, the sequence is empty
        for cache in self._caches.values():
            cache.clear()
        if self._states is not None:
            self._states.clear()
        if snapshot is not None and reached:
            self._caches["sliding"].adopt(snapshot.rows)
            if self._states is not None and snapshot.states is not None:
                self._states.adopt(snapshot.states)
        self._tokens = tokens[:reached]
