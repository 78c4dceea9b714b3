"""Compiled kernels of sampling: weights, Gumbel noise and draws, top-k, top-p, and the masks of constraints.

Gumbel-max: argmax of log p + g, with Gumbel noise g that is independent between tokens, is a draw from p. Here the
noise is a pure function of seed, position in the sequence and token id. As no draw depends on those before it, a text
depends on target, options and seed alone, whatever was drafted. And a drafter that draws with the same noise from a q
near p mostly draws the same token: Daliri, Musco, Suresh, "Coupling without Communication and Drafter-Invariant
Speculative Decoding" (arXiv 2408.07978).

A draw is the same on every CPU and operating system: see `elementary`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ondevice.arrays import Float32Array, Float64Array, IndexArray, Int64Array
from ondevice.generate.elementary import exponential, logarithm
from ondevice.generate.request import Constraint, SamplingOptions, TokenMask
from ondevice.native.functions import entry, kernel

# Noise.

Key = NDArray[np.uint64]
"""uint64[1], the key of a generation's noise."""

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
MIX_2 = np.uint64(0x94D049BB133111EB)
"""Constants of splitmix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014)."""

DROPPED_BITS = np.uint64(12)
UNIT = 2.0**-52
"""A hash h becomes the uniform number ((h >> DROPPED_BITS) + 0.5) * UNIT: with 52 bits it is below 1 even after
rounding."""

MAGNITUDE = np.int32(2**31 - 1)
"""All bits of an int32 except the sign."""
INFINITY = np.int32(0x7F800000)
"""The bits of a float32 infinity; those of NaN, without its sign, are larger."""


def key_of(seed: int | None) -> Key:
    """The key for a seed, an integer from 0 on of any size; for None, from the operating system's random numbers."""
    return np.random.SeedSequence(seed).generate_state(1, np.uint64).astype(np.uint64)


@kernel
def mixed(z: np.uint64) -> np.uint64:
    """The finaliser of splitmix64: a permutation of uint64 in which each bit of the result depends on each bit of z."""
    z = (z ^ (z >> np.uint64(30))) * MIX_1
    z = (z ^ (z >> np.uint64(27))) * MIX_2
    return z ^ (z >> np.uint64(31))


@kernel
def hashed(start: np.uint64, index: int) -> np.uint64:
    """The number at `index` of the splitmix64 sequence from `start` (uint64)."""
    return mixed(start + (np.uint64(index) + np.uint64(1)) * GOLDEN)


@kernel
def gumbel(bits: np.uint64) -> float:
    """A standard Gumbel number, within -3.7 to 36.8, from the 64 bits of a hash."""
    return -logarithm(-logarithm(1.0 - (float(bits >> DROPPED_BITS) + 0.5) * UNIT))


# Weights.


@kernel
def weigh(scores: Float32Array, peak: float, temperature: float, weights: Float64Array) -> None:
    """weights[i] = exp((scores[i] - peak) / temperature); scores are float32[n], weights float64[n], out."""
    for at in range(len(scores)):
        weights[at] = exponential((scores[at] - peak) / temperature)


# Gumbel argmax: the draw.

BLOCK = 256
"""Tokens that share a bound in `gumbel_argmax_all`, from the largest of their logits."""

SLACK = 1.0 + 1e-9
"""Factor on bounds, which are computed less exactly than the values that they bound."""


@kernel
def gumbel_argmax(  # noqa: PLR0917
    scores: Float32Array, indices: IndexArray, weights: Float64Array, token_ids: IndexArray, peak: float,
    temperature: float, key: Key, position: int, best: IndexArray, values: Float64Array,
) -> int:  # fmt: skip
    """Fill `best` with those of `indices` that have the largest log weight + noise, largest first.

    The noise comes from v, uniform in (0, 1): g = -log(-log(1 - v)). As -log(1 - v) > v, an entry of weight w can only
    win where v < w * exp(-value to beat), so few logarithms are taken.

    scores : float32[m]; the log weight of an entry is (score - peak) / temperature
    indices : intp[n], the entries that take part, as indices of `scores`
    weights : float64[n], about exp of their log weights
    token_ids : intp[n], their token ids, which select the noise
    best, values : intp[b] and float64[b], out: the winners and their log weight + noise

    Returns:
        The number of winners.
    """
    row = hashed(key[0], position)
    count = 0
    bound = np.inf
    for index in range(len(indices)):
        bits = hashed(row, token_ids[index])
        if float(bits >> DROPPED_BITS) * UNIT < bound * weights[index]:
            value = (scores[indices[index]] - peak) / temperature + gumbel(bits)
            if value > -np.inf:
                count = insert(value, indices[index], best, values, count)
                bound = win_bound(values, count)
    return count


@kernel
def ordered(score: float) -> Any:
    """An int32 that is ordered as the float32 `score` is. Maxima of floats are not vectorised, because of NaN."""
    bits = np.float32(score).view(np.int32)
    return bits ^ ((bits >> np.int32(31)) & MAGNITUDE)


@kernel
def largest(block: Float32Array) -> float:
    """The largest of some float32, none of which is NaN, as a float64."""
    most = -1 - MAGNITUDE
    for at in range(len(block)):
        most = max(most, ordered(block[at]))
    return np.float64(np.int32(most ^ ((most >> np.int32(31)) & MAGNITUDE)).view(np.float32))


@kernel
def peak_of(scores: Float32Array) -> float:
    """The largest score as a float64, in which differences to it are taken; NaN where a score is NaN."""
    widest = np.int32(0)
    for at in range(len(scores)):
        widest = max(widest, np.float32(scores[at]).view(np.int32) & MAGNITUDE)
    return np.nan if widest > INFINITY else largest(scores)


@kernel
def gumbel_argmax_all(  # noqa: PLR0917
    scores: Float32Array,
    token_ids: IndexArray,
    peak: float,
    temperature: float,
    key: Key,
    position: int,
    best: IndexArray,
    values: Float64Array,
) -> int:
    """`gumbel_argmax` over all scores, without weights: a block of tokens shares one bound. It takes a hash and a
    comparison per token, both vectorised: less time than all exponentials.

    token_ids : intp[m], the tokens of the scores, or IN_ORDER
    """
    row, in_order = hashed(key[0], position), token_ids[0] == EVERY
    count = 0
    bound = np.inf
    for start in range(0, len(scores), BLOCK):
        block = scores[start : start + BLOCK]
        share = bound * exponential((largest(block) - peak) / temperature) / UNIT
        least = np.uint64(share) + np.uint64(1) if share < 2.0**52 else np.uint64(1) << np.uint64(52)
        found = 0
        if in_order:  # loops of their own, so that they are vectorised
            for at in range(len(block)):
                found += int((hashed(row, start + at) >> DROPPED_BITS) < least)
        else:
            for at in range(len(block)):
                found += int((hashed(row, token_ids[start + at]) >> DROPPED_BITS) < least)
        if not found:
            continue
        for at in range(len(block)):
            bits = hashed(row, id_at(token_ids, start + at))
            if (bits >> DROPPED_BITS) < least:
                log_weight = (block[at] - peak) / temperature
                if float(bits >> DROPPED_BITS) * UNIT < bound * exponential(log_weight):
                    value = log_weight + gumbel(bits)
                    if value > -np.inf:
                        count = insert(value, start + at, best, values, count)
                        bound = win_bound(values, count)
    return count


@kernel
def insert(value: float, index: int, best: IndexArray, values: Float64Array, count: int) -> int:
    """Insert an entry into the lists `best` and `values`, which hold `count` entries, largest value first. Full lists
    drop their last entry.

    Returns:
        The number of entries then.
    """
    if count == len(best):
        if value <= values[count - 1]:
            return count
        count -= 1
    at = count
    while at > 0 and values[at - 1] < value:
        best[at], values[at] = best[at - 1], values[at - 1]
        at -= 1
    best[at], values[at] = index, value
    return count + 1


@kernel
def win_bound(values: Float64Array, count: int) -> float:
    """The largest v (see `gumbel_argmax`) with which an entry of weight 1 can still get among the best."""
    return SLACK * exponential(-values[count - 1]) if count == len(values) else np.inf


# Top-k, in one pass over the vocabulary.


LOWEST = np.finfo(np.float32).min
TOP_K_BLOCK = 64
"""Logits compared at a time: few blocks hold one that is among the k largest so far."""


@kernel
def select_top_k(scores: Float32Array, largest: Float32Array, kept: IndexArray) -> int:
    """Fill `kept` with the indices of the k largest scores, and of all that equal the k-th, as transformers'
    `TopKLogitsWarper` does, ascending; return their number. -inf is never selected, because it cannot be drawn.

    `largest`, float32[k], is scratch: a heap of the k largest scores so far, smallest first, whose first entry is the
    score to reach.
    """
    largest[:] = LOWEST
    count = 0
    for start in range(0, len(scores), TOP_K_BLOCK):
        block = scores[start : start + TOP_K_BLOCK]
        below = 0
        for at in range(len(block)):
            below += block[at] < largest[0]
        if below == len(block):
            continue
        for at in range(len(block)):
            score = block[at]
            if not score < largest[0]:
                kept[count] = start + at
                count += 1
                if score > largest[0]:
                    replace_first(largest, score)
    size = 0
    for at in range(count):
        kept[size] = kept[at]
        size += not scores[kept[at]] < largest[0]
    return size


@kernel
def select_reaching(scores: Float32Array, least: float, kept: IndexArray) -> int:
    """Fill `kept` with the indices of the scores of at least `least`, ascending; return their number."""
    reach = np.float32(least if least > LOWEST else LOWEST)
    count = 0
    for start in range(0, len(scores), TOP_K_BLOCK):
        block = scores[start : start + TOP_K_BLOCK]
        found = 0
        for at in range(len(block)):  # a loop of its own, so that it is vectorised
            found += block[at] >= reach
        if not found:
            continue
        for at in range(len(block)):
            kept[count] = start + at
            count += block[at] >= reach
    return count


@kernel
def replace_first(heap: Float32Array, value: float) -> None:
    """Replace the smallest value of a heap by a larger one."""
    at = 0
    while 2 * at + 1 < len(heap):
        child = 2 * at + 1
        if child + 1 < len(heap) and heap[child + 1] < heap[child]:
            child += 1
        if value <= heap[child]:
            break
        heap[at] = heap[child]
        at = child
    heap[at] = value


# Top-p, without sorting the vocabulary.


DIGIT_BITS = 12
DIGITS = 1 << DIGIT_BITS
FEW = 128
"""Number of weights up to which sorting is faster than radix selection; top-k usually leaves no more."""
FIRST_SHIFT: Any = np.int64(4 * DIGIT_BITS)  # not an int, for which `digit` would be compiled a second time
ONE = 0x3FF << 52
"""The bits of 1.0. The bits of positive floats are ordered as their values, so ONE - bits is a sort key."""


@kernel
def bits_of(weight: float) -> int:
    """The bits of a float64 as an int64."""
    return int(np.float64(weight).view(np.int64))


@kernel
def digit(weight: float, shift: int) -> int:
    """One of the five digits of a weight's sort key, 0 for the heaviest. A weight below 2**-256 gets the digit of a
    heavier one, and vanishes in its sum by rounding.
    """
    return ((ONE - bits_of(weight)) >> shift) & (DIGITS - 1)


@kernel
def crossed(mass: Float64Array, before: float, needed: float) -> tuple[int, float]:
    """The digit at which the cumulative mass reaches `needed`, and the mass before that digit."""
    last, start = 0, before
    for index in range(DIGITS):
        if mass[index] > 0.0:
            last, start = index, before
            before += mass[index]
            if before >= needed:
                break
    return last, start


@kernel
def select_few_nucleus(weights: Float64Array, top_p: float, kept: IndexArray, order: IndexArray) -> int:
    """`select_nucleus` by insertion sort. `order` intp[n] is scratch."""
    for index in range(len(weights)):
        at = index
        while at > 0 and weights[order[at - 1]] < weights[index]:
            order[at] = order[at - 1]
            at -= 1
        order[at] = index
    total = 0.0
    for at in range(len(weights)):
        total += weights[order[at]]
    before, size = 0.0, 0
    while size < len(weights) and before < top_p * total:
        index = order[size]
        before += weights[index]
        at = size
        while at > 0 and kept[at - 1] > index:
            kept[at] = kept[at - 1]
            at -= 1
        kept[at] = index
        size += 1
    return size


@kernel
def select_nucleus(weights: Float64Array, top_p: float, mass: Float64Array, kept: IndexArray, edge: IndexArray) -> int:
    """Fill `kept` with the indices of the smallest set of weights that holds `top_p` of the mass, heaviest first,
    lowest index first in a tie; ascending. Return their number. Holtzman et al. (arXiv 1904.09751); except for ties it
    is the set of transformers' `TopPLogitsWarper`.

    weights : float64[n], at most 1 and one of them 1
    top_p : over 0 and under 1
    mass, edge : float64[DIGITS] and intp[n], scratch

    A radix selection. The mass of each leading digit shows at which digit the set ends. The weights with that digit,
    the edge, are separated by the next digit, and so on, until those left are equal.
    """
    if len(weights) <= FEW:
        return select_few_nucleus(weights, top_p, kept, edge)
    mass[:] = 0.0
    for index in range(len(weights)):
        mass[digit(weights[index], FIRST_SHIFT)] += weights[index]
    total = 0.0
    for index in range(DIGITS):
        total += mass[index]
    needed = top_p * total
    last, before = crossed(mass, 0.0, needed)
    beyond = ONE - ((last + 1) << FIRST_SHIFT)
    count = 0
    for index in range(len(weights)):
        kept[count] = index  # without a branch: it would be mispredicted too often
        count += bits_of(weights[index]) > beyond
    edges = 0
    for at in range(count):
        edge[edges] = kept[at]
        edges += digit(weights[kept[at]], FIRST_SHIFT) == last
    for shift in range(FIRST_SHIFT - DIGIT_BITS, -1, -DIGIT_BITS):
        mass[:] = 0.0
        for at in range(edges):
            mass[digit(weights[edge[at]], shift)] += weights[edge[at]]
        last, before = crossed(mass, before, needed)
        inside = 0
        for at in range(edges):
            edge[inside] = edge[at]
            inside += digit(weights[edge[at]], shift) == last
        edges = inside
    if not edges:  # the weights are no numbers
        return 0
    # A token is kept while the mass before it falls short of what is needed.
    lightest = weights[edge[0]]
    ties = 1
    while ties < edges and before + ties * lightest < needed:
        ties += 1
    last_tie = edge[ties - 1]
    size = 0
    for at in range(count):
        index = kept[at]
        kept[size] = index
        size += weights[index] > lightest or (weights[index] == lightest and index <= last_tie)
    return size


# A row: filters and draw in a single call.
#
# One kernel after the other, called from Python, took half as long again, mostly for numpy's overheads, and a drafter
# that is asked for four tokens pays that four times.


MAX_TOP_K = 2**31
"""Larger values of top-k are cut to this: no vocabulary is larger."""

MARGIN = 1e-5
"""Relative margin on logits that is larger than the rounding of float32."""


class RowScratch(NamedTuple):
    """Scratch of `filter_row` and `draw_row` for rows of up to m scores.

    largest : float32[m]
    weights : float64[m]
    mass : float64[DIGITS]
    indices : intp[3, m]
    """

    largest: Float32Array
    weights: Float64Array
    mass: Float64Array
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
            1.0 if options.top_p is None else options.top_p,
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
        biases: tuple[Int64Array, Float32Array] | None = None,
    ) -> NextToken:
        """The arguments of `next_token`, whose position is still to be written.

        Args:
            scores: float32[m], a row; another one's address may be written in its place.
            token_ids, most: as for `best`.
            ends: tokens that end a reply.
            biases: int64[b], each below m, and float32[b], what is added to their scores; None for none.
        """
        ids = IN_ORDER if token_ids is None else token_ids
        last, changed = np.array([*ends] or [-1], np.int64), np.zeros(len(scores) if biases else 1, np.float32)
        biased, added = biases or (np.full(1, -1), np.zeros(1, np.float32))
        tokens, values, scratch = np.zeros(most, np.intp), np.zeros(most), self._scratch(len(scores))
        record = next_token.record(
            scores, 0, ids, last, biased, added, changed, *self._options, self._key, tokens, values, *scratch
        )  # fmt: skip
        return NextToken(record, tokens, (scores, ids, last, biased, added, changed, values, scratch))

    def _scratch(self, m: int) -> RowScratch:
        """Scratch for rows of m scores. The operating system provides only those pages that a draw writes."""
        scratch = self._made_scratch
        if scratch is None or len(scratch.weights) < m:
            scratch = RowScratch(np.empty(m, np.float32), np.empty(m), np.empty(DIGITS), np.empty((3, m), np.intp))
            self._made_scratch = scratch
        return scratch


EVERY: Any = np.int64(-(1 << 63))
IN_ORDER = np.full(1, EVERY)
"""Token ids of a row of the whole vocabulary, in order: kernels take the index for the id. Not empty, because the
address of an empty array takes an exception."""


@kernel
def id_at(token_ids: IndexArray, at: int) -> int:
    """The token id of a score; see IN_ORDER."""
    return at if token_ids[0] == EVERY else token_ids[at]


@kernel
def filtered(  # noqa: PLR0917
    scores: Float32Array, peak: float, temperature: float, k: int, top_p: float, min_p: float, largest_k: Float32Array,
    weights: Float64Array, mass: Float64Array, indices: IndexArray,
) -> int:  # fmt: skip
    """Fill `indices[0]` with the indices that the filters keep, ascending, and `weights` with their weights,
    exp((score - peak) / temperature); return their number.

    scores : float32[m], none of which is NaN or +inf
    peak : the largest of them, not -inf
    k, top_p, min_p : the filters; k = 0, top_p = 1.0 and min_p = 0.0 keep every token
    largest_k, weights, mass, indices : the fields of `RowScratch` for m scores or more
    """
    kept, inside, count = indices[0], indices[1], len(scores)
    few = k > 0 or (top_p == 1.0 and min_p > 0.0)  # exponentials are taken of few scores only
    if k > 0:
        count = select_top_k(scores, largest_k[: min(k, len(scores))], kept)
    elif few:
        below = temperature * -logarithm(min_p)
        count = select_reaching(scores, peak - below - MARGIN * (abs(peak) + below), kept)
    if few:
        for at in range(count):
            weights[at] = exponential((scores[kept[at]] - peak) / temperature)
    else:
        weigh(scores, peak, temperature, weights)
    if top_p < 1.0:
        count = select_nucleus(weights[:count], top_p, mass, inside, indices[2])
        for at in range(count):  # `inside` is ascending, so no entry is overwritten before it is read
            kept[at] = kept[inside[at]] if few else inside[at]
            weights[at] = weights[inside[at]]
    elif not few:
        for at in range(count):
            kept[at] = at
    left = 0
    for at in range(count):
        if weights[at] >= min_p:
            kept[left] = kept[at]
            weights[left] = weights[at]
            left += 1
    return left


@entry("tokens", "f32[] f64 i64 f64 f64 f32[] f64[] f64[] i64[,]")
def filter_row(  # noqa: PLR0917
    scores: Float32Array, temperature: float, k: int, top_p: float, min_p: float, largest_k: Float32Array,
    weights: Float64Array, mass: Float64Array, indices: IndexArray,
) -> int:  # fmt: skip
    """`filtered` for any row; 0 where a score is NaN or +inf, or all are -inf."""
    peak = peak_of(scores)
    if not abs(peak) < np.inf:
        return 0
    return filtered(scores, peak, temperature, k, top_p, min_p, largest_k, weights, mass, indices)


@entry("tokens", "f32[] i64[] f64 i64 f64 f64 u64[] i64 i64[] f64[] f32[] f64[] f64[] i64[,]")
def draw_row(  # noqa: PLR0917
    scores: Float32Array, token_ids: IndexArray, temperature: float, k: int, top_p: float, min_p: float, key: Key,
    position: int, tokens: IndexArray, values: Float64Array, largest_k: Float32Array, weights: Float64Array,
    mass: Float64Array, indices: IndexArray,
) -> int:  # fmt: skip
    """The filters and the Gumbel argmax of what they keep: fill `tokens` and `values`, and return the number of
    winners, 0 where a score is NaN or +inf, or all are -inf.

    scores, k, top_p, min_p and what follows `values` : as for `filtered`
    token_ids : intp[m], the tokens of the scores, or IN_ORDER
    tokens, values : intp[b] and float64[b], out: token ids and their log weight + noise, largest first
    """
    peak = peak_of(scores)
    if not abs(peak) < np.inf:
        return 0
    if k == 0 and top_p == 1.0 and min_p == 0.0:
        found = gumbel_argmax_all(scores, token_ids, peak, temperature, key, position, tokens, values)
    else:
        left = filtered(scores, peak, temperature, k, top_p, min_p, largest_k, weights, mass, indices)
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
    if not abs(peak_of(scores)) < np.inf:
        return 0
    count = 0
    for start in range(0, len(scores), TOP_K_BLOCK):
        block = scores[start : start + TOP_K_BLOCK]
        if count == len(values):
            least, beyond = np.float32(values[-1]), 0
            for at in range(len(block)):  # a loop of its own, so that it is vectorised
                beyond += block[at] > least
            if not beyond:
                continue
        for at in range(len(block)):
            if block[at] > -np.inf:
                count = insert(float(block[at]), start + at, tokens, values, count)
    for at in range(count):
        tokens[at] = id_at(token_ids, tokens[at])
    return count


@entry(
    "tokens",
    "f32[] i64 i64[] i64[] i64[] f32[] f32[] f64 i64 f64 f64 u64[] i64[] f64[] f32[] f64[] f64[] i64[,]",
    by_record=True,
)
def next_token(  # noqa: PLR0917
    scores: Float32Array, position: int, token_ids: IndexArray, ends: Int64Array, biased: Int64Array,
    biases: Float32Array, changed: Float32Array, temperature: float, k: int, top_p: float, min_p: float, key: Key,
    tokens: IndexArray, values: Float64Array, largest_k: Float32Array, weights: Float64Array, mass: Float64Array,
    indices: IndexArray,
) -> int:  # fmt: skip
    """The token that is drawn from a row, the likeliest at temperature 0; -1 where it is one of `ends`, or where none
    can be chosen.

    ends : int64[e], tokens that end a reply; -1 for none, as no array is empty
    biased, biases : int64[b] and float32[b], tokens below m, and what is added to their scores; -1 for none
    changed : float32[m], scratch
    temperature : 0 takes the likeliest token; the key and what follows `values` are not read then
    the others : as for `draw_row`
    """
    row = scores
    if biased[0] >= 0:
        row = changed[: len(scores)]
        for at in range(len(scores)):
            row[at] = scores[at]
        for at in range(len(biased)):
            row[biased[at]] += biases[at]
    if temperature == 0.0:
        found = argmax_row(row, token_ids, tokens, values)
    else:
        found = draw_row(
            row, token_ids, temperature, k, top_p, min_p, key, position, tokens, values, largest_k, weights, mass,
            indices,
        )  # fmt: skip
    if found == 0:
        return -1
    for at in range(len(ends)):
        if tokens[0] == ends[at]:
            return -1
    return int(tokens[0])


# Masks of constraints.


WORD = 32
"""Tokens of a word of a mask."""
FORBIDDEN = np.float32(-np.inf)
"""The score of a token that may not follow."""


class ConstraintMasks:
    """Applies a constraint to the rows of one generation. Positions are given as a context and a path after it."""

    def __init__(self, constraint: Constraint) -> None:
        self._constraint = constraint
        self._kept = np.empty(0, np.float32)

    def forced(self, context: Sequence[int], path: Sequence[int]) -> int | None:
        """The only token that may follow, where the constraint knows it; see `Constraint.forced`."""
        return self._constraint.forced(self._ahead(context, path))

    def row(self, scores: Float32Array, context: Sequence[int], path: Sequence[int]) -> Float32Array:
        """The scores, float32[V], with -inf for tokens that may not follow; valid until the next call."""
        if len(self._kept) != len(scores):
            self._kept = np.empty(len(scores), np.float32)
        keep_allowed(scores, self._constraint.mask(self._ahead(context, path)), self._kept)
        return self._kept

    def some(
        self, scores: Float32Array, ids: Int64Array | None, context: Sequence[int], path: Sequence[int]
    ) -> Float32Array:
        """The same for the scores, float32[C], of some tokens, int64[C]; None for the whole vocabulary, in order."""
        ids = np.arange(len(scores)) if ids is None else ids
        return np.where(self._allowed(ids, context, path), scores, np.float32(-np.inf))

    def share(self, probs: Float64Array, context: Sequence[int], path: Sequence[int]) -> Float64Array:
        """float64[V]: a distribution without the tokens that may not follow, renormalised; zeros where none is left."""
        kept = np.where(self._allowed(np.arange(len(probs)), context, path), probs, 0.0)
        return kept / (kept.sum() or 1.0)

    def _allowed(self, ids: Int64Array, context: Sequence[int], path: Sequence[int]) -> NDArray[np.bool_]:
        mask = self._constraint.mask(self._ahead(context, path))
        words = ids >> 5
        known = np.where(words < len(mask), mask[np.minimum(words, len(mask) - 1)], np.uint32(0))
        return (known >> (ids & 31).astype(np.uint32) & np.uint32(1)).astype(np.bool_)

    def _ahead(self, context: Sequence[int], path: Sequence[int]) -> list[int]:
        return [*context[self._constraint.position :], *path]


@entry("tokens", "f32[] u32[] f32[]")
def keep_allowed(scores: Float32Array, mask: TokenMask, out: Float32Array) -> None:
    """out = scores where the mask's bit is set, -inf elsewhere; scores and out are float32[V]."""
    whole = len(scores) // WORD
    for word in range(whole):
        block, kept = scores[WORD * word : WORD * (word + 1)], out[WORD * word : WORD * (word + 1)]
        bits = word_of(mask, word)
        for at in range(WORD):  # not range(len(block)), so that it is vectorised
            kept[at] = block[at] if (bits >> np.uint32(at)) & np.uint32(1) else FORBIDDEN
    bits = word_of(mask, whole)
    for at in range(WORD * whole, len(scores)):
        out[at] = scores[at] if (bits >> np.uint32(at - WORD * whole)) & np.uint32(1) else FORBIDDEN


@kernel
def word_of(mask: TokenMask, word: int) -> np.uint32:
    """A word of a mask; those beyond its end allow nothing."""
    return mask[word] if word < len(mask) else np.uint32(0)
