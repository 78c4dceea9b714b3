"""One sequence of the `ort` engine: its caches, and what its runs read and write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ondevice import contract
from ondevice.contract import AttentionKind
from ondevice.engines.heads import no_heads
from ondevice.engines.kv_cache import KINDS, KVCache, Views, make_caches
from ondevice.engines.ort.binding import PARTS, Binding
from ondevice.engines.ort.draft_steps import DraftSteps
from ondevice.engines.ort.heads_run import HeadsRun
from ondevice.engines.protocol import DraftStep, Floats, Proposals
from ondevice.engines.sequence import CachedSequence
from ondevice.engines.session_file import Origin
from ondevice.engines.token_tree import TokenTree, attention_mask
from ondevice.errors import UsageError
from ondevice.manifest import Target

if TYPE_CHECKING:
    from ondevice.engines.ort.engine import OrtEngine

PREFILL_ROWS = 256
"""Rows of a prefill chunk: beyond this the reference pair's prefill gets no faster, and attention scores grow."""

SCORES = 2**25
"""Most attention scores (query heads x rows x keys) of a forward: 128 MiB of float32."""

VIEWS = Views(align=256, step=64, least=128)
"""Which cache rows a graph sees. With these, a row is rounded alike whether it is verified or decoded alone.

align : ONNX Runtime's GEMM sums keys in blocks of 128 or 256; a view that began elsewhere would shift them
step : a graph is bound anew once in 64 tokens, and softmax lanes line up
least : under 128 keys the same GEMM picks another block size, and other roundings (measured at head size 512)
"""


class OrtSession(CachedSequence):
    """See `Session`. All that a run reads or writes belongs to the session, apart from the weights."""

    exact_trees = False
    """A row of a tree has other last bits than in a chain: seeded texts of the reference pair then change."""

    def __init__(
        self,
        engine: OrtEngine,
        origin: Origin,
        bound: Binding,
        draft_steps: DraftSteps | None,
        heads: Mapping[str, HeadsRun],
    ) -> None:
        super().__init__(_caches(engine.target), origin)
        self.engine = engine
        self._bound = bound
        self._draft_steps = draft_steps
        self._heads = heads
        self._outputs = _OutputBuffers(engine.target)

    def max_rows(self) -> int:
        self.check_open()
        by_memory = max(1, SCORES // (self.engine.target.query_heads * (self.length + PREFILL_ROWS)))
        return min(PREFILL_ROWS, by_memory, self.engine.context_length - self.length)

    def set_pending(self, tree: TokenTree | None) -> None:
        """Say which rows `commit` may keep."""
        self._pending = tree

    def run(self, tree: TokenTree, wanted: Sequence[int]) -> tuple[Floats, Floats]:
        """Run rows that were checked, and write their KV behind the committed rows.

        Returns:
            Logits and hidden states of the wanted rows, in arrays that hold until the session runs again.
        """
        bound, length, count = self._bound, self.length, len(tree)
        bound.array(contract.TOKEN_IDS, np.asarray(tree.tokens, np.int64))
        bound.array(contract.POSITIONS, length + tree.depths())
        needed = wanted if len(wanted) else [0]  # ONNX Runtime's Attention refuses zero rows
        bound.array(contract.WANTED, np.asarray(needed, np.int64))
        for kind, cache in self._caches.items():
            start, stop = cache.reserve(length, count)
            window = self.engine.target.sliding_window if kind == "sliding" else None
            bound.array(contract.mask(kind), attention_mask(tree, length, (start, stop), window))
            bound.array(contract.write_index(kind), np.array([length - start], np.int64))
            for layer in cache.layers:
                for part, view in zip(PARTS, cache.view(layer, start, stop), strict=True):
                    bound.in_place(contract.past(layer, part), contract.present(layer, part), view)
        logits, hidden = self._outputs.rows(len(needed))
        bound.output(contract.LOGITS, logits)
        bound.output(contract.HIDDEN, hidden)
        bound.run()
        return logits[: len(wanted)], hidden[: len(wanted)]

    def draft_step(self, token: int, hidden: Floats) -> DraftStep:
        self.check_open()
        target = self.engine.target
        if self._draft_steps is None:
            raise UsageError("this bundle has no drafter: use --drafter ngram or none")
        if not self.length:
            raise ValueError("nothing is committed yet: a draft follows committed tokens")
        if not 0 <= token < target.vocab_size:
            raise ValueError(f"token ids must be within 0..{target.vocab_size - 1}")
        if np.size(hidden) != target.hidden_size:
            raise ValueError(f"a hidden state must be {target.hidden_size} numbers, not {np.size(hidden)}")
        with self.engine.computing():
            return self._draft_steps.run(self._caches, self.length, token, hidden)

    def propose(self, kind: str, hidden: Floats) -> Proposals:
        self.check_open()
        if kind not in self._heads:
            raise no_heads(kind)
        if np.size(hidden) != self.engine.target.hidden_size:
            raise ValueError(f"a hidden state must be {self.engine.target.hidden_size} numbers, not {np.size(hidden)}")
        with self.engine.computing():
            return self._heads[kind].run(hidden)

    def close(self) -> None:
        if not self.closed:
            del self._bound, self._draft_steps, self._heads, self._outputs
        super().close()

    def _sibling(self) -> OrtSession:
        return self.engine.open_session()


class _OutputBuffers:
    """Logits and hidden states, allocated once per row count: 8 rows of 262,144 logits are 8 MiB of page faults."""

    def __init__(self, target: Target) -> None:
        self._widths = (target.vocab_size, target.hidden_size)
        self._logits, self._hidden = (np.empty((0, width), np.float32) for width in self._widths)

    def rows(self, count: int) -> tuple[Floats, Floats]:
        if count > len(self._logits):
            self._logits, self._hidden = (np.empty((count, width), np.float32) for width in self._widths)
        return self._logits[:count], self._hidden[:count]


def _caches(target: Target) -> dict[AttentionKind, KVCache]:
    return make_caches(
        target, lambda layer: np.dtype((np.float32, (layer.kv_width,))), PREFILL_ROWS, dict.fromkeys(KINDS, VIEWS)
    )
