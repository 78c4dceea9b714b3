"""What must hold for the rows of a forward, whichever engine runs them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ondevice.engines.protocol import MOST_SESSIONS, Rows


def check_batch(batch: Sequence[Rows], vocab_size: int, most_rows: int) -> int:
    """The number of rows in a batch of open sessions of one engine, once everything in it has been checked.

    Args:
        batch: rows of several sessions.
        vocab_size: above every token id.
        most_rows: of one forward, all sessions together.

    Raises:
        ValueError: no or too many rows or sessions, a session twice, a token or a wanted row that does not exist.
    """
    if not 0 < len(batch) <= MOST_SESSIONS:
        raise ValueError(f"{len(batch)} sessions do not fit: a forward has 1 to {MOST_SESSIONS}")
    if len({id(rows.session) for rows in batch}) < len(batch):
        raise ValueError("a session is in the batch twice: a forward has its rows in one tree")
    total = sum(len(rows.tree) for rows in batch)
    if total > most_rows:
        raise ValueError(f"{total} rows do not fit: at most {most_rows} in one forward")
    for rows in batch:
        _check_rows(rows, vocab_size)
    return total


def _check_rows(rows: Rows, vocab_size: int) -> None:
    count, most = len(rows.tree), rows.session.max_rows()
    if count > most:
        raise ValueError(f"{count} rows do not fit: at most {most} now")
    # as unsigned numbers, negative ones are beyond everything: one look at the tokens instead of two
    if np.maximum.reduce(rows.tree.tokens.astype(np.int64, copy=False).view(np.uint64)) >= vocab_size:
        raise ValueError(f"token ids must be within 0..{vocab_size - 1}")
    wanted = list(rows.wanted)
    if wanted != sorted(set(wanted)) or (wanted and not 0 <= wanted[0] <= wanted[-1] < count):
        raise ValueError(f"wanted rows must be ascending and within 0..{count - 1}")
