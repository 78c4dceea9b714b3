"""Helpers for tests of an engine's sessions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ondevice.engines.protocol import Outputs, Rows, TokenTree

if TYPE_CHECKING:
    from ondevice.engines.ort import OrtSession


def tokens(count: int, seed: int = 0) -> list[int]:
    """Random token ids of the reference pair's vocabulary."""
    return [int(token) for token in np.random.default_rng(seed).integers(6, 4096, size=count)]


def forward(session: OrtSession, rows: TokenTree | list[int], wanted: Sequence[int]) -> Outputs:
    """Run a forward of one session; a list of tokens is run as a chain."""
    tree = rows if isinstance(rows, TokenTree) else TokenTree.chain(rows)
    return session.engine.forward([Rows(session, tree, wanted)])[0]


def extend(session: OrtSession, ids: list[int], chunk: int = 64) -> None:
    """Run and commit tokens in chunks, as a prefill does."""
    for start in range(0, len(ids), chunk):
        part = ids[start : start + chunk]
        forward(session, part, [len(part) - 1])
        session.commit(range(len(part)))


def prefill(session: OrtSession, ids: list[int], chunk: int = 64) -> None:
    """Rewind the session to 0 and prefill these tokens."""
    session.rewind(0)
    extend(session, ids, chunk)


def copied(outputs: Outputs) -> tuple[np.ndarray, np.ndarray]:
    return outputs.logits.copy(), outputs.hidden.copy()


def drafts(session: OrtSession, hidden: np.ndarray, steps: int = 3) -> list[np.ndarray]:
    """The candidates, logits and hidden states of `steps` draft steps."""
    token = 9
    found: list[np.ndarray] = []
    for _ in range(steps):
        step = session.draft_step(token, hidden)
        found += [step.candidates.copy(), step.logits.copy(), step.hidden.copy()]
        token, hidden = int(step.candidates[step.logits.argmax()]), step.hidden
    return found
