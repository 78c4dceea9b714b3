"""Draws among the k likeliest tokens, in one call each: filters and race.

The filters are those of `Sampler.distribution`, step by step. Called one after the other they took half as long again,
mostly for numpy's overheads, and a drafter that is asked for four tokens pays four times.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from ondevice.decoding import nucleus, top_k
from ondevice.decoding.noise import Floats, Ids, Key, Weights, insert, race
from ondevice.jit import kernel

if TYPE_CHECKING:
    from ondevice.decoding.sampling_options import SamplingOptions


MOST = 2**31
"""A larger k keeps no more: there are not so many tokens."""


class Shortlist:
    """The winners among the tokens that top-k leaves; at temperature 0, the likeliest.

    options : of a `Sampler`, with a top-k where the temperature is not 0; the penalty is its own business
    key : of the noise; not read at temperature 0
    """

    def __init__(self, options: SamplingOptions, key: Key) -> None:
        self._greedy = options.temperature == 0
        self._temperature, self._key = options.temperature, key
        self._filters = (
            min(options.top_k or 1, MOST),
            1.0 if options.top_p is None else options.top_p,
            options.min_p or 0.0,
        )
        self._names, self._kept = np.empty(0, np.intp), np.empty(0, np.intp)
        self._room: dict[int, tuple[Ids, Weights]] = {}
        self.winners(np.zeros(1, np.float32), None, 0, 1)  # so that no kernel is loaded while tokens wait for it

    def winners(self, scores: Floats, names: Ids | None, position: int, most: int) -> tuple[Ids, Weights]:
        """Up to `most` token ids, the best one first, and their log weight + noise; valid until the next call.

        None where a score is NaN or infinity, or all are -inf.

        scores : float32[m]
        names : int64[m], their token ids; None where they are those of the whole vocabulary, in order
        """
        if len(self._kept) < len(scores):
            self._kept = np.empty(len(scores), np.intp)
        if names is None:
            if len(self._names) != len(scores):
                self._names = np.arange(len(scores))
            names = self._names
        if most not in self._room:
            self._room[most] = np.empty(most, np.intp), np.empty(most)
        tokens, values = self._room[most]
        if self._greedy:
            count = likeliest_few(scores, names, tokens, values)
        else:
            count = draw_few(
                scores, names, self._temperature, *self._filters, self._key, position, tokens, values, self._kept
            )
        return tokens[:count], values[:count]


@kernel
def senseless(scores: Floats) -> bool:
    """Whether any is NaN or infinity."""
    wrong = 0
    for at in range(len(scores)):  # to the end: this is vectorised
        wrong += not scores[at] < np.inf
    return wrong > 0


@kernel
def draw_few(  # noqa: PLR0917
    scores: Floats, names: Ids, temperature: float, k: int, top_p: float, min_p: float, key: Key, position: int,
    tokens: Ids, values: Weights, kept: Ids,
) -> int:  # fmt: skip
    """Temperature, top-k, top-p, min-p and the race: fill `tokens` with the winners' names; how many there are.

    Nobody wins where a score is NaN or infinity, or all are -inf.

    scores : float32[m]
    names : intp[m], their token ids
    k, top_p, min_p : 1.0 and 0.0 keep every token
    tokens, values : intp[b] and float64[b], the winners and their log weight + noise, largest first
    kept : intp[m], scratch
    """
    if senseless(scores):
        return 0
    count = top_k.select(scores, np.empty(min(k, len(scores)), np.float32), kept)
    peak = -np.inf
    for at in range(count):
        peak = max(peak, scores[kept[at]])
    weights = np.empty(count)
    for at in range(count):
        weights[at] = math.exp((scores[kept[at]] - peak) / temperature)
    if top_p < 1.0:
        inside = np.empty(count, np.intp)
        mass = np.empty(nucleus.DIGITS if count > nucleus.FEW else 0)
        count = nucleus.select(weights, top_p, mass, inside, np.empty(count, np.intp))
        for at in range(count):  # ascending, so nothing is overwritten that is still to be read
            kept[at] = kept[inside[at]]
            weights[at] = weights[inside[at]]
    left = 0
    for at in range(count):
        if weights[at] >= min_p:
            kept[left] = kept[at]
            weights[left] = weights[at]
            left += 1
    named = np.empty(left, np.intp)
    for at in range(left):
        named[at] = names[kept[at]]
    found = race(scores, kept[:left], weights[:left], named, peak, temperature, key, position, tokens, values)
    for at in range(found):
        tokens[at] = names[tokens[at]]
    return found


@kernel
def likeliest_few(scores: Floats, names: Ids, tokens: Ids, values: Weights) -> int:
    """The same at temperature 0: the largest scores, the first in a tie."""
    if senseless(scores):
        return 0
    count = 0
    for start in range(0, len(scores), top_k.BLOCK):
        block = scores[start : start + top_k.BLOCK]
        if count == len(values):
            least, beyond = np.float32(values[-1]), 0
            for at in range(len(block)):  # vectorised, as nothing else is done
                beyond += block[at] > least
            if not beyond:
                continue
        for at in range(len(block)):
            if block[at] > -np.inf:
                count = insert(float(block[at]), start + at, tokens, values, count)
    for at in range(count):
        tokens[at] = names[tokens[at]]
    return count
