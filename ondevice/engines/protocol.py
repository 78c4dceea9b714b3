"""What a drafting loop needs from an engine: run rows, keep some, drop the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from ondevice.manifest import Target

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]
Mask = NDArray[np.bool_]

KVCacheType = Literal["fp16", "int8"]
"""What keys and values are held in: int8 takes half the memory, on the `simd` engine; `ort` has float32 for fp16."""

ROOT = -1
"""The parent of a row that follows the cache itself."""


@dataclass(frozen=True)
class TokenTree:
    """The new rows of one forward. Each follows the cache (`ROOT`) or an earlier row.

    tokens : int64[T]
    parents : int64[T], parents[i] < i
    """

    tokens: Ids
    parents: Ids

    def __post_init__(self) -> None:
        rows = np.arange(len(self.tokens))
        if self.tokens.ndim != 1 or self.parents.shape != self.tokens.shape or not len(rows):
            raise ValueError("a token tree needs one parent per token and at least one token")
        if (self.parents >= rows).any() or (self.parents < ROOT).any():
            raise ValueError("a row's parent must come before it")

    @classmethod
    def chain(cls, tokens: Sequence[int]) -> TokenTree:
        """Rows that follow one another: the plain case."""
        return cls(np.asarray(tokens, np.int64), np.arange(-1, len(tokens) - 1, dtype=np.int64))

    @property
    def is_chain(self) -> bool:
        return bool((self.parents == np.arange(-1, len(self.tokens) - 1)).all())

    def depths(self) -> Ids:
        """int64[T]: 0 for rows that follow the cache."""
        if self.is_chain:
            return np.arange(len(self.tokens), dtype=np.int64)
        depths = np.zeros(len(self.tokens), np.int64)
        for row, parent in enumerate(self.parents):
            if parent != ROOT:
                depths[row] = depths[parent] + 1
        return depths

    def ancestors(self) -> Mask:
        """bool[T, T]: row i sees row j, itself included."""
        count = len(self.tokens)
        if self.is_chain:
            return np.tri(count, dtype=np.bool_)
        seen = np.eye(count, dtype=np.bool_)
        for row, parent in enumerate(self.parents):
            if parent != ROOT:
                seen[row] |= seen[parent]
        return seen


@dataclass(frozen=True)
class Outputs:
    """What the target says of the wanted rows.

    logits : float32[R, V], after the softcap
    hidden : float32[R, H], after the final norm
    """

    logits: Floats
    hidden: Floats


@dataclass(frozen=True)
class DraftStep:
    """One step of a drafter model: `candidates` int64[C], their `logits` float32[C], the next `hidden` float32[H]."""

    candidates: Ids
    logits: Floats
    hidden: Floats


class Engine(Protocol):
    """Runs one target, and its drafter where the bundle has one, over one sequence's cache."""

    name: str
    target: Target
    has_drafter: bool
    kv_cache: str
    """What keys and values are held in."""
    context_length: int

    @property
    def length(self) -> int:
        """Tokens whose KV is committed."""
        ...

    def forward(self, rows: TokenTree, wanted: Sequence[int]) -> Outputs:
        """Run `rows` after the committed tokens and leave their KV pending.

        At most `max_rows()` rows at a time. A forward replaces rows that an earlier one left pending, and may reuse the
        arrays of its outputs.
        """
        ...

    def commit(self, path: Sequence[int]) -> None:
        """Keep these rows of the last forward, ascending and each the parent of the next; drop the others."""
        ...

    def rewind(self, length: int) -> int:
        """Forget everything from position `length` on; say how many tokens are left.

        That is `length`, or 0 where a sliding layer no longer holds the rows that a shorter sequence would need.
        """
        ...

    def max_rows(self) -> int:
        """Rows that the next forward may have; 0 where the context is full."""
        ...

    def draft_step(self, token: int, hidden: Floats) -> DraftStep:
        """One MTP step over the committed cache. The position is `length`, the newest token's, for a whole round.

        The arrays of the answer may be reused by the next step, whose `hidden` may be one of them.
        """
        ...

    def close(self) -> None: ...


def attention_mask(tree: TokenTree, length: int, view: tuple[int, int], window: int | None) -> Mask:
    """bool[T, stop - start]: which of the cache positions of a view (start, stop) each row sees.

    Row j of the tree lies at cache position length + j, whatever its depth; positions from length + T on are padding.
    With a window, a row at position p sees positions p - window + 1 .. p (Gemma4, `sliding_window_overlay`).
    """
    start, stop = view
    depths = tree.depths()
    count = len(depths)
    seen = np.zeros((count, stop - start), np.bool_)
    seen[:, : length - start] = True
    seen[:, length - start : length - start + count] = tree.ancestors()
    if window is not None:
        own = np.arange(start, stop)
        own[length - start : length - start + count] = length + depths
        seen &= own[None, :] > (length + depths - window)[:, None]
    return seen
