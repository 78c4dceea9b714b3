"""One sequence's steps of the drafter model."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from ondevice import contract
from ondevice.contract import AttentionKind
from ondevice.engines.kv_cache import KVCache, first_drafted
from ondevice.engines.ort.binding import PARTS, Binding
from ondevice.engines.protocol import DraftStep, Floats
from ondevice.manifest import DrafterEntry, Target


class DraftSteps:
    """Runs the drafter's graph over a session's caches, into arrays that hold until the session's next step."""

    def __init__(self, bound: Binding, model: DrafterEntry, target: Target) -> None:
        self._bound = bound
        self._layers: dict[AttentionKind, int] = {"full": model.full_layer, "sliding": model.sliding_layer}
        self._window = target.sliding_window
        self._candidates = np.empty(model.candidates, np.int64)
        self._logits = np.empty(model.candidates, np.float32)
        self._following = np.empty((1, target.hidden_size), np.float32)

    def run(self, caches: Mapping[AttentionKind, KVCache], length: int, token: int, hidden: Floats) -> DraftStep:
        """One step behind `length` committed tokens. `hidden` is copied first: it may be the previous step's."""
        bound = self._bound
        bound.array(contract.TOKEN_ID, np.array([token], np.int64))
        bound.array(contract.POSITION, np.array([length], np.int64))
        bound.array(contract.HIDDEN, np.asarray(hidden, np.float32).reshape(1, -1))
        for kind, layer in self._layers.items():
            start, stop = caches[kind].reserve(length, 0)
            bound.array(contract.mask(kind), self._mask(kind, length, start, stop))
            for part, view in zip(PARTS, caches[kind].view(layer, start, stop), strict=True):
                bound.view(contract.shared(kind, part), view)
        bound.output(contract.CANDIDATES, self._candidates)
        bound.output(contract.LOGITS, self._logits)
        bound.output(contract.NEXT_HIDDEN, self._following)
        bound.run()
        return DraftStep(self._candidates, self._logits, self._following[0])

    def _mask(self, kind: AttentionKind, length: int, start: int, stop: int) -> NDArray[np.bool_]:
        """bool[1, stop - start]: committed rows only, and those that the drafter's window holds."""
        positions = np.arange(start, stop)
        return ((first_drafted(kind, length, self._window) <= positions) & (positions < length))[None, :]
