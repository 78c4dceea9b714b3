"""Blockwise parallel decoding (Stern et al., NeurIPS 2018): k proposals from one shared layer, verified as a chain."""

from __future__ import annotations

from ondevice.drafters.heads import HeadsDrafter
from ondevice.manifest import HeadsEntry, Target


class BlockwiseDrafter(HeadsDrafter):
    """Exact acceptance only: the paper's looser rules, among the best few or within a distance, change the text. Its
    first head is the model itself, and the forward that verifies a block brings the state that the next is made of.
    """

    def __init__(self, heads: HeadsEntry, target: Target) -> None:
        super().__init__(heads, target, branches=1)
