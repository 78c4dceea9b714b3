"""The plans that forwards of the target have needed so far: each is made once and kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ondevice.engines.layer_path import WHOLE, LayerPath
from ondevice.engines.simd.plan.exact import exact_plan
from ondevice.engines.simd.plan.target import TargetPlanner

MOST_PLANS = 64
"""Kept at the same time, some 40 kB each: a search for sub-layers to skip runs hundreds of paths, a few times each."""


@dataclass(frozen=True)
class Piece:
    """A part of a forward: of a path, the layers before or from `cut` on; None for all of it."""

    path: LayerPath = WHOLE
    side: Literal["lower", "upper"] | None = None
    cut: int = 0


@dataclass(frozen=True, eq=False)
class Steps:
    """int64[steps, WIDTH], as planned, and where no row looks keys up."""

    planned: NDArray[np.int64]
    exact: NDArray[np.int64]


class TargetPlans:
    """
    Attributes:
        planner: that makes them, with the buffers that all of them work in.
        whole: the plan of a forward in one piece, with nothing left out.
    """

    def __init__(self, planner: TargetPlanner) -> None:
        self.planner = planner
        self.whole = self._made(Piece())
        self._kept: dict[Piece, Steps] = {}

    def steps(self, piece: Piece, *, looks_up: bool) -> NDArray[np.int64]:
        """Those of a piece."""
        steps = self.whole if piece.side is None and piece.path.is_whole else self._other(piece)
        return steps.planned if looks_up else steps.exact

    def _other(self, piece: Piece) -> Steps:
        steps = self._kept.pop(piece, None) or self._made(piece)
        while len(self._kept) >= MOST_PLANS:
            self._kept.pop(next(iter(self._kept)))  # the one that was not run for longest
        self._kept[piece] = steps
        return steps

    def _made(self, piece: Piece) -> Steps:
        planner = self.planner
        if piece.side is None:
            planned = planner.whole(piece.path)
        elif piece.side == "lower":
            planned = planner.lower(piece.path, piece.cut)
        else:
            planned = planner.upper(piece.path, piece.cut)
        return Steps(planned, exact_plan(planned))
