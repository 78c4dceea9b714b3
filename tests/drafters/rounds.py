"""Drafters by themselves, without a loop or an engine behind them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ondevice.engines.protocol import Outputs, Session
from ondevice.generate.drafters.protocol import Draft, Drafter, DraftRequest
from tests.fixtures.toy_engine import ToyEngine

NO_OUTPUTS = Outputs(np.zeros((99, 2), np.float32), np.zeros((99, 2), np.float32))
NO_SESSION: Session = ToyEngine().open_session()


def draft(drafter: Drafter, nodes: int, floor: float = 0.0) -> Draft:
    """A draft whose rows must all have a survival of `floor`."""
    return drafter.draft(DraftRequest(nodes, [floor] * nodes))


def observe(drafter: Drafter, emitted: Sequence[int]) -> None:
    """A round in which the target said this."""
    drafter.observe(emitted, NO_OUTPUTS, range(len(emitted)))
