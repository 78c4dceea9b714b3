"""The `simd` engine: see `ondevice.engines.protocol.Engine`."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Sequence
from functools import partial
from os import PathLike

from ondevice.bundle import Bundle
from ondevice.contract import AttentionKind
from ondevice.engines.context import context_within
from ondevice.engines.kv_cache import KINDS, KVCache, make_caches
from ondevice.engines.path_memory import PathMemory
from ondevice.engines.process import Process
from ondevice.engines.protocol import DraftStep, Floats, KVCacheType, Outputs, Proposals, Rows
from ondevice.engines.session_file import Origin
from ondevice.engines.simd.attention_scratch import AttentionScratch
from ondevice.engines.simd.batch import Batch
from ondevice.engines.simd.cache_rows import BITS, UNITS, VIEWS, layer_unit_type
from ondevice.engines.simd.draft_state import DraftState
from ondevice.engines.simd.forward_state import ForwardState
from ondevice.engines.simd.heads_state import HeadsState
from ondevice.engines.simd.kernels import slots
from ondevice.engines.simd.key_index import KeyIndex
from ondevice.engines.simd.lookup_scratch import LookupScratch
from ondevice.engines.simd.lookup_settings import LookupSettings
from ondevice.engines.simd.output_pool import OutputPool
from ondevice.engines.simd.program import load_program
from ondevice.engines.simd.sequence_record import SequenceRecord
from ondevice.engines.simd.session import SimdSession
from ondevice.engines.simd.target_forward import TargetForward
from ondevice.engines.simd.thread_pool import ThreadPool
from ondevice.errors import UsageError
from ondevice.manifest import HeadsEntry
from ondevice.preparation import Preparation

MOST_ROWS = 512
"""Rows of a forward. Each reads the upper layers once, for the wanted rows: 1 x 512 costs 3 % less than 2 x 256."""

RELEASE_EVERY = 512
"""Rows after which the pages of tables that they mapped are released."""

PROPOSALS = {"medusa": -1, "blockwise": -2, "exit": -3}
DRAFT_STEP = -4
"""Kinds of work for the thread pool, beside those of forwards."""


class SimdEngine:
    """
    Attributes:
        origin: what files of its sequences must fit.
        cache_places: layer -> the place of its cache in a sequence's record.
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
            bundle: what to run.
            threads: that compute.
            context_length: most tokens of a sequence; None takes the target's own.
            kv_cache: how keys and values are kept.
            lookup: how full attention chooses its keys; None where it is exact.
            preparation: hears what is packed, and compiles beside it; without one, kernels are compiled when called.

        Raises:
            UnsupportedGraphError: the graphs hold something that there is no kernel for; another engine may run them.
            BundleCorruptError: they are not what they claim to be.
        """
        self.target = bundle.manifest.target
        self.context_length = context_within(context_length, self.target.context_length)
        self.kv_cache: str = kv_cache
        self._cache_type: KVCacheType = kv_cache
        self.has_drafter = bundle.manifest.drafter is not None
        self.heads: dict[str, HeadsEntry] = {heads.kind: heads for heads in bundle.manifest.heads}
        self.most_rows = MOST_ROWS
        self._program = load_program(bundle, MOST_ROWS, threads, preparation, lookup)
        self.cache_places = self._program.caches
        self.experts = self._program.experts
        self.paths: PathMemory | None = PathMemory(bundle)
        self.origin = Origin(bundle.content, self.name, kv_cache, "exact" if lookup is None else lookup.name)
        self._pool = ThreadPool(threads, self._program.scratch_bytes)
        weakref.finalize(self, self._pool.close)  # its threads would outlive an engine that nobody closed
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
        self._process = Process()
        self._closed = False

    def open_session(self) -> SimdSession:
        self._check_open()
        return SimdSession(self)

    def load_session(self, path: str | PathLike[str]) -> SimdSession:
        session = self.open_session()
        session.load(path, self.target.vocab_size, self.context_length)
        return session

    def forward(self, batch: Sequence[Rows]) -> list[Outputs]:
        rows = Batch(self, batch)
        self._process.check()
        with self._lock:
            self._check_open()
            started = time.perf_counter()
            kept = [session.take_kept() for session in rows.sessions]
            records = [session.prepare(tree) for session, tree in zip(rows.sessions, rows.trees, strict=True)]
            buffer, lease = self._outputs.lease(len(rows.wanted))
            self._state.slots[slots.LOGITS], self._state.slots[slots.HIDDEN] = buffer.addresses
            self._program.check_files()
            begun = [session.still(each) for session, each in zip(rows.sessions, kept, strict=True)]
            self._state.slots[slots.EXPERTS_READ] = 0
            threads = self._target.run(rows, records, begun)
            if not rows.path.is_whole:
                self._target.keep(rows)
            if rows.path.stop is not None:
                buffer.part(0, len(rows.wanted))[1][:] = self._target.ends(len(rows.wanted))
            self._release_tables(len(rows.tokens))
            read = int(self._state.slots[slots.EXPERTS_READ]) / max(1, self._program.expert_layers)
            seconds = time.perf_counter() - started
        outputs, first = [], 0
        for session, tree, count in zip(rows.sessions, rows.trees, rows.counts, strict=True):
            session.finish(tree if rows.path.is_whole else None, lease)
            logits, hidden = buffer.part(first, count)
            width = self.target.vocab_size if rows.path.stop is None else 0
            sizes = len(rows.tokens), len(rows.wanted)
            outputs.append(Outputs(logits[:, :width], hidden, *sizes, seconds, threads, read))
            first += count
        return outputs

    def close(self) -> None:
        """End the threads, when a forward that runs has ended; engine and sessions compute nothing afterwards."""
        if not self._process.is_this_one:
            return  # the threads are not here, and a lock may be held by one of them
        with self._lock:
            if not self._closed:
                self._closed = True
                self._pool.close()
                del self._program, self._state, self._scratch, self._outputs, self._target

    def make_caches(self) -> dict[AttentionKind, KVCache]:
        """Those of a new session."""
        kind = self._cache_type
        unit_type = partial(layer_unit_type, kind)
        return make_caches(self.target, unit_type, self.most_rows, dict.fromkeys(KINDS, VIEWS[kind]), UNITS[kind])

    def key_index(self) -> KeyIndex | None:
        """A new session's; None where attention is exact."""
        if self._lookup is None:
            return None
        owners = ((index, self.target.layers[index]) for index in self._program.looked_up)
        sizes = {index: (layer.kv_heads, layer.head_dim) for index, layer in owners}
        return KeyIndex(self._lookup, sizes)

    def draft_state(self) -> DraftState | None:
        """What a new session drafts with; None where there is no drafter."""
        program = self._program
        if program.drafter is None:
            return None
        return DraftState(program.drafter, program.drafter_frequencies, BITS[self._cache_type])

    def run_draft_step(self, drafts: DraftState, record: SequenceRecord, token: int, hidden: Floats) -> DraftStep:
        """A step of the session whose state and record these are."""
        if not 0 <= token < self.target.vocab_size:
            raise ValueError(f"token ids must be within 0..{self.target.vocab_size - 1}")
        self._process.check()
        with self._lock:
            self._check_open()
            plan = self._program.drafter
            assert plan is not None
            self._program.check_files()
            plan.target_hidden[:] = hidden
            plan.token[0] = token
            drafts.use(record, self._scratch, self._lookup_scratch)
            assert self._program.exact_drafter is not None
            steps = plan.steps if self._looks_up(record.length) else self._program.exact_drafter
            self._pool.run(steps, drafts.slots, DRAFT_STEP)
        return drafts.answer

    def heads_states(self) -> dict[str, HeadsState]:
        """What a new session proposes with, by kind."""
        return {kind: HeadsState(plan) for kind, plan in self._program.heads.items()}

    def run_heads(self, kind: str, state: HeadsState, hidden: Floats) -> Proposals:
        """Proposals of the session whose state this is."""
        self._process.check()
        with self._lock:
            self._check_open()
            plan = self._program.heads[kind]
            self._program.check_files()
            plan.hidden[:] = hidden
            self._pool.run(plan.steps, state.slots, PROPOSALS[kind])
        return state.answer

    def _looks_up(self, position: int) -> bool:
        """Whether a row at this position may look keys up."""
        return self._lookup is not None and position + 1 >= self._lookup.begin

    def _release_tables(self, rows: int) -> None:
        """Now and then, unmap what rows have read of tables."""
        self._since_release += rows
        if self._since_release >= RELEASE_EVERY:
            self._since_release = 0
            self._program.sources.release()

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("this engine is closed: open the bundle again")
