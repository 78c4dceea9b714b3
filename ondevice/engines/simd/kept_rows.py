"""What draft forwards leave of their rows: keys and values behind the committed ones, and the residual stream."""

from __future__ import annotations

from dataclasses import dataclass

from ondevice.engines.layer_path import LayerPath
from ondevice.engines.protocol import Floats, Ids, TokenTree


@dataclass(frozen=True, eq=False)
class KeptRows:
    """A chain behind a sequence's committed tokens that has passed the lower layers.

    Its keys and values are pending rows of the sequence's own cache: nobody commits them, and the next forward
    overwrites them, with the same bits where it verifies the same tokens. A fork would cost a copy of the cache.

    passed : the layers that the rows have passed, up to its `stop`
    tokens : int64[n]
    streams : float32[n, H], the residual stream there, and float32[n, layers * size], their per-layer embeddings
    length : committed tokens before them
    bases : where the caches began then: a cache that has slid on has lost pending rows
    """

    passed: LayerPath
    tokens: Ids
    streams: list[Floats]
    length: int
    bases: tuple[int, ...]

    @property
    def cut(self) -> int:
        """The first layer that they have not passed."""
        assert self.passed.stop is not None
        return self.passed.stop

    def shared(self, tree: TokenTree, path: LayerPath) -> int:
        """How many of a tree's first rows they are, where those pass this path."""
        if not tree.is_chain or self.passed != path.below(self.cut):
            return 0
        count = 0
        for own, other in zip(self.tokens.tolist(), tree.tokens.tolist(), strict=False):
            if own != other:
                break
            count += 1
        return count
