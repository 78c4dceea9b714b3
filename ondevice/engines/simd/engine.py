"""The `simd` engine: see `ondevice.engines.protocol.Engine`."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np

from ondevice.bundle import Bundle
from ondevice.contract import AttentionKind
from ondevice.engines.committed import CommittedRows, context_within
from ondevice.engines.protocol import DraftStep, Floats, KVCacheType, Outputs, TokenTree
from ondevice.engines.simd.forward_state import ForwardState
from ondevice.engines.simd.kernels import slots
from ondevice.engines.simd.kv_store import BITS, KVStore, row_type
from ondevice.engines.simd.plan.builder import KIND_NUMBERS
from ondevice.engines.simd.program import load_program
from ondevice.engines.simd.thread_pool import ThreadPool
from ondevice.errors import UsageError
from ondevice.manifest import Target
from ondevice.progress import Progress, silent

KINDS: tuple[AttentionKind, ...] = ("full", "sliding")

MOST_ROWS = 512
"""Rows of a forward. Each reads the upper layers once, for the wanted rows: 1 x 512 costs 3 % less than 2 x 256."""

RELEASE_EVERY = 512
"""Rows after which the pages of tables that they mapped are let go of."""


class SimdEngine(CommittedRows):
    name = "simd"

    def __init__(
        self,
        bundle: Bundle,
        threads: int,
        context_length: int | None = None,
        *,
        kv_cache: KVCacheType = "fp16",
        on_pack: Progress = silent,
    ) -> None:
        """
        Args:
            bundle: what to run.
            threads: that compute.
            context_length: most tokens of a sequence; None takes the target's own.
            kv_cache: how keys and values are kept.
            on_pack: hears of the bytes that are packed, the first time.

        Raises:
            UnsupportedGraphError: the graphs hold something that there is no kernel for; another engine may run them.
            BundleCorruptError: they are not what they claim to be.
        """
        self.target = bundle.manifest.target
        self.context_length = context_within(context_length, self.target.context_length)
        self._drafter_model = bundle.manifest.drafter
        self.kv_cache: str = kv_cache
        self.has_drafter = self._drafter_model is not None
        self._program = load_program(bundle, MOST_ROWS, threads, on_pack)
        self._pool = ThreadPool(threads, self._program.scratch_bytes)
        weakref.finalize(self, self._pool.close)  # its threads would outlive an engine that nobody closed
        self._caches = _make_caches(self.target, kv_cache)
        super().__init__(self._caches)
        self._slots = {layer: index for index, layer in enumerate(self.target.kv_layers())}
        bits, turns = BITS[kv_cache], self._program.target_frequencies
        self._state = ForwardState(len(self._slots), bits, turns, self._widest_head, threads)
        self._run_drafter = self._pool.run if self._program.drafter_shared else self._pool.run_alone
        self._draft_state = self._make_draft_state(bits, threads)
        self._drafts_after: int | None = None
        self._pointed_at: dict[AttentionKind, int] = {}
        self._since_release = 0
        for kind in KINDS:
            self._point_at_cache(kind)
        self._outputs = Outputs(*(np.zeros((0, width), np.float32) for width in self._widths))

    def max_rows(self) -> int:
        return min(MOST_ROWS, self.context_length - self._length)

    def forward(self, rows: TokenTree, wanted: Sequence[int]) -> Outputs:
        """See `Engine.forward`. The arrays are the engine's own and hold until the next forward."""
        count, chosen = len(rows.tokens), np.ascontiguousarray(wanted, np.int64)
        if not 0 < count <= self.max_rows():
            raise ValueError(f"{count} rows do not fit: at most {self.max_rows()} now")
        if len(chosen) > MOST_ROWS or ((chosen < 0) | (chosen >= count)).any():
            raise ValueError(f"wanted rows must be within 0..{count - 1}, at most {MOST_ROWS}")
        if rows.tokens.min() < 0 or rows.tokens.max() >= self.target.vocab_size:
            raise ValueError(f"token ids must be within 0..{self.target.vocab_size - 1}")
        state = self._state
        state.set_tree(rows, self._length)
        state.slots[slots.WANTED] = len(chosen)
        state.put(slots.WANTED_ROWS, chosen)
        positions = self._length + rows.depths()
        self._drafts_after = None
        for kind, cache in self._caches.items():
            cache.reserve(self._length, count)
            self._point_at_cache(kind)
            first = np.zeros(count, np.int64)
            if kind == "sliding":
                first = np.maximum(0, positions - self.target.sliding_window + 1)
            state.set_kind(kind, positions, first, positions + 1, cache.base)
        logits, hidden = self._output_rows(len(chosen))
        self._program.check_pack()
        self._pool.run(self._program.target, state.slots)
        self._pending = count
        self._since_release += count
        if self._since_release >= RELEASE_EVERY:
            self._since_release = 0
            self._program.sources.release()
        return Outputs(logits[:, : self.target.vocab_size], hidden)

    def draft_step(self, token: int, hidden: Floats) -> DraftStep:
        """See `Engine.draft_step`. The arrays are the engine's own and hold until the next step."""
        plan = self._program.drafter
        if plan is None:
            raise UsageError("this bundle has no drafter: use --drafter ngram or none")
        if not 0 <= token < self.target.vocab_size:
            raise ValueError(f"token ids must be within 0..{self.target.vocab_size - 1}")
        if self._drafts_after != self._length:
            self._begin_drafts()
        plan.target_hidden[:] = hidden
        plan.token[0] = token
        self._run_drafter(plan.steps, self._draft_state.slots)
        return DraftStep(plan.candidates, plan.logits, plan.next_hidden)

    def close(self) -> None:
        """End the threads and drop the cache; the engine is of no use afterwards."""
        self._pool.close()
        self.__dict__.clear()

    @property
    def _widths(self) -> tuple[int, int]:
        return self._program.logits_width, self.target.hidden_size

    @property
    def _widest_head(self) -> int:
        return max(layer.head_dim for layer in self.target.layers)

    def _output_rows(self, count: int) -> tuple[Floats, Floats]:
        """Buffers that grow to the most rows ever wanted: 8 rows of 262,144 logits are 8 MiB of page faults."""
        if count > len(self._outputs.logits):
            outputs = Outputs(*(np.zeros((count, width), np.float32) for width in self._widths))
            self._state.point(slots.LOGITS, outputs.logits)
            self._state.point(slots.HIDDEN, outputs.hidden)
            self._outputs = outputs  # last: after an interrupt they are not taken for pointed at
        return self._outputs.logits[:count], self._outputs.hidden[:count]

    def _point_at_cache(self, kind: AttentionKind) -> None:
        """Tell both states where the layers of a kind keep their rows, if that is somewhere else now."""
        cache, model = self._caches[kind], self._drafter_model
        capacity = cache.capacity
        if self._pointed_at.get(kind) == capacity:
            return
        for layer in cache.layers:
            self._state.set_cache(self._slots[layer], cache.parts(layer))
        self._state.reserve_lines(capacity)
        if model is not None:
            shared = model.full_layer if kind == "full" else model.sliding_layer
            self._draft_state.set_cache(KIND_NUMBERS[kind], cache.parts(shared))
            self._draft_state.reserve_lines(capacity)
        self._pointed_at[kind] = capacity  # last, for an interrupt may have come before

    def _begin_drafts(self) -> None:
        """What all steps of a round share: they attend from the newest token's position to verified rows only.

        The reference's window is inclusive here: the last `window + 1` of them. Source:
        `create_bidirectional_sliding_window_mask` over the flipped cache, Gemma4AssistantForCausalLM.
        """
        state, position = self._draft_state, np.array([self._length])
        state.slots[slots.LENGTH] = self._length
        for kind, cache in self._caches.items():
            first = max(0, self._length - 1 - self.target.sliding_window) if kind == "sliding" else 0
            state.set_kind(kind, position, np.array([first]), position, cache.base)
        self._drafts_after = self._length

    def _make_draft_state(self, bits: int, threads: int) -> ForwardState:
        state = ForwardState(len(KINDS), bits, self._program.drafter_frequencies, self._widest_head, threads)
        plan = self._program.drafter
        if plan is not None:
            state.slots[slots.ALL] = 1
            state.point(slots.TOKENS, plan.token)
            state.point(slots.HIDDEN, plan.normed)
            state.point(slots.CANDIDATES, plan.candidates)
        return state


def _make_caches(target: Target, kv_cache: KVCacheType) -> dict[AttentionKind, KVStore]:
    caches: dict[AttentionKind, KVStore] = {}
    for kind in KINDS:
        owners = {index: target.layers[index] for index in target.kv_layers() if target.layers[index].kind == kind}
        types = {index: row_type(kv_cache, layer.kv_heads, layer.head_dim) for index, layer in owners.items()}
        # window - 1 rows are enough for the target, the drafter sees two more
        history = target.sliding_window + 1 if kind == "sliding" else None
        caches[kind] = KVStore(types, MOST_ROWS, history)
    return caches
