"""The `simd` engine and its sessions: see `Engine` and `Session` in `ondevice.engines.protocol`.

`SimdEngine` owns what all sequences share: the program (plans and packed weights), the thread pool, the working memory
and the output buffers. One thread computes at a time, under the engine's lock. `SimdSession` owns one sequence: caches,
key index, its record for the kernels, and the states of its drafter and heads.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from os import PathLike
from typing import Self

from ondevice.arrays import Float32Array
from ondevice.bundle import Bundle
from ondevice.bundle_format.graph_io import AttentionKind
from ondevice.bundle_format.model_config import HeadsEntry
from ondevice.engines.kv_cache import MARGIN, KVCache, make_caches
from ondevice.engines.layer_path import LayerPath, PathMemory
from ondevice.engines.protocol import (
    DraftStep,
    EngineDrafts,
    KVCacheType,
    MultiStep,
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
from ondevice.engines.session_file import SessionOrigin
from ondevice.engines.simd.buffers import Lease, OutputBuffer, OutputPool
from ondevice.engines.simd.caches import BITS, CONVOLVED_ROWS, UNITS, VIEWS, KeyIndex, LookupSettings, cache_unit
from ondevice.engines.simd.forward_state import DraftState, ForwardState, HeadsState, SequenceRecord
from ondevice.engines.simd.kernels.contract import slots
from ondevice.engines.simd.kernels.contract.slots import MAX_ROWS
from ondevice.engines.simd.program import Program
from ondevice.engines.simd.target_forward import ForwardRows, KeptRows, TargetForward
from ondevice.engines.states import RecurrentStates
from ondevice.errors import UsageError
from ondevice.forks import ForkGuard
from ondevice.preparation import Preparation

RELEASE_EVERY = 512
"""Rows after which the pages of mapped tables that they read are released."""

PROPOSALS = {"medusa": -1, "blockwise": -2, "exit": -3}
DRAFT_STEP = -4
"""Kinds of work for the thread pool: runs of heads by kind, and draft steps. Those of forwards are not negative."""


class SimdEngine:
    """See `Engine`.

    Attributes:
        origin: the settings that a file of one of its sequences must have been written with.
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
            bundle, threads, context_length, kv_cache, preparation: as for `choice.open_engine`.
            lookup: settings of lookup attention in layers with full attention; None attends exactly.

        Raises:
            UnsupportedGraphError: there is no kernel for a format or size of the weights; another engine may run them.
            BundleCorruptError: the tensor tables contradict the configuration or the files.
            UsageError: the context length is impossible.
        """
        self.target = bundle.manifest.target
        self.context_length = context_within(context_length, self.target.context_length)
        self.kv_cache: str = kv_cache
        self._cache_type: KVCacheType = kv_cache
        self.drafter = bundle.manifest.drafter
        self.heads: dict[str, HeadsEntry] = {heads.kind: heads for heads in bundle.manifest.heads}
        self.most_rows = MAX_ROWS
        self.rows_of_one = min(MAX_ROWS, CONVOLVED_ROWS) if self.target.convolves else MAX_ROWS
        self._pad = bundle.manifest.pad_token_id or 0
        self._program = Program(bundle, MAX_ROWS, threads, preparation, lookup)
        self.experts = self._program.models.experts
        self.paths: PathMemory | None = PathMemory(bundle)
        self.origin = SessionOrigin(bundle.content, self.name, kv_cache, "exact" if lookup is None else lookup.name)
        weakref.finalize(self, self._program.pool.close)  # ends the threads of an engine that is dropped, not closed
        self._lookup = lookup
        self._state = ForwardState(self.most_rows, self.target.frequencies(), BITS[kv_cache])
        self._state.set_window(self.target.window)
        self._outputs = OutputPool(self._program.logits_width, self.target.hidden_size)
        self._target = TargetForward(self._program, self._state)
        self._since_release = 0
        self._lock = threading.Lock()
        self._fork_guard = ForkGuard()
        self._closed = False

    def open_session(self) -> SimdSession:
        self._check_open()
        program, kind = self._program, self._cache_type
        caches = make_caches(self.target, partial(cache_unit, kind), self.rows_of_one, VIEWS, UNITS)
        states = RecurrentStates(shapes, self.rows_of_one) if (shapes := self.target.states) else None
        index = KeyIndex(self._lookup, program.looked_up) if self._lookup and program.looked_up else None
        drafts, drafter = None, program.models.drafter
        if program.drafter is not None and drafter is not None:
            drafts = DraftState(program.drafter, drafter.config.frequencies(), BITS[kind])
        heads = {kind: HeadsState(plan) for kind, plan in program.heads.items()}
        return SimdSession(self, caches, states, SequenceRecord(program.caches), index, drafts, heads)

    def load_session(self, path: str | PathLike[str]) -> SimdSession:
        session = self.open_session()
        session.load(path, self.target.vocab_size, self.context_length)
        return session

    def forward(self, batch: Sequence[Rows]) -> list[Outputs]:
        sessions = self._checked(batch)
        if (
            len(batch) == 1
            and (continuation := batch[0].continuation) is not None
            and continuation.drafting is not None
        ):
            return [self._draft_and_verify(sessions[0], batch[0], continuation, continuation.drafting)]
        rows = ForwardRows.of(batch, self._pad, [len(session.unread) for session in sessions])
        if sessions[0].looks_up or self.target.states:  # codes of keys, and states, are set between two forwards
            rows.continuation = None
        is_whole = rows.path.is_whole
        with self.computing() as program:
            started = time.perf_counter()
            following = rows.following
            prepared = [
                session.prepare(len(tree) + following) for session, tree in zip(sessions, rows.trees, strict=True)
            ]
            records, kept = [record for record, _ in prepared], [each for _, each in prepared]
            buffer, lease = self._lease(len(rows.wanted) + following)
            threads = self._target.run(rows, records, kept)
            if not is_whole:
                passed, streams = self._target.lower_streams(rows)
                for session, tree, own in zip(sessions, rows.trees, streams, strict=True):
                    session.keep(passed, tree, own)
            if rows.path.stop is not None:
                buffer.part(0, len(rows.wanted))[1][:] = program.target.ends[: len(rows.wanted)]
            runs = 1 if rows.continuation is None else self._state.runs
            self._release_tables(len(rows.tokens) * runs)
            read = self._experts_read(runs)
            chosen = self._state.chosen() if runs > 1 else []
            seconds = (time.perf_counter() - started) / runs
        outputs, first = [], 0
        for session, given, count in zip(sessions, batch, rows.counts, strict=True):
            pending = given.tree if not chosen else TokenTree.chain([*given.tree.tokens.tolist(), *chosen])
            session.finish(pending if is_whole else None, lease)
            logits, hidden = buffer.part(first, count + len(chosen))
            width = self.target.vocab_size if rows.path.stop is None else 0
            sizes = len(rows.tokens), len(rows.wanted)
            outputs.append(Outputs(logits[:, :width], hidden, *sizes, seconds, threads, read, chosen))
            first += count
        return outputs

    def _draft_and_verify(
        self, session: SimdSession, given: Rows, continuation: MultiStep, drafting: EngineDrafts
    ) -> Outputs:
        """Run rounds of a draft and a forward in one call of the kernels."""
        tree = drafting.tree(int(given.tree.tokens[0]))  # the kernels write the drafted tokens
        count = len(tree)
        rows = ForwardRows(given.path, [tree], [session.length], [range(count)])
        rows.continuation = continuation
        with self.computing():
            started = time.perf_counter()
            record, _ = session.prepare(continuation.most * count)
            buffer, lease = self._lease(count)
            threads = self._target.run_rounds(rows, record, session.begin_drafts(continuation.most * count - 1))
            runs, chosen = self._state.runs, self._state.chosen()
            self._release_tables(count * runs)
            read = self._experts_read(runs)
            seconds = (time.perf_counter() - started) / runs
            last, verdicts, share = self._state.last_row, self._state.verdicts(), self._state.draft_share
        session.finish(TokenTree.chain([*given.tree.tokens.tolist(), *chosen]), lease)
        logits, hidden = buffer.part(last, 1)
        return Outputs(
            logits[:, : self.target.vocab_size], hidden, count, count, seconds, threads, read, chosen, verdicts, share
        )

    def _lease(self, rows: int) -> tuple[OutputBuffer, Lease]:
        """Lease room for the outputs of so many rows, which the next forward writes."""
        buffer, lease = self._outputs.lease(rows)
        self._state.slots[slots.LOGITS], self._state.slots[slots.HIDDEN] = buffer.addresses
        self._state.slots[slots.EXPERTS_READ] = 0
        return buffer, lease

    def _experts_read(self, runs: int) -> float:
        """The number of experts that a layer read, a mean over layers and runs of the last call."""
        return int(self._state.slots[slots.EXPERTS_READ]) / max(1, self._program.expert_layers) / runs

    def close(self) -> None:
        """Wait for a running forward and end the threads. Engine and sessions can compute nothing afterwards."""
        if not self._fork_guard.in_own_process:
            return  # a fork does not have the threads, one of which may hold the lock
        with self._lock:
            if not self._closed:
                self._closed = True
                self._program.pool.close()
                del self._program, self._state, self._outputs, self._target

    @contextmanager
    def computing(self) -> Iterator[Program]:
        """Let one thread compute at a time; yields the program, whose files were checked.

        Raises:
            UsageError: the engine is closed.
            BundleCorruptError: a mapped file was truncated.
        """
        self._fork_guard.check()
        with self._lock:
            self._check_open()
            self._program.check_files()
            yield self._program

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

    def _release_tables(self, rows: int) -> None:
        """Count rows, and every RELEASE_EVERY of them release the pages of mapped tables."""
        self._since_release += rows
        if self._since_release >= RELEASE_EVERY:
            self._since_release = 0
            self._program.models.files.release()

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("this engine is closed: open the bundle again")


class SimdSession(CachedSequence):
    """See `Session`.

    Attributes:
        engine: the engine that runs it.
    """

    def __init__(
        self,
        engine: SimdEngine,
        caches: Mapping[AttentionKind, KVCache],
        states: RecurrentStates | None,
        record: SequenceRecord,
        index: KeyIndex | None,
        drafts: DraftState | None,
        heads: Mapping[str, HeadsState],
    ) -> None:
        """
        Args:
            engine: runs its forwards; its `origin` is the sequence's.
            caches, states: as in `CachedSequence`.
            record: the sequence's record for the kernels.
            index: the codes of its keys; None if all attention is exact.
            drafts: the drafter's state, if there is one. Made here, because a generation's first draft step, which is
                timed, would take three times as long with it.
            heads: the states of heads, by kind.
        """
        super().__init__(caches, engine.origin, states)
        self.engine = engine
        self._record, self._index, self._drafts, self._heads = record, index, drafts, heads
        self._lease: Lease | None = None
        self._kept: KeptRows | None = None
        self._drafts_after: int | None = None
        """The position for which the draft state was set up; None after a forward."""

    def max_rows(self, block: int = 1) -> int:
        self.check_open()
        most = self.engine.rows_of_one if self._index is None else min(self.engine.rows_of_one, self._index.most_rows)
        most = min(most, self.engine.rows_of_one + MARGIN - len(self.unread))  # both are in the convolutions' cache
        return min(most, self.engine.context_length - self.length)

    @property
    def looks_up(self) -> bool:
        """Whether layers attend by codes of the keys."""
        return self._index is not None

    @property
    def drafts(self) -> DraftStep | None:
        if self._drafts is None or self.looks_up or self._states is not None or self.engine.target.mtp is not None:
            return None
        return self._drafts.answer

    def begin_drafts(self, following: int) -> DraftState:
        """Set up the drafter for rounds that follow each other, with so many further positions."""
        drafts = self._drafts
        if drafts is None or self.looks_up:
            raise UsageError("the engine cannot draft for this sequence: see Session.drafts")
        drafts.begin(self._record, self._caches, self.length, self.engine.target.window, following)
        return drafts

    # A forward calls these in order: prepare, then keep for a draft, then finish.

    def prepare(self, rows: int) -> tuple[SequenceRecord, KeptRows | None]:
        """Drop the last forward's pending rows and outputs, and make room for so many new ones.

        Returns:
            The sequence's record for the kernels, complete but for the rows and their places in the forward; and what
            the last draft forward left, if the caches still hold its rows.
        """
        length, record = self.length, self._record
        kept, self._kept = self._kept, None  # the forward that begins may overwrite these rows
        self._pending = self._drafts_after = self._lease = None
        first = self._read  # states pass what follows once more, from the rows of the convolutions' cache
        for cache in self._caches.values():
            cache.reserve(first, length - first + rows)
        record.follow(self._caches)
        self._follow_index(length)
        if self._states is not None:
            self.check_states()
            record.follow_states(self._states)
            self._states.lost = first < length  # until `finish`: the kernels replace them
        return record, kept if kept is not None and (kept.length, kept.bases) == (length, self._bases) else None

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
        if self._states is not None:
            self._states.replaced(self.length)

    def draft_step(self, token: int, hidden: Float32Array, depth: int = 0) -> DraftStep:
        self.check_open()
        engine, drafts, record, length = self.engine, self._drafts, self._record, self.length
        if drafts is None:
            raise UsageError("this bundle has no drafter: use --drafter ngram or none")
        writes = engine.target.mtp is not None
        position = self.draft_position(depth) if writes else length
        if self._drafts_after != position:
            drafts.begin(record, self._caches, position, engine.target.window, writes=writes)
            self._follow_index(length)
            self._drafts_after = position
        if not 0 <= token < engine.target.vocab_size:
            raise ValueError(f"token ids must be within 0..{engine.target.vocab_size - 1}")
        with engine.computing() as program:
            drafts.hidden[:], drafts.token[0] = hidden, token
            drafts.set_sequences([record], program.scratch)  # others may have reallocated the working memory
            program.pool.run(program.steps(drafts.plan, position), drafts.slots, DRAFT_STEP)
            drafts.answer.hidden[:] = drafts.following
        return drafts.answer

    def propose(self, kind: str, hidden: Float32Array) -> Proposals:
        self.check_open()
        if kind not in self._heads:
            raise no_heads(kind)
        heads = self._heads[kind]
        with self.engine.computing() as program:
            heads.hidden[:] = hidden
            program.pool.run(heads.plan.steps, heads.slots, PROPOSALS[kind])
        return heads.answer

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
        # The record holds all keys and values, and an idle drafter still has the session of its last generation.
        self._record = SequenceRecord({})

    @property
    def _bases(self) -> tuple[int, ...]:
        return tuple(cache.base for cache in self._caches.values())

    def _follow_index(self, length: int) -> None:
        if self._index is not None:
            self._index.follow(self._caches["full"], length)
            self._record.follow_index(self._index)

    def _sibling(self) -> SimdSession:
        return self.engine.open_session()
