"""The rows of one forward: those of each session, checked and laid side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ondevice.engines.batch import check_batch
from ondevice.engines.protocol import Ids, Rows, Session
from ondevice.engines.simd.session import SimdSession

if TYPE_CHECKING:
    from ondevice.engines.simd.engine import SimdEngine


class Batch:
    """
    Attributes:
        sessions: all different, each of this engine and open.
        trees: the new rows of each.
        counts: how many of them are wanted.
        tokens: int64[T], all rows', session after session.
        positions: int64[T]
        wanted: int64[R], which of all rows are wanted.
        lengths: committed tokens of each session.
        path: that all rows pass.
    """

    def __init__(self, engine: SimdEngine, batch: Sequence[Rows]) -> None:
        """
        Raises:
            ValueError: what `check_batch` says, a session of another engine, or paths that differ or do not exist.
            UsageError: a session that was closed.
        """
        self.sessions = [_own(engine, rows.session) for rows in batch]
        check_batch(batch, engine.target.vocab_size, engine.most_rows)
        self.path = batch[0].path
        if not self.path.is_whole:
            self.path.check(engine.target)
        if any(rows.path != self.path for rows in batch):
            raise ValueError("the rows of a forward pass the same path")
        self.trees = [rows.tree for rows in batch]
        self.lengths = [session.length for session in self.sessions]
        self.counts = [len(rows.wanted) for rows in batch]
        wanted, positions, first = [], [], 0
        for session, tree, rows in zip(self.sessions, self.trees, batch, strict=True):
            wanted += [first + row for row in rows.wanted]
            positions.append(session.length + tree.depths())
            first += len(tree)
        self.tokens = _joined([tree.tokens for tree in self.trees])
        self.positions, self.wanted = _joined(positions), np.array(wanted, np.int64)


def _own(engine: SimdEngine, session: Session) -> SimdSession:
    if not isinstance(session, SimdSession) or session.engine is not engine:
        raise ValueError("a session can only run on the engine that opened it")
    session.check_open()
    return session


def _joined(parts: list[Ids]) -> Ids:
    """One after another."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
