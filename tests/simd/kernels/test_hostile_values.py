"""Kernels whose results are indices, counts or codes: no number makes them write outside their arrays.

Every kernel that turns numbers into an index is run on NaN, infinities, 3e38, denormals, zeros, equal numbers and
mixtures, between guard bytes. Below, whole forwards run on bundles and session files that hold such numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import pytest
from numba import njit

from ondevice.bundle_format.weight_format import BFLOAT16, BY_ROW, IN_GROUPS, WeightFormat
from ondevice.engines.protocol import KVCacheType, TokenTree
from ondevice.engines.simd.kernels.attention import key_codes, lookup
from ondevice.engines.simd.kernels.attention.key_codes import SUMS
from ondevice.engines.simd.kernels.attention.query_key_value import quantize_head
from ondevice.engines.simd.kernels.contract import slots
from ondevice.engines.simd.kernels.contract.attention_memory import SPAN, UNIT
from ondevice.engines.simd.kernels.contract.steps import Choose, ChooseClusters, to_row
from ondevice.engines.simd.kernels.experts import choose
from ondevice.engines.simd.kernels.isa.vector import argmax_lanes, load
from ondevice.engines.simd.kernels.rows import best_of, shortlist
from ondevice.engines.simd.pack_layout import PackLayout
from tests.fixtures.guards import Guards
from tests.fixtures.hostile import KINDS, filled
from tests.fixtures.pairwise import pairwise
from tests.simd.conftest import AFFINE, SHARED, SIGMOIDS, SINKS, STATES, TABLE
from tests.simd.hostile_forwards import NO_NUMBERS, each_once, run
from tests.simd.kernels import test_attention, test_projection
from tests.simd.kernels.memory import cache_of
from tests.simd.kernels.test_attention import HEAD_DIM
from tests.simd.kernels.test_projection import NONE, Steps, pack_of, random_matrix

every_kind = pytest.mark.parametrize("kind", KINDS)


# Lanes.


@njit
def argmax_at(address: int) -> Any:
    return argmax_lanes(load(address))


@every_kind
def test_the_largest_lane_is_one_of_the_sixteen(kind: str) -> None:
    find: Any = argmax_at
    for seed in range(50):
        lanes = filled(kind, 16, seed)
        found = find(lanes.ctypes.data)
        assert 0 <= found < 16
        if not np.isnan(lanes).any():
            assert found == lanes.argmax()


def test_a_nan_in_any_lane_leaves_the_index_among_the_lanes() -> None:
    find: Any = argmax_at
    for lane in range(16):
        for rest in (-1.0, 0.0, 3e38, -np.inf):
            lanes = np.full(16, rest, np.float32)
            lanes[lane] = np.nan
            assert 0 <= find(lanes.ctypes.data) < 16


# Codes of keys, and the choice of units.


@every_kind
@pytest.mark.parametrize("width", [1, 4])
def test_codebooks_and_codes_stay_in_their_arrays(guards: Guards, kind: str, width: int) -> None:
    """Codebooks that are learnt from hostile keys; and codes by ordinary codebooks and by these."""
    count, size = SPAN + 40, 32
    keys = guards.copy(filled(kind, (count, size)))
    book = guards.zeros((size // width, width + 1, 16), np.float32)
    sums, members = guards.zeros((16, width)), guards.zeros(16, np.int64)
    key_codes.learn(keys, book, 3, sums, members)
    assert members.sum() == count
    codes = guards.zeros((2, 1, SPAN, size // width // 2), np.uint8)
    for books in (book[None], filled(kind, book[None].shape, 1), np.ones_like(book[None])):
        key_codes.encode(keys[:, None].copy(), books.copy(), 0, codes.ctypes.data, codes.strides[0])
        guards.check()


@every_kind
@pytest.mark.parametrize("heads", [1, 3, 8])
def test_units_are_chosen_within_the_budget(guards: Guards, kind: str, heads: int) -> None:
    """By hostile queries and codebooks: tables, scores, shares, and the units that are chosen."""
    width, size, spans, most = 4, 64, 3, 4
    codes = size // width
    query, book = guards.copy(filled(kind, (heads, size))), guards.copy(filled(kind, (codes, width + 1, 16), 1))
    encoded = guards.zeros((spans, 1, SPAN, codes // 2), np.uint8)
    encoded[...] = np.random.default_rng(2).integers(0, 256, encoded.shape)
    entries, scales = guards.zeros((heads, codes, 16), np.uint8), guards.zeros((2, heads), np.float32)
    tables = lookup.Tables(entries.ctypes.data, scales.ctypes.data, heads, codes)
    products = guards.zeros((codes, 16), np.float32)
    head_book = key_codes.Codebook(book.ctypes.data, codes, width)
    lookup.make_tables(query.ctypes.data, head_book, products.ctypes.data, tables)
    found = guards.zeros((heads, spans, 2, 16), np.float32)
    scores, sums = lookup.Scores(found.ctypes.data, found.strides[0]), guards.zeros((UNIT, SUMS, 16), np.float32)
    lookup.scan(
        tables, lookup.Codes(encoded.ctypes.data, encoded.strides[0]), 0, spans, sums.ctypes.data, scores
    )  # fmt: skip
    first, stop = 1, 16 * spans - 3
    lookup.leave_out(scores, heads, 0, first)
    lookup.leave_out(scores, heads, stop, 16 * spans)
    shares = guards.zeros(16 * spans, np.float32)
    lookup.weigh(scores, heads, spans, shares.ctypes.data)
    chosen = guards.zeros(most, np.int64)
    budget = lookup.Budget(2, most, 0.98)
    count = lookup.choose(shares.ctypes.data, heads, first, stop, budget, chosen.ctypes.data)
    assert_units(chosen[:count], most, first, stop)


@every_kind
@pytest.mark.parametrize(("least", "most"), [(4, 4), (1, 4), (60, 60), (100, 200)])
def test_hostile_shares_choose_no_more_units_than_fit(guards: Guards, kind: str, least: int, most: int) -> None:
    first, stop = 1, 60
    shares, chosen = guards.copy(filled(kind, 64)), guards.zeros(min(most, stop - first), np.int64)
    count = lookup.choose(
        shares.ctypes.data, 4, first, stop, lookup.Budget(least, most, 0.98), chosen.ctypes.data
    )  # fmt: skip
    assert_units(chosen[:count], most, first, stop)


def test_of_too_many_infinite_shares_the_first_are_chosen(guards: Guards) -> None:
    shares, chosen = guards.full(64, np.inf), guards.zeros(4, np.int64)
    assert lookup.choose(shares.ctypes.data, 4, 1, 60, lookup.Budget(4, 4, 0.98), chosen.ctypes.data) == 4
    assert chosen.tolist() == [1, 2, 3, 4]


def assert_units(chosen: npt.NDArray[np.int64], most: int, first: int, stop: int) -> None:
    units = chosen.tolist()
    assert len(units) <= most
    assert units == sorted(set(units))
    assert all(first <= unit < stop for unit in units)


# The largest scores: clusters of a shortlist, and experts.


@every_kind
@pytest.mark.parametrize(("count", "top"), [(12, 1), (12, 5), (12, 12), (300, 8)])
def test_the_best_are_different_and_among_those_that_there_are(guards: Guards, kind: str, count: int, top: int) -> None:
    for seed in range(10):
        scores, chosen = guards.copy(filled(kind, count, seed)), guards.full(top, -1, np.int64)
        best_of(scores.ctypes.data, count, chosen.ctypes.data, top)
        assert len(set(chosen.tolist())) == top
        assert ((chosen >= 0) & (chosen < count)).all()
        if not np.isnan(scores).any():
            assert chosen.tolist() == np.argsort(-scores, kind="stable")[:top].tolist()


@every_kind
def test_every_row_of_a_shortlist_names_existing_clusters(guards: Guards, kind: str) -> None:
    rows, clusters, top, stride = 3, 20, 4, 32
    scores, chosen = guards.copy(filled(kind, (rows, stride))), guards.full((rows, top), -1, np.int64)
    step = ChooseClusters(scores.ctypes.data, clusters, chosen.ctypes.data, top, rows, stride)
    shortlist(np.array(to_row(step)), 0, 1)
    assert ((chosen >= 0) & (chosen < clusters)).all()


@every_kind
@pytest.mark.parametrize("way", ["softmax", "of_all", "sigmoid", "biased softmax", "biased sigmoid"])
@pytest.mark.parametrize("top", [1, 3, 11])
def test_rows_are_grouped_by_existing_experts(guards: Guards, kind: str, top: int, way: str) -> None:
    rows, experts = 9, 11
    scores, scale = guards.copy(filled(kind, (rows, experts))), guards.copy(filled(kind, experts, 1))
    weights = guards.zeros(rows * top + 16, np.float32)
    chosen, pairs = guards.full(rows * top, -1, np.int64), guards.full(rows * top, -1, np.int64)
    groups, counts = guards.zeros(3 + 2 * experts, np.int64), guards.zeros(experts, np.int64)
    step = Choose(
        slots.ALL, scores.ctypes.data, experts, top, scale.ctypes.data, weights.ctypes.data,
        chosen.ctypes.data, groups.ctypes.data, pairs.ctypes.data, counts.ctypes.data,
        sigmoid=int("sigmoid" in way), of_all=int(way == "of_all"),
    )  # fmt: skip
    selection, bias = guards.zeros(experts, np.float32), guards.copy(filled(kind, experts, 2))
    if "biased" in way:
        step = step._replace(selection=selection.ctypes.data, selection_bias=bias.ctypes.data)
    state = guards.zeros(slots.SLOTS, np.int64)
    state[slots.ALL] = rows
    choose(np.array(to_row(step)), state)
    assert sorted(chosen.tolist()) == list(range(rows * top))
    assert np.bincount(pairs, minlength=rows).tolist() == [top] * rows
    number = groups[0]
    assert 0 < number <= experts
    assert ((groups[1 : 1 + 2 * number : 2] >= 0) & (groups[1 : 1 + 2 * number : 2] < experts)).all()
    assert groups[2 + 2 * number] == rows * top


# Codes of activations, of keys and of values.

MATRICES = [
    *((form, NONE) for form in IN_GROUPS),
    *((BY_ROW[bits], Steps(step, step)) for bits in BY_ROW for step in (0.02, 1e-45, 3e38)),
    (BY_ROW[4], NONE),
    (BFLOAT16, NONE),
]


@pairwise(kind=KINDS, matrix=MATRICES, rows=[1, 5, 11])
def test_activations_and_products_stay_in_their_arrays(
    guards: Guards, kind: str, matrix: tuple[WeightFormat, Steps], rows: int
) -> None:
    """Hostile activations times an ordinary matrix, and the other way round."""
    ordinary = random_matrix(np.random.default_rng(rows), 32, 96, *matrix)
    minimums = None if ordinary.minimums is None else filled(kind, ordinary.minimums.shape)
    hostile = replace(ordinary, scales=filled(kind, ordinary.scales.shape), minimums=minimums)
    for each, x in ((ordinary, filled(kind, (rows, 96))), (hostile, filled("equal", (rows, 96)))):
        layout = PackLayout()
        with guards.around_all(), np.errstate(over="ignore"):
            packed = layout.add(each)
            test_projection.run(pack_of(layout), packed, x)


@pairwise(form=IN_GROUPS, number=[np.nan, np.inf, -np.inf, 3e38, -2.6e33], rows=[1, 2, 4, 8, 11])
def test_a_row_with_a_number_that_has_no_code_becomes_nan(form: WeightFormat, number: float, rows: int) -> None:
    """Wherever in the row it stands; the other rows keep their bits."""
    rng = np.random.default_rng(rows)
    matrix = random_matrix(rng, 32, 96, form)
    layout = PackLayout()
    packed = layout.add(matrix)
    pack = pack_of(layout)
    x = rng.standard_normal((rows, 96)).astype(np.float32)
    plain = test_projection.run(pack, packed, x)
    for place in (0, 15, 16, 31, 32, 63, 80, 95):
        row = place % rows
        bad = x.copy()
        bad[row, place] = number
        found = test_projection.run(pack, packed, bad)
        assert np.isnan(found[row]).all()
        np.testing.assert_array_equal(np.delete(found, row, axis=0), np.delete(plain, row, axis=0))


@every_kind
@pytest.mark.parametrize("cache", get_args(KVCacheType))
def test_keys_and_values_stay_in_the_cache(guards: Guards, kind: str, cache: KVCacheType) -> None:
    with guards.around_all():
        cache_of(filled(kind, (2, 70, 64)), cache)


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_a_scale_of_the_int8_cache_is_nan_where_a_number_is_none(number: float) -> None:
    for place in (0, 15, 16, 40, 63):
        x, codes = np.linspace(-1, 1, 64, dtype=np.float32), np.zeros(64, np.int8)
        x[place] = number
        assert np.isnan(quantize_head(x.ctypes.data, codes.ctypes.data, 64))


@pairwise(kind=KINDS, cache=get_args(KVCacheType), length=[40, 2500])
def test_attention_to_what_is_no_number_is_nan(guards: Guards, kind: str, cache: KVCacheType, length: int) -> None:
    """It is not left out: exact attention of a tree's rows over several parts of a cache that holds `kind` at the end
    of the first part, in keys or in values.
    """
    rng = np.random.default_rng(0)
    tree = TokenTree(np.zeros(5, np.int64), np.array([-1, 0, 1, 0, 3]))
    for part in range(2):
        x = rng.standard_normal((2, length + 5, HEAD_DIM)).astype(np.float32)
        x[part, 30] = filled(kind, HEAD_DIM)
        query = rng.standard_normal((5, 3, HEAD_DIM)).astype(np.float32)
        with guards.around_all(), np.errstate(over="ignore", invalid="ignore"):
            found = test_attention.run(query, cache_of(x, cache), tree, list(range(5)), length, window=5000)
        if np.isnan(x).any():
            assert np.isnan(found.values()).all()


# Whole forwards.

FAMILIES = ("e2b", "26b", "half", AFFINE, TABLE, SINKS, SIGMOIDS, STATES, SHARED)
"""With a shortlist and per-layer embeddings, with experts, trained quantised, affine, looked up, with sinks and biases,
with convolutions, with states, and with an expert that is shared: every kind of step and of product.
"""

UNCHANGED = {
    SINKS: ("k_norm of 3e38", "layer scalars of 3e38"),
    SIGMOIDS: ("layer scalars of 3e38",),
    STATES: ("layer scalars of 3e38",),
    SHARED: ("layer scalars of 3e38",),
}
"""Family -> names of NO_NUMBERS whose tensors it does not have."""

RUNS = [(family, *run) for number, family in enumerate(FAMILIES) for run in each_once(number)]
"""`test_instruction_sets.py` runs all caches and kinds of attention, on every instruction set."""


@pytest.mark.parametrize(("family", "cache", "attention", "name"), RUNS)
def test_a_forward_stays_in_its_memory(
    hostile: Callable[[str], Path], family: str, cache: KVCacheType, attention: str, name: str
) -> None:
    found = run(hostile(family), cache, attention, name)
    if name in UNCHANGED.get(family, ()):
        assert found == "100 %"
    elif name in NO_NUMBERS:
        assert found == "0 %", "tokens without meaning in place of an error"
