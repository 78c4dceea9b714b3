"""An engine whose next token depends on every committed one: a wrong commit, row or rewind changes the output."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ondevice.engines.protocol import DraftStep, Floats, Outputs, TokenTree
from ondevice.manifest import Layer, Target

VOCAB = 11


class ToyEngine:
    name = "toy"
    has_drafter = False
    kv_cache = "none"

    def __init__(self, context_length: int = 10_000, chunk: int = 64) -> None:
        self.target = Target("none", VOCAB, VOCAB, context_length, 16, 1, (Layer("full", 1, 1, 0),))
        self.context_length = context_length
        self.forwards = 0
        self._chunk = chunk
        self._tokens: list[int] = []
        self._pending: TokenTree | None = None

    @property
    def length(self) -> int:
        return len(self._tokens)

    def max_rows(self) -> int:
        return min(self._chunk, self.context_length - self.length)

    def forward(self, rows: TokenTree, wanted: Sequence[int]) -> Outputs:
        assert 0 < len(rows.tokens) <= self.max_rows()
        self.forwards += 1
        self._pending = rows
        seen = rows.ancestors()
        logits = [logits_after([*self._tokens, *rows.tokens[seen[row]].tolist()]) for row in wanted]
        return Outputs(np.stack(logits), np.stack(logits))

    def commit(self, path: Sequence[int]) -> None:
        assert self._pending is not None
        parent = -1
        for row in path:
            assert self._pending.parents[row] == parent
            parent = row
            self._tokens.append(int(self._pending.tokens[row]))
        self._pending = None

    def rewind(self, length: int) -> int:
        self._tokens = self._tokens[:length]
        return self.length

    def draft_step(self, token: int, hidden: Floats) -> DraftStep:
        raise AssertionError("the toy has no drafter")

    def close(self) -> None:
        """Nothing is held."""


def logits_after(tokens: Sequence[int]) -> Floats:
    """float32[VOCAB], a function of the whole sequence."""
    seed = np.frombuffer(np.asarray(tokens, np.uint8).tobytes().rjust(4, b"\0"), np.uint8)
    return 2 * np.random.default_rng(seed).normal(size=VOCAB).astype(np.float32)
