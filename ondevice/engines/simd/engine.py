"""The `simd` engine: see `ondevice.engines.protocol.Engine`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ondevice.bundle import Bundle
from ondevice.contract import AttentionKind
from ondevice.engines.committed import CommittedRows, context_within
from ondevice.engines.protocol import DraftStep, Floats, Outputs, TokenTree
from ondevice.engines.simd.crew import Crew
from ondevice.engines.simd.first_run import announce_compilation
from ondevice.engines.simd.kernels import rows as slots
from ondevice.engines.simd.kv_store import HalfCache
from ondevice.engines.simd.plan import KIND_NUMBERS
from ondevice.engines.simd.program import load_program
from ondevice.engines.simd.state import ForwardState
from ondevice.errors import UsageError
from ondevice.manifest import Target
from ondevice.progress import Progress, silent

KINDS: tuple[AttentionKind, ...] = ("full", "sliding")

MOST_ROWS = 512
"""Rows of a forward. Each reads the upper layers once, for the wanted rows: 1 x 512 costs 3 % less than 2 x 256."""


class SimdEngine(CommittedRows):
    name = "simd"

    def __init__(
        self, bundle: Bundle, threads: int, context_length: int | None = None, on_pack: Progress = silent
    ) -> None:
        """
        Args:
            bundle: what to run.
            threads: that compute.
            context_length: most tokens of a sequence; None takes the target's own.
            on_pack: hears of the bytes that are packed, the first time.

        Raises:
            UnsupportedGraphError: the graphs hold something that there is no kernel for; another engine may run them.
            BundleCorruptError: they are not what they claim to be.
        """
        self.target = bundle.manifest.target
        self.context_length = context_within(context_length, self.target.context_length)
        self._drafter_model = bundle.manifest.drafter
        self.has_drafter = self._drafter_model is not None
        announce_compilation()
        self._program = load_program(bundle, MOST_ROWS, threads, on_pack)
        self._crew = Crew(threads, self._program.scratch_bytes)
        self._caches = _make_caches(self.target)
        super().__init__(self._caches)
        self._slots = {layer: index for index, layer in enumerate(self.target.kv_layers())}
        self._state = ForwardState(len(self._slots), self._program.target_turns, threads)
        self._draft_state = self._make_draft_state()
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
        state.point(slots.WANTED_ROWS, chosen)
        positions = self._length + rows.depths()
        for kind, cache in self._caches.items():
            cache.reserve(self._length, count)
            first = np.zeros(count, np.int64)
            if kind == "sliding":
                first = np.maximum(0, positions - self.target.sliding_window + 1)
            state.set_kind(kind, positions, first, positions + 1, cache.base)
            for layer in cache.layers:
                state.set_cache(self._slots[layer], cache.parts(layer))
        state.reserve_scores(max(cache.capacity for cache in self._caches.values()))
        logits, hidden = self._output_rows(len(chosen))
        state.point(slots.LOGITS, logits)
        state.point(slots.HIDDEN, hidden)
        self._crew.run(self._program.target, state.slots)
        self._pending = count
        return Outputs(logits[:, : self.target.vocab_size], hidden)

    def draft_step(self, token: int, hidden: Floats) -> DraftStep:
        plan = self._program.drafter
        if plan is None:
            raise UsageError("this bundle has no drafter: use --drafter ngram or none")
        if not 0 <= token < self.target.vocab_size:
            raise ValueError(f"token ids must be within 0..{self.target.vocab_size - 1}")
        plan.target_hidden[:] = hidden
        state = self._draft_state
        state.set_tree(TokenTree.chain([token]), self._length)
        self._point_at_shared_caches(state)
        self._crew.run_alone(plan.steps, state.slots)
        return DraftStep(plan.candidates.copy(), plan.logits.copy(), plan.next_hidden.copy())

    def close(self) -> None:
        """End the threads and drop the cache; the engine is of no use afterwards."""
        self._crew.close()
        self.__dict__.clear()

    @property
    def _widths(self) -> tuple[int, int]:
        return self._program.logits_width, self.target.hidden_size

    def _output_rows(self, count: int) -> tuple[Floats, Floats]:
        """Buffers that grow to the most rows ever wanted: 8 rows of 262,144 logits are 8 MiB of page faults."""
        if count > len(self._outputs.logits):
            self._outputs = Outputs(*(np.zeros((count, width), np.float32) for width in self._widths))
        return self._outputs.logits[:count], self._outputs.hidden[:count]

    def _point_at_shared_caches(self, state: ForwardState) -> None:
        """Verified rows only. The reference's window is inclusive here: the last `window + 1` of them.

        Source: `create_bidirectional_sliding_window_mask` over the flipped cache, Gemma4AssistantForCausalLM.
        """
        model = self._drafter_model
        assert model is not None
        position = np.array([self._length])
        for kind, layer in zip(KINDS, (model.full_layer, model.sliding_layer), strict=True):
            cache = self._caches[kind]
            first = max(0, self._length - 1 - self.target.sliding_window) if kind == "sliding" else 0
            state.set_kind(kind, position, np.array([first]), position, cache.base)
            state.set_cache(KIND_NUMBERS[kind], cache.parts(layer))
        state.reserve_scores(max(cache.capacity for cache in self._caches.values()))

    def _make_draft_state(self) -> ForwardState:
        state = ForwardState(len(KINDS), self._program.drafter_turns, 1)
        plan = self._program.drafter
        if plan is not None:
            state.point(slots.HIDDEN, plan.normed)
            state.point(slots.CANDIDATES, plan.candidates)
        return state


def _make_caches(target: Target) -> dict[AttentionKind, HalfCache]:
    caches: dict[AttentionKind, HalfCache] = {}
    for kind in KINDS:
        owners = [index for index in target.kv_layers() if target.layers[index].kind == kind]
        widths = {index: target.layers[index].kv_width for index in owners}
        # window - 1 rows are enough for the target, the drafter sees two more
        history = target.sliding_window + 1 if kind == "sliding" else None
        caches[kind] = HalfCache(widths, MOST_ROWS, history)
    return caches
