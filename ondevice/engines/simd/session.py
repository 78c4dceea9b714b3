"""One sequence of the `simd` engine: see `ondevice.engines.protocol.Session`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from ondevice.engines.heads import no_heads
from ondevice.engines.layer_path import LayerPath
from ondevice.engines.protocol import DraftStep, Floats, Proposals, TokenTree
from ondevice.engines.sequence import CachedSequence
from ondevice.engines.simd.draft_state import DraftState
from ondevice.engines.simd.heads_state import HeadsState
from ondevice.engines.simd.kept_rows import KeptRows
from ondevice.engines.simd.output_pool import Lease
from ondevice.engines.simd.sequence_record import SequenceRecord
from ondevice.errors import UsageError

if TYPE_CHECKING:
    from ondevice.engines.simd.engine import SimdEngine


class SimdSession(CachedSequence):
    """
    Attributes:
        engine: that runs it.
    """

    def __init__(self, engine: SimdEngine) -> None:
        super().__init__(engine.make_caches(), engine.origin)
        self.engine = engine
        self._record = SequenceRecord(engine.cache_places)
        self._index = engine.key_index()
        self._lease: Lease | None = None
        self._kept: KeptRows | None = None
        # now, because the first of a generation's draft steps is timed: made there, it took three times as long
        self._drafts: DraftState | None = engine.draft_state()
        self._drafts_after: int | None = None
        self._heads: dict[str, HeadsState] = engine.heads_states()

    def max_rows(self) -> int:
        self.check_open()
        most = self.engine.most_rows if self._index is None else min(self.engine.most_rows, self._index.most_rows)
        return min(most, self.engine.context_length - self.length)

    def prepare(self, tree: TokenTree) -> SequenceRecord:
        """End what the last forward left, and make room for new rows.

        Returns:
            What kernels must know of this sequence, but for its rows and their place beside others.
        """
        length, record = self.length, self._record
        if self._index is not None and len(tree) > self._index.most_rows:
            raise ValueError(f"{len(tree)} rows do not fit: lookups leave {self._index.most_rows} for a sequence")
        self._pending = self._drafts_after = self._lease = None
        for cache in self._caches.values():
            cache.reserve(length, len(tree))
        record.follow(self._caches)
        self._follow_index(length)
        return record

    def finish(self, tree: TokenTree | None, lease: Lease) -> None:
        """Rows have run, and their outputs are in a buffer that this lease keeps; None: they were a draft's."""
        self._pending = tree
        self._lease = lease

    def keep(self, passed: LayerPath, tree: TokenTree, streams: list[Floats]) -> None:
        """A draft's rows have passed the lower layers."""
        if tree.is_chain:
            self._kept = KeptRows(passed, tree.tokens, streams, self.length, self._bases)

    def take_kept(self) -> KeptRows | None:
        """What was kept; a forward begins, after which it may be there no more."""
        kept, self._kept = self._kept, None
        return kept

    def still(self, kept: KeptRows | None) -> KeptRows | None:
        """What was kept, where the caches, which have made room since, still have it."""
        return kept if kept is not None and (kept.length, kept.bases) == (self.length, self._bases) else None

    @property
    def _bases(self) -> tuple[int, ...]:
        return tuple(cache.base for cache in self._caches.values())

    def draft_step(self, token: int, hidden: Floats) -> DraftStep:
        self.check_open()
        engine, drafts = self.engine, self._drafts
        if drafts is None:
            raise UsageError("this bundle has no drafter: use --drafter ngram or none")
        if self._drafts_after != self.length:
            drafts.begin(self._record, self._caches, self.length, engine.target.sliding_window)
            self._follow_index(self.length)
            self._drafts_after = self.length
        return engine.run_draft_step(drafts, self._record, token, hidden)

    def propose(self, kind: str, hidden: Floats) -> Proposals:
        self.check_open()
        if kind not in self._heads:
            raise no_heads(kind)
        return self.engine.run_heads(kind, self._heads[kind], hidden)

    @property
    def nbytes(self) -> int:
        return super().nbytes + (0 if self._index is None else self._index.nbytes)

    def fork(self, length: int | None = None) -> Self:
        other = super().fork(length)
        if self._index is not None and other._index is not None:
            other._index.adopt(self._index, other.length)
        return other

    def close(self) -> None:
        super().close()
        self._lease = self._drafts = self._index = self._kept = None
        self._heads = {}

    def _follow_index(self, length: int) -> None:
        if self._index is not None:
            self._index.follow(self._caches["full"], length)
            self._record.follow_index(self._index)

    def _sibling(self) -> SimdSession:
        return self.engine.open_session()
