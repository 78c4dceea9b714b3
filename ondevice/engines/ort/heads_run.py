"""One sequence's proposals of heads of one kind."""

from __future__ import annotations

import numpy as np

from ondevice import contract
from ondevice.engines.ort.binding import Binding
from ondevice.engines.protocol import Floats, Proposals
from ondevice.manifest import HeadsEntry


class HeadsRun:
    """Runs their graph, into arrays that hold until the next run."""

    def __init__(self, bound: Binding, entry: HeadsEntry) -> None:
        self._bound = bound
        shape = entry.offsets, entry.candidates
        self._answer = Proposals(np.empty(shape, np.int64), np.empty(shape, np.float32))

    def run(self, hidden: Floats) -> Proposals:
        """Of a hidden state float32[H], which is copied first."""
        bound = self._bound
        bound.array(contract.HIDDEN, np.asarray(hidden, np.float32).reshape(1, -1))
        bound.output(contract.CANDIDATES, self._answer.candidates)
        bound.output(contract.LOGITS, self._answer.logits)
        bound.run()
        return self._answer
