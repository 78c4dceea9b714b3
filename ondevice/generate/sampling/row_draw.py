"""From a row of scores to tokens, in a single call: filters, Gumbel noise and draw.

One kernel after the other, called from Python, took half as long again, mostly for numpy's overheads, and a drafter
that is asked for four tokens pays that four times.
"""

from __future__ import annotations

from collections.abc import Iterable
from sys import float_info
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ondevice.arrays import Float32Array, Float64Array, IndexArray, Int64Array
from ondevice.generate.request import SamplingOptions
from ondevice.generate.sampling.filters import DIGITS, filtered
from ondevice.generate.sampling.gumbel import IN_ORDER, Key, gumbel_argmax, gumbel_argmax_all, id_at, insert
from ondevice.generate.sampling.peaks import BLOCK, count_peaks, find_peaks, peak_of
from ondevice.native.functions import entry, kernel

MAX_TOP_K = 2**31
"""Larger values of top-k are cut to this: no vocabulary is larger."""


class RowScratch(NamedTuple):
    """Scratch of `filter_row` and `draw_row` for rows of up to m scores.

    largest : float32[2, m], the largest scores of blocks, and the k largest scores
    weights : float64[m]
    digit_mass : float64[DIGITS]
    indices : intp[3, m]
    """

    largest: Float32Array
    weights: Float64Array
    digit_mass: Float64Array
    indices: IndexArray


class NextToken(NamedTuple):
    """The arguments of `next_token`.

    record : int64[n], the arguments
    tokens : intp[b], where it leaves the best tokens, best first
    held : what the record points to as well
    """

    record: Int64Array
    tokens: IndexArray
    held: object


class Penalties(NamedTuple):
    """Penalties, and the text that they read, for `next_token`.

    seen, generated : int32[V], the number of each token in the whole text, and in what was generated of it
    repetition, presence, frequency : as in `SamplingOptions`
    """

    seen: NDArray[np.int32]
    generated: NDArray[np.int32]
    repetition: float
    presence: float
    frequency: float


_NO_PENALTIES = Penalties(np.zeros(1, np.int32), np.zeros(1, np.int32), 1.0, 0.0, 0.0)


class RowDraw:
    """Temperature, top-k, top-p and min-p, in this order, and a draw with Gumbel noise; at temperature 0, the likeliest
    tokens.

    options : temperature and filters are used. Penalties are not applied
    key : the key of the noise; not used at temperature 0
    """

    def __init__(self, options: SamplingOptions, key: Key) -> None:
        self._greedy, self._key = options.temperature == 0, key
        self._options = (
            options.temperature,
            min(options.top_k or 0, MAX_TOP_K),
            1.0 if options.top_p is None else max(options.top_p, float_info.min),
            options.min_p or 0.0,
        )
        self._made_scratch: RowScratch | None = None
        self._results: dict[int, tuple[IndexArray, Float64Array]] = {}

    def kept(self, scores: Float32Array) -> tuple[IndexArray, Float64Array]:
        """The tokens that the filters keep, ascending, and their weights, exp((score - peak) / temperature); valid
        until the next call. Both are empty where a score is NaN or infinity, or all are -inf.

        scores : float32[V]
        """
        scratch = self._scratch(len(scores))
        count = filter_row(scores, *self._options, *scratch)
        return scratch.indices[0, :count], scratch.weights[:count]

    def best(
        self, scores: Float32Array, token_ids: IndexArray | None, position: int, most: int
    ) -> tuple[IndexArray, Float64Array]:
        """Up to `most` token ids, best first, and their log weight + noise; valid until the next call. Both are empty
        where a score is NaN or infinity, or all are -inf.

        Args:
            scores: float32[m].
            token_ids: int64[m], the token of each score; None for the whole vocabulary, in order.
            position: position in the sequence, which selects the noise.
            most: number of tokens, at least 1.

        Raises:
            ValueError: there is not one token for each score, or `most` is 0.
        """
        if most < 1 or (token_ids is not None and len(token_ids) != len(scores)):
            raise ValueError(f"{most} tokens cannot be chosen from these scores and tokens")
        if most not in self._results:
            self._results[most] = np.empty(most, np.intp), np.empty(most)
        tokens, values = self._results[most]
        ids = IN_ORDER if token_ids is None else token_ids
        if self._greedy:
            count = argmax_row(scores, ids, tokens, values)
        else:
            scratch = self._scratch(len(scores))
            count = draw_row(scores, ids, *self._options, self._key, position, tokens, values, *scratch)
        return tokens[:count], values[:count]

    def record(
        self,
        scores: Float32Array,
        token_ids: IndexArray | None,
        most: int,
        ends: Iterable[int] = (),
        *,
        biases: tuple[Int64Array, Float32Array] | None = None,
        penalties: Penalties | None = None,
    ) -> NextToken:
        """The arguments of `next_token`, whose position is still to be written.

        Args:
            scores: float32[m], a row; another one's address may be written in its place.
            token_ids, most: as for `best`.
            ends: tokens that end a reply.
            biases: int64[b], each below m, and float32[b], what is added to their scores; None for none.
            penalties: None for none. Tokens that are chosen of the whole vocabulary are counted, guesses are not.
        """
        ids = IN_ORDER if token_ids is None else token_ids
        changes, counts = biases or penalties, 0 if penalties is None else 1 if token_ids is not None else 2
        last, changed = np.array([*ends] or [-1], np.int64), np.zeros(len(scores) if changes else 1, np.float32)
        biased, added = biases or (np.full(1, -1), np.zeros(1, np.float32))
        tokens, values, scratch = np.zeros(most, np.intp), np.zeros(most), self._scratch(len(scores))
        record = next_token.record(
            scores, 0, ids, last, biased, added, changed, *(penalties or _NO_PENALTIES), counts, *self._options,
            self._key, tokens, values, *scratch,
        )  # fmt: skip
        return NextToken(record, tokens, (scores, ids, last, biased, added, changed, penalties, values, scratch))

    def _scratch(self, m: int) -> RowScratch:
        """Scratch for rows of m scores. The operating system provides only those pages that a draw writes."""
        scratch = self._made_scratch
        if scratch is None or len(scratch.weights) < m:
            largest = np.empty((2, m), np.float32)
            scratch = RowScratch(largest, np.empty(m), np.empty(DIGITS), np.empty((3, m), np.intp))
            self._made_scratch = scratch
        return scratch


@entry("tokens", "f32[] f64 i64 f64 f64 f32[,] f64[] f64[] i64[,]")
def filter_row(  # noqa: PLR0917
    scores: Float32Array, temperature: float, k: int, top_p: float, min_p: float, largest: Float32Array,
    weights: Float64Array, digit_mass: Float64Array, indices: IndexArray,
) -> int:  # fmt: skip
    """`filtered` for any row; 0 where a score is NaN or +inf, or all are -inf."""
    peaks = largest[0, : count_peaks(len(scores))]
    peak = find_peaks(scores, peaks)
    if not abs(peak) < np.inf:
        return 0
    return filtered(scores, peak, temperature, k, top_p, min_p, peaks, largest[1], weights, digit_mass, indices)


@entry("tokens", "f32[] i64[] f64 i64 f64 f64 u64[] i64 i64[] f64[] f32[,] f64[] f64[] i64[,]")
def draw_row(  # noqa: PLR0917
    scores: Float32Array, token_ids: IndexArray, temperature: float, k: int, top_p: float, min_p: float, key: Key,
    position: int, tokens: IndexArray, values: Float64Array, largest: Float32Array, weights: Float64Array,
    digit_mass: Float64Array, indices: IndexArray,
) -> int:  # fmt: skip
    """The filters and the Gumbel argmax of what they keep: fill `tokens` and `values`, and return the number of
    winners, 0 where a score is NaN or +inf, or all are -inf.

    scores, k, top_p, min_p and what follows `values` : as for `filtered`
    token_ids : intp[m], the tokens of the scores, or IN_ORDER
    tokens, values : intp[b] and float64[b], out: token ids and their log weight + noise, largest first
    """
    peaks = largest[0, : count_peaks(len(scores))]
    peak = find_peaks(scores, peaks)
    if not abs(peak) < np.inf:
        return 0
    if k == 0 and top_p == 1.0 and min_p == 0.0:
        found = gumbel_argmax_all(scores, peaks, token_ids, peak, temperature, key, position, tokens, values)
    else:
        left = filtered(scores, peak, temperature, k, top_p, min_p, peaks, largest[1], weights, digit_mass, indices)
        kept, ids = indices[0], indices[1]
        for at in range(left):
            ids[at] = id_at(token_ids, kept[at])
        found = gumbel_argmax(
            scores, kept[:left], weights[:left], ids[:left], peak, temperature, key, position, tokens, values
        )
    for at in range(found):
        tokens[at] = id_at(token_ids, tokens[at])
    return found


@entry("tokens", "f32[] i64[] i64[] f64[]")
def argmax_row(scores: Float32Array, token_ids: IndexArray, tokens: IndexArray, values: Float64Array) -> int:
    """`draw_row` at temperature 0: the tokens with the largest scores, the first in a tie."""
    count = 0
    for start in range(0, len(scores), BLOCK):
        block = scores[start : start + BLOCK]
        peak = peak_of(block)
        if not peak < np.inf:
            return 0
        if count < len(values) or peak > values[-1]:
            for at in range(len(block)):
                if block[at] > -np.inf:
                    count = insert(float(block[at]), start + at, tokens, values, count)
    for at in range(count):
        tokens[at] = id_at(token_ids, tokens[at])
    return count


@entry(
    "tokens",
    "f32[] i64 i64[] i64[] i64[] f32[] f32[] i32[] i32[] f64 f64 f64 i64 f64 i64 f64 f64 u64[] i64[] f64[] f32[,] "
    "f64[] f64[] i64[,]",
    by_record=True,
)
def next_token(  # noqa: PLR0917
    scores: Float32Array, position: int, token_ids: IndexArray, ends: Int64Array, biased: Int64Array,
    biases: Float32Array, changed: Float32Array, seen: NDArray[np.int32], generated: NDArray[np.int32],
    repetition: float, presence: float, frequency: float, counts: int, temperature: float, k: int, top_p: float,
    min_p: float, key: Key, tokens: IndexArray, values: Float64Array, largest: Float32Array, weights: Float64Array,
    digit_mass: Float64Array, indices: IndexArray,
) -> int:  # fmt: skip
    """The token that is drawn from a row, the likeliest at temperature 0; -1 where it is one of `ends`, or where none
    can be chosen.

    ends : int64[e], tokens that end a reply; -1 for none, as no array is empty
    biased, biases : int64[b] and float32[b], tokens below m, and what is added to their scores; -1 for none
    changed : float32[m], scratch
    seen, generated, repetition, presence, frequency : as in `Penalties`
    counts : 0 without penalties; 2 if the token that is returned is counted, else 1
    temperature : 0 takes the likeliest token; the key and what follows `values` are not read then
    the others : as for `draw_row`
    """
    row = scores
    if biased[0] >= 0 or counts > 0:
        row = changed[: len(scores)]
        for at in range(len(scores)):
            row[at] = scores[at]
        if biased[0] >= 0:
            for at in range(len(biased)):
                row[biased[at]] += biases[at]
        if counts > 0:
            penalise(row, token_ids, seen, generated, np.float32(repetition), presence, frequency)
    if temperature == 0.0:
        found = argmax_row(row, token_ids, tokens, values)
    else:
        found = draw_row(
            row, token_ids, temperature, k, top_p, min_p, key, position, tokens, values, largest, weights,
            digit_mass, indices,
        )  # fmt: skip
    if found == 0:
        return -1
    for at in range(len(ends)):
        if tokens[0] == ends[at]:
            return -1
    if counts == 2:
        seen[tokens[0]] += np.int32(1)
        generated[tokens[0]] += np.int32(1)
    return int(tokens[0])


@kernel
def penalise(  # noqa: PLR0917
    row: Float32Array, token_ids: IndexArray, seen: NDArray[np.int32], generated: NDArray[np.int32],
    repetition: np.float32, presence: float, frequency: float,
) -> None:  # fmt: skip
    """`Adjustments.row` after its biases, and `Adjustments.some`, in place: the same operations, so the same bits."""
    for at in range(len(row)):
        token = id_at(token_ids, at)
        if seen[token] > 0 and repetition != np.float32(1.0):
            row[at] = row[at] * repetition if row[at] < np.float32(0.0) else row[at] / repetition
        if generated[token] > 0:
            row[at] -= np.float32(presence + frequency * float(generated[token]))
