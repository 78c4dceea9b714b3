"""The new rows of one sequence in a forward, and which cache positions each of them sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Mask = NDArray[np.bool_]

ROOT = -1
"""The parent of a row that follows the cache itself."""


@dataclass(frozen=True)
class TokenTree:
    """Tokens of the new rows. Each row follows the cache (`ROOT`) or an earlier row.

    tokens : int64[T]
    parents : int64[T], parents[i] < i
    is_chain : whether the rows follow one another
    """

    tokens: Ids
    parents: Ids
    is_chain: bool = field(init=False)

    def __post_init__(self) -> None:
        rows = np.arange(len(self.tokens))
        if self.tokens.ndim != 1 or self.parents.shape != self.tokens.shape or not len(rows):
            raise ValueError("a token tree needs one parent per token and at least one token")
        object.__setattr__(self, "is_chain", bool((self.parents == rows - 1).all()))
        if not self.is_chain and ((self.parents >= rows).any() or (self.parents < ROOT).any()):
            raise ValueError("a row's parent must come before it")

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def chain(cls, tokens: Sequence[int]) -> TokenTree:
        """Rows that follow one another: the plain case."""
        ids = np.asarray(tokens, np.int64)
        if ids.ndim != 1 or not len(ids):
            raise ValueError("a token tree needs at least one token")
        tree = cls.__new__(cls)  # nothing is left to check: 5 us less in every forward
        vars(tree).update(tokens=ids, parents=np.arange(-1, len(ids) - 1, dtype=np.int64), is_chain=True)
        return tree

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

    def is_path(self, rows: Sequence[int]) -> bool:
        """Whether each of these rows follows the one before it, and the first one follows the cache."""
        parent = ROOT
        for row in rows:
            if not 0 <= row < len(self.tokens) or self.parents[row] != parent:
                return False
            parent = row
        return True


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
