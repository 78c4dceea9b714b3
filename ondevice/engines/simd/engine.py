"""The `simd` engine and its sessions: see `Engine` and `Session` in `ondevice.engines.protocol`.

`SimdEngine` owns what all sequences share: the program (plans and packed weights), the thread pool, the working memory
and the output buffers. One thread computes at a time, under the engine's lock. `SimdSession` owns one sequence: caches,
key index, its record for the kernels, and the states of its drafter and heads.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Sequence
from functools import partial
from os import PathLike
from typing import Self

from ondevice.arrays import Float32Array
from ondevice.bundle import Bundle
from ondevice.bundle_format.graph_io import AttentionKind
from ondevice.bundle_format.model_config import HeadsEntry
from ondevice.engines.kv_cache import KINDS, KVCache, make_caches
from ondevice.engines.layer_path import LayerPath, PathMemory
from ondevice.engines.protocol import (
    DraftStep,
    KVCacheType,
    Outputs,
    Proposals,
    Rows,
    Session,
    TokenTree,
    check_batch,
    context_within,
    no_heads,
)
from ondevice.engines.sequence import CachedSequence
from ondevice.engines.session_file import Origin
from ondevice.engines.simd.buffers import AttentionScratch, Lease, LookupScratch, OutputPool
from ondevice.engines.simd.caches import BITS, UNITS, VIEWS, KeyIndex, LookupSettings, layer_unit_type
from ondevice.engines.simd.forward_state import DraftState, ForwardState, HeadsState, SequenceRecord
from ondevice.engines.simd.kernels.steps import slots
from ondevice.engines.simd.program import Program
from ondevice.engines.simd.target_forward import Batch, KeptRows, TargetForward
from ondevice.engines.simd.threads import ThreadPool
from ondevice.errors import UsageError
from ondevice.machine import ForkGuard
from ondevice.preparation import Preparation

MOST_ROWS = 512
"""Most rows of a forward. The upper layers run on the wanted rows only and are read once per forward, so a prompt takes
3 % less time in one forward of 512 rows than in two of 256."""

RELEASE_EVERY = 512
"""Rows after which the pages of mapped tables that they read are released."""

PROPOSALS = {"medusa": -1, "blockwise": -2, "exit": -3}
DRAFT_STEP = -4
"""Kinds of work for the thread pool: runs of heads by kind, and draft steps. Those of forwards are not negative."""


class SimdEngine:
    """See `Engine`.

    Attributes:
        origin: the settings that a file of one of its sequences must have been written with.
        cache_places: layer -> number of its cache among the caches in a sequence's record.
    """

    name = "simd"

    def __init__(
        self,
        bundle: Bundle,
        threads: int,
        context_length: int | None = None,
        *,
        kv_cache: KVCacheType = "fp16",
        lookup: LookupSettings | None = None,
        preparation: Preparation | None = None,
    ) -> None:
        """
        Args:
            bundle: the bundle to run.
            threads: number of threads that compute.
            context_length: most tokens of a sequence; None takes the target's own.
            kv_cache: number format of cached keys and values.
            lookup: settings of lookup attention in layers with full attention; None attends exactly.
            preparation: reports the packing of weights, and compiles kernels meanwhile; None compiles them when they
                are first called.

        Raises:
            UnsupportedGraphError: there is no kernel for a format or size of the weights; another engine may run them.
            BundleCorruptError: the tensor tables contradict the configuration or the files.
            UsageError: the context length is impossible.
        """
        self.target = bundle.manifest.target
        self.context_length = context_within(context_length, self.target.context_length)
        self.kv_cache: str = kv_cache
        self._cache_type: KVCacheType = kv_cache
        self.has_drafter = bundle.manifest.drafter is not None
        self.heads: dict[str, HeadsEntry] = {heads.kind: heads for heads in bundle.manifest.heads}
        self.most_rows = MOST_ROWS
        self._pad = bundle.manifest.pad_token_id or 0
        self._program = Program(bundle, MOST_ROWS, threads, preparation, lookup, kv_cache)
        self.cache_places = self._program.caches
        self.experts = self._program.experts
        self.paths: PathMemory | None = PathMemory(bundle)
        self.origin = Origin(bundle.content, self.name, kv_cache, "exact" if lookup is None else lookup.name)
        self._pool = ThreadPool(threads, self._program.scratch_bytes, self._program.kinds)
        weakref.finalize(self, self._pool.close)  # ends the threads of an engine that was dropped without `close`
        self._scratch = AttentionScratch(*self._program.widest_attention, threads)
        self._lookup, self._lookup_scratch = lookup, None
        if lookup is not None:
            self._lookup_scratch = LookupScratch(*self._program.widest_lookup(lookup.width), threads)
        self._state = ForwardState(self.most_rows, self._program.target_frequencies, BITS[self._cache_type])
        self._state.set_window(self.target.sliding_window)
        self._outputs = OutputPool(self._program.logits_width, self.target.hidden_size)
        begin = None if lookup is None else lookup.begin
        self._target = TargetForward(self._program, self._pool, self._state, self._scratch, self._lookup_scratch, begin)
        self._since_release = 0
        self._lock = threading.Lock()
        self._fork_guard = ForkGuard()
        self._closed = False

    def open_session(self) -> SimdSession:
        self._check_open()
        return SimdSession(self)

    def load_session(self, path: str | PathLike[str]) -> SimdSession:
        session = self.open_session()
        session.load(path, self.target.vocab_size, self.context_length)
        return session

    def forward(self, batch: Sequence[Rows]) -> list[Outputs]:
        sessions = self._checked(batch)
        rows = Batch(batch, self._pad)
        self._fork_guard.check()
        with self._lock:
            self._check_open()
            started = time.perf_counter()
            kept = [session.take_kept() for session in sessions]
            records = [session.prepare(tree) for session, tree in zip(sessions, rows.trees, strict=True)]
            buffer, lease = self._outputs.lease(len(rows.wanted))
            self._state.slots[slots.LOGITS], self._state.slots[slots.HIDDEN] = buffer.addresses
            self._program.check_files()
            kept = [session.still_cached(each) for session, each in zip(sessions, kept, strict=True)]
            self._state.slots[slots.EXPERTS_READ] = 0
            threads = self._target.run(rows, records, kept)
            if not rows.path.is_whole:
                passed, streams = self._target.lower_streams(rows)
                for session, tree, own in zip(sessions, rows.trees, streams, strict=True):
                    session.keep(passed, tree, own)
            if rows.path.stop is not None:
                buffer.part(0, len(rows.wanted))[1][:] = self._target.ends(len(rows.wanted))
            self._release_tables(len(rows.tokens))
            read = int(self._state.slots[slots.EXPERTS_READ]) / max(1, self._program.expert_layers)
            seconds = time.perf_counter() - started
        outputs, first = [], 0
        for session, tree, count in zip(sessions, rows.trees, rows.counts, strict=True):
            session.finish(tree if rows.path.is_whole else None, lease)
            logits, hidden = buffer.part(first, count)
            width = self.target.vocab_size if rows.path.stop is None else 0
            sizes = len(rows.tokens), len(rows.wanted)
            outputs.append(Outputs(logits[:, :width], hidden, *sizes, seconds, threads, read))
            first += count
        return outputs

    def close(self) -> None:
        """Wait for a running forward and end the threads. Engine and sessions can compute nothing afterwards."""
        if not self._fork_guard.in_own_process:
            return  # a fork does not have the threads, one of which may hold the lock
        with self._lock:
            if not self._closed:
                self._closed = True
                self._pool.close()
                del self._program, self._state, self._scratch, self._outputs, self._target

    # For sessions: what a new one consists of, and the runs of its drafter and heads.

    def make_caches(self) -> dict[AttentionKind, KVCache]:
        """The caches of a new session."""
        kind = self._cache_type
        unit_type = partial(layer_unit_type, kind)
        return make_caches(self.target, unit_type, self.most_rows, dict.fromkeys(KINDS, VIEWS[kind]), UNITS[kind])

    def key_index(self) -> KeyIndex | None:
        """The key index of a new session; None if attention is exact."""
        if self._lookup is None:
            return None
        owners = ((index, self.target.layers[index]) for index in self._program.looked_up)
        sizes = {index: (layer.kv_heads, layer.head_dim) for index, layer in owners}
        return KeyIndex(self._lookup, sizes)

    def draft_state(self) -> DraftState | None:
        """The drafter's state for a new session; None if there is no drafter."""
        program = self._program
        if program.drafter is None:
            return None
        return DraftState(program.drafter, program.drafter_frequencies, BITS[self._cache_type])

    def heads_states(self) -> dict[str, HeadsState]:
        """The states of heads for a new session, by kind."""
        return {kind: HeadsState(plan) for kind, plan in self._program.heads.items()}

    def run_draft_step(self, drafts: DraftState, record: SequenceRecord, token: int, hidden: Float32Array) -> DraftStep:
        """Run one draft step of the session with this state and record."""
        if not 0 <= token < self.target.vocab_size:
            raise ValueError(f"token ids must be within 0..{self.target.vocab_size - 1}")
        self._fork_guard.check()
        with self._lock:
            self._check_open()
            plan = self._program.drafter
            assert plan is not None
            self._program.check_files()
            plan.target_hidden[:] = hidden
            plan.token[0] = token
            drafts.use(record, self._scratch, self._lookup_scratch)
            steps = plan.steps if self._looks_up(record.length) else plan.exact
            self._pool.run(steps, drafts.slots, DRAFT_STEP)
        return drafts.answer

    def run_heads(self, kind: str, state: HeadsState, hidden: Float32Array) -> Proposals:
        """Run the heads of a kind for the session with this state."""
        self._fork_guard.check()
        with self._lock:
            self._check_open()
            plan = self._program.heads[kind]
            self._program.check_files()
            plan.hidden[:] = hidden
            self._pool.run(plan.steps, state.slots, PROPOSALS[kind])
        return state.answer

    def _checked(self, batch: Sequence[Rows]) -> list[SimdSession]:
        """The sessions of a batch, all different, open and of this engine; raises as `Engine.forward` does."""
        sessions = [self._own(rows.session) for rows in batch]
        check_batch(batch, self.target, self.most_rows)
        path = batch[0].path
        if not path.is_whole:
            path.check(self.target)
        if any(rows.path != path for rows in batch):
            raise ValueError("the rows of a forward pass the same path")
        return sessions

    def _own(self, session: Session) -> SimdSession:
        if not isinstance(session, SimdSession) or session.engine is not self:
            raise ValueError("a session can only run on the engine that opened it")
        session.check_open()
        return session

    def _looks_up(self, position: int) -> bool:
        """Whether a row at this position may use lookups."""
        return self._lookup is not None and position + 1 >= self._lookup.begin

    def _release_tables(self, rows: int) -> None:
        """Count rows, and every RELEASE_EVERY of them release the pages of mapped tables."""
        self._since_release += rows
        if self._since_release >= RELEASE_EVERY:
            self._since_release = 0
            self._program.files.release()

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("this engine is closed: open the bundle again")


class SimdSession(CachedSequence):
    """See `Session`.

    Attributes:
        engine: the engine that runs it.
    """

    def __init__(self, engine: SimdEngine) -> None:
        super().__init__(engine.make_caches(), engine.origin)
        self.engine = engine
        self._record = SequenceRecord(engine.cache_places)
        self._index = engine.key_index()
        self._lease: Lease | None = None
        self._kept: KeptRows | None = None
        # made here, because a generation's first draft step is timed: with this in it, it took three times as long
        self._drafts: DraftState | None = engine.draft_state()
        self._drafts_after: int | None = None
        """The length for which the draft state was set up; None after a forward."""
        self._heads: dict[str, HeadsState] = engine.heads_states()

    def max_rows(self, block: int = 1) -> int:
        self.check_open()
        most = self.engine.most_rows if self._index is None else min(self.engine.most_rows, self._index.most_rows)
        return min(most, self.engine.context_length - self.length)

    # A forward calls these in order: take_kept, prepare, still_cached, then keep for a draft, then finish.

    def take_kept(self) -> KeptRows | None:
        """Return, and forget, what the last draft forward left: the forward that begins may overwrite it."""
        kept, self._kept = self._kept, None
        return kept

    def prepare(self, tree: TokenTree) -> SequenceRecord:
        """Drop the last forward's pending rows and outputs, and make room for new rows.

        Returns:
            The sequence's record for the kernels, complete but for the rows and their places in the forward.
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

    def still_cached(self, kept: KeptRows | None) -> KeptRows | None:
        """`kept` if the caches still hold its rows after they made room for new ones, else None."""
        return kept if kept is not None and (kept.length, kept.bases) == (self.length, self._bases) else None

    def keep(self, passed: LayerPath, tree: TokenTree, streams: list[Float32Array]) -> None:
        """Keep what a draft forward computed in the lower layers, for the next forward."""
        if tree.is_chain:
            self._kept = KeptRows(passed, tree.tokens, streams, self.length, self._bases)

    def finish(self, tree: TokenTree | None, lease: Lease) -> None:
        """End a forward.

        Args:
            tree: the rows that `commit` may keep; None after a draft forward.
            lease: keeps the buffer with the outputs from being reused.
        """
        self._pending = tree
        self._lease = lease

    def draft_step(self, token: int, hidden: Float32Array) -> DraftStep:
        self.check_open()
        engine, drafts = self.engine, self._drafts
        if drafts is None:
            raise UsageError("this bundle has no drafter: use --drafter ngram or none")
        if self._drafts_after != self.length:
            drafts.begin(self._record, self._caches, self.length, engine.target.sliding_window)
            self._follow_index(self.length)
            self._drafts_after = self.length
        return engine.run_draft_step(drafts, self._record, token, hidden)

    def propose(self, kind: str, hidden: Float32Array) -> Proposals:
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

    @property
    def _bases(self) -> tuple[int, ...]:
        return tuple(cache.base for cache in self._caches.values())

    def _follow_index(self, length: int) -> None:
        if self._index is not None:
            self._index.follow(self._caches["full"], length)
            self._record.follow_index(self._index)

    def _sibling(self) -> SimdSession:
        return self.engine.open_session()
