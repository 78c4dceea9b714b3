"""The noise of the draws, token by token; the peaks of a row."""

from __future__ import annotations

import numpy as np

from ondevice.arrays import Float32Array
from ondevice.generate.sampling.gumbel import Key, gumbel, hashed
from ondevice.generate.sampling.peaks import BLOCK, find_peaks
from ondevice.native.functions import kernel


@kernel
def gumbel_at(key: Key, position: int, token: int) -> float:
    """The noise of a token at a position."""
    return gumbel(hashed(hashed(key[0], position), token))


def peaks_of(scores: Float32Array) -> Float32Array:
    """The largest score of each block."""
    peaks = np.empty(-(-len(scores) // BLOCK), np.float32)
    find_peaks(scores, peaks)
    return peaks
