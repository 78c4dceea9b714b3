"""Attention against its numpy twin; its bits do not depend on the layout of the cache or on other rows."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import pytest

from ondevice.engines.protocol import ROOT, KVCacheType, TokenTree
from ondevice.engines.simd.buffers import AttentionScratch, float_bits
from ondevice.engines.simd.forward_state import ForwardState, SequenceRecord
from ondevice.engines.simd.kernels.activations import ROW_BYTES
from ondevice.engines.simd.kernels.attention.exact import attend_share
from ondevice.engines.simd.kernels.attention.float_cache import mix, score, weigh
from ondevice.engines.simd.kernels.attention.float_tile import TILE_PAIRS
from ondevice.engines.simd.kernels.attention.integer_cache import mix_values, score_keys
from ondevice.engines.simd.kernels.attention.scratch import KVHead, States
from ondevice.engines.simd.kernels.contract import attention_memory, slots
from ondevice.engines.simd.kernels.contract.attention_memory import PART, SCORE_BYTES, SPLIT_ROWS, UNIT
from ondevice.engines.simd.kernels.contract.instruction_sets import instruction_set
from ondevice.engines.simd.kernels.contract.steps import Attend, to_row
from tests.fixtures.pairwise import pairwise
from tests.simd.kernels import twins
from tests.simd.kernels.memory import cache_of, codes_of, numbers_of, read_records

HEAD_DIM = 64
SLIDING = 1


def run(
    query: twins.Floats,
    cache: npt.NDArray[Any],
    tree: TokenTree,
    wanted: list[int],
    length: int,
    window: int,
    block_stop: npt.NDArray[np.int64] | None = None,
    threads: int = 1,
    sinks: twins.Floats | None = None,
    softcap: float = 0.0,
) -> twins.Quantized:
    """Run attention for the wanted rows of a tree.

    Args:
        query: [wanted rows, heads, head_dim]
        cache: keys and values of one head, [2, units]
        window: number of positions that a row attends to, of those up to its own.
        block_stop: as in `ForwardState.set_rows`.
        threads: how many the work is divided for; one does all of it.
        sinks: [heads]
        softcap: of scores; 0 for none.
    """
    count, heads, head_dim = query.shape
    bits = 16 if cache.dtype == np.float16 else 8
    state, record = ForwardState(len(tree), [], bits), SequenceRecord({0: 0})
    scratch = AttentionScratch(head_dim, heads, 1)
    record.set_rows(tree, length)
    record.set_place(slots.ALL, 0, len(tree))
    record.set_place(slots.WANTED, 0, count)
    record.most_keys = length + len(tree)
    for offset in range(2):
        record.point(slots.CACHES + offset, cache[offset])
    positions = length + tree.depths()
    state.set_rows(tree.tokens, positions, positions + 1, np.array(wanted), block_stop)
    state.set_window(window)
    state.set_sequences([record], scratch)
    records = np.zeros(count * heads * head_dim // 32 * ROW_BYTES, np.uint8)
    step = Attend(
        slots.WANTED, query.ctypes.data, query.strides[0], heads, 1, head_dim, SLIDING, 0, records.ctypes.data, 8
    )
    step = step._replace(sinks=0 if sinks is None else sinks.ctypes.data, softcap=float_bits(softcap))
    row = to_row(step)
    claims = np.zeros(1, np.int64)
    attend_share(np.array(row), state.slots, 0, threads, claims.ctypes.data)
    assert not scratch._counters.any()
    return read_records(records, count)


def assert_same(found: twins.Quantized, row: int, expected: twins.Quantized, other: int) -> None:
    """Assert that two rows have the same bits."""
    np.testing.assert_array_equal(found.codes[row], expected.codes[other])
    np.testing.assert_array_equal(found.scales[row], expected.scales[other])


@pairwise(kind=get_args(KVCacheType), heads=[1, 2, 3, 4, 6, 8, 11], length=[0, 1, 15, 16, 200, 2500])
def test_attention_equals_its_twin(kind: KVCacheType, heads: int, length: int) -> None:
    rng = np.random.default_rng(heads * 1000 + length)
    query = rng.standard_normal((1, heads, HEAD_DIM)).astype(np.float32) * np.float32(0.3)
    cache = cache_of(rng.standard_normal((2, length + 1, HEAD_DIM)).astype(np.float32), kind)
    window = length - length // 3 + 1
    found = run(query, cache, TokenTree.chain([1]), [0], length, window)
    keys, values = numbers_of(cache, length + 1)[:, -window:]
    if kind == "int8":
        codes, scales = twins.to_int8(query[0])
        query = (codes * scales[:, None])[None]
    expected = twins.attend(query[0], keys, values).reshape(1, -1)
    step = found.scales.repeat(32, axis=1)
    # weights are rounded to 1/127 of the largest of 32, so larger errors do not come from rounding
    rounding = 1e-5 if kind == "fp16" else 2 / 127 * np.abs(values).max()
    assert (np.abs(found.values() - expected) <= 0.5001 * step + rounding).all()


@pairwise(kind=get_args(KVCacheType), heads=[1, 3, 8, 11], length=[0, 200, 2500], size=[0.0, 3.0, 200.0])
def test_sinks_take_their_share(kind: KVCacheType, heads: int, length: int, size: float) -> None:
    """Sinks far above all scores, far below them, and between; `size` is how far they spread."""
    rng = np.random.default_rng(heads * 1000 + length)
    query = rng.standard_normal((3, heads, HEAD_DIM)).astype(np.float32) * np.float32(0.3)
    sinks = (size * rng.standard_normal(heads)).astype(np.float32)
    cache = cache_of(rng.standard_normal((2, length + 3, HEAD_DIM)).astype(np.float32), kind)
    found = run(query, cache, TokenTree.chain(range(3)), [0, 1, 2], length, 5000, sinks=sinks)
    keys, values = numbers_of(cache, length + 3)
    if kind == "int8":
        codes, scales = twins.to_int8(query.reshape(-1, HEAD_DIM))
        query = (codes * scales[:, None]).reshape(query.shape)
    rounding = 1e-5 if kind == "fp16" else 2 / 127 * np.abs(values).max()
    for row in range(3):
        seen = slice(length + row + 1)
        expected = twins.attend(query[row], keys[seen], values[seen], sinks).reshape(-1)
        error = np.abs(found.values()[row] - expected)
        assert (error <= 0.5001 * found.scales[row].repeat(32) + rounding).all()
    alone = run(query[1:2], cache, TokenTree.chain(range(3)), [1], length, 5000, threads=3, sinks=sinks)
    if kind == "fp16":
        assert_same(found, 1, alone, 0)


@pairwise(kind=get_args(KVCacheType), heads=[1, 3, 8, 11], length=[0, 31, 200, 1100], softcap=[0.4, 3.0, 50.0])
def test_scores_are_capped(kind: KVCacheType, heads: int, length: int, softcap: float) -> None:
    """Caps below most scores and far above them all, for rows of a chain and of a branch."""
    rng = np.random.default_rng(heads * 1000 + length)
    query = rng.standard_normal((3, heads, HEAD_DIM)).astype(np.float32) * np.float32(0.3)
    cache = cache_of(rng.standard_normal((2, length + 3, HEAD_DIM)).astype(np.float32), kind)
    chain, tree = TokenTree.chain(range(3)), TokenTree(np.arange(3), np.array([ROOT, 0, 0]))
    keys, values = numbers_of(cache, length + 3)
    if kind == "int8":
        codes, scales = twins.to_int8(query.reshape(-1, HEAD_DIM))
        query = (codes * scales[:, None]).reshape(query.shape)
    rounding = 2e-5 if kind == "fp16" else 2 / 127 * np.abs(values).max()
    branch = [*range(length + 1), length + 2]
    for rows, seen in ((chain, list(range(length + 3))), (tree, branch)):
        found = run(query, cache, rows, [0, 1, 2], length, 5000, softcap=softcap)
        expected = twins.attend(query[2], keys[seen], values[seen], softcap=softcap).reshape(-1)
        error = np.abs(found.values()[2] - expected)
        assert (error <= 0.5001 * found.scales[2].repeat(32) + rounding).all()


@pairwise(kind=get_args(KVCacheType), length=[37, 250, 1020], window=[21, 5000])
def test_a_row_of_a_tree_sums_what_it_would_after_its_ancestors(kind: KVCacheType, length: int, window: int) -> None:
    rng = np.random.default_rng(length)
    parents = np.array([-1, 0, 0, 2, 1, 3, 5, 4, *range(7, 40)])
    tree = TokenTree(np.arange(len(parents)), parents)
    x = rng.standard_normal((2, length + len(parents), HEAD_DIM)).astype(np.float32)
    query = rng.standard_normal((1, 4, HEAD_DIM)).astype(np.float32)
    for row in (5, 6, 7, 39, 40):
        path, node = list[int](), row
        while node != ROOT:
            path.insert(0, node)
            node = int(parents[node])
        in_tree = run(query, cache_of(x, kind), tree, [row], length, window)
        after = cache_of(np.concatenate([x[:, :length], x[:, [length + i for i in path]]], axis=1), kind)
        alone = run(query, after, TokenTree.chain([5]), [0], length + len(path) - 1, window)
        assert_same(in_tree, 0, alone, 0)


@pairwise(
    kind=get_args(KVCacheType),
    head_dim=[32, 96],
    window=[3, 20, 5000],
    branches=[0.0, 0.4],
    length=[0, 5, 90, 2 * PART - 7],
    count=[SPLIT_ROWS, 30],
)
def test_rows_together_are_rows_alone(
    kind: KVCacheType, head_dim: int, window: int, branches: float, length: int, count: int
) -> None:
    """The cases cover both few rows, whose parts are shared by threads, and too many rows for that."""
    rng = np.random.default_rng(length)
    parents = [int(rng.integers(ROOT, row)) if rng.random() < branches else row - 1 for row in range(count)]
    tree = TokenTree(np.arange(count), np.array(parents))
    assert tree.is_chain == (branches == 0.0)
    cache = cache_of(rng.standard_normal((2, length + count, head_dim)).astype(np.float32), kind)
    query = rng.standard_normal((count, 3, head_dim)).astype(np.float32)
    together = run(query, cache, tree, list(range(count)), length, window)
    for row in range(0, count, 7):
        assert_same(together, row, run(query[row : row + 1], cache, tree, [row], length, window), 0)


@pairwise(kind=get_args(KVCacheType), count=[1, 5, 9, SPLIT_ROWS + 9], length=[40, PART - 4], threads=[2, 3, 8, 64])
def test_any_number_of_threads_gets_the_same_bits(kind: KVCacheType, count: int, length: int, threads: int) -> None:
    """It decides how many pairs a unit of work has: whole tiles, or a part of one."""
    rng = np.random.default_rng(count)
    tree, rows = TokenTree.chain(range(count)), list(range(count))
    cache = cache_of(rng.standard_normal((2, length + count, HEAD_DIM)).astype(np.float32), kind)
    query = rng.standard_normal((count, 3, HEAD_DIM)).astype(np.float32)
    alone = run(query, cache, tree, rows, length, 5000)
    shared = run(query, cache, tree, rows, length, 5000, threads=threads)
    for row in rows:
        assert_same(shared, row, alone, row)


@pairwise(kind=get_args(KVCacheType), length=[0, 37, PART - 20], window=[3, 21, 5000], size=[2, SPLIT_ROWS - 4, 40])
def test_rows_of_a_block_see_all_of_it(kind: KVCacheType, length: int, window: int, size: int) -> None:
    """Each row against its twin over exactly the positions of the rule: those of its window, and its whole block."""
    rng = np.random.default_rng(size)
    first, count = 2, size + 4  # two rows of text before the block, two after it
    tree, positions = TokenTree.chain(range(count)), length + np.arange(count)
    stop = positions + 1
    stop[first : first + size] = length + first + size
    cache = cache_of(rng.standard_normal((2, length + count, HEAD_DIM)).astype(np.float32), kind)
    query = rng.standard_normal((count, 3, HEAD_DIM)).astype(np.float32) * np.float32(0.3)
    found = run(query, cache, tree, list(range(count)), length, window, stop)
    keys, values = numbers_of(cache, length + count)
    if kind == "int8":
        codes, scales = twins.to_int8(query.reshape(-1, HEAD_DIM))
        query = (codes * scales[:, None]).reshape(query.shape)
    causal = run(query, cache, tree, list(range(count)), length, window)
    rounding = 1e-5 if kind == "fp16" else 2 / 127 * np.abs(values).max()
    for row in range(count):
        seen = slice(max(0, length + row + 1 - window), stop[row])
        expected = twins.attend(query[row], keys[seen], values[seen]).reshape(-1)
        step = found.scales[row].repeat(32)
        assert (np.abs(found.values()[row] - expected) <= 0.5001 * step + rounding).all(), row
        if kind == "fp16" and not first <= row < first + size - 1:
            assert_same(found, row, causal, row)


def test_parts_that_threads_share_are_those_of_a_unit() -> None:
    rng = np.random.default_rng(0)
    length, row = 5 * PART + 100, TokenTree.chain([1])
    many = TokenTree.chain(range(SPLIT_ROWS + 1))
    for kind in get_args(KVCacheType):
        cache = cache_of(rng.standard_normal((2, length + len(many), HEAD_DIM)).astype(np.float32), kind)
        query = rng.standard_normal((len(many), 8, HEAD_DIM)).astype(np.float32)
        shared = run(query[:1], cache, row, [0], length, 10 * PART)
        assert_same(run(query, cache, many, list(range(len(many))), length, 10 * PART), 0, shared, 0)


@pytest.mark.parametrize("members", range(1, TILE_PAIRS + 1))
@pytest.mark.parametrize("head_dim", [32, 64, 512])
def test_tiles_equal_their_twins(head_dim: int, members: int) -> None:
    rng = np.random.default_rng(head_dim)
    units = 3
    x = rng.standard_normal((2, units * UNIT, head_dim)).astype(np.float32)
    query = rng.standard_normal((members, head_dim)).astype(np.float32)
    cache = cache_of(x, "fp16")
    keys, values = numbers_of(cache, units * UNIT)
    laid = np.ascontiguousarray(query.T)
    scores = np.zeros((members, SCORE_BYTES // 4), np.float32)  # rows as in a scratch
    size = cache.strides[1]
    score(laid.ctypes.data, members, head_dim, cache[0].ctypes.data, units, size, scores.ctypes.data, SCORE_BYTES)
    np.testing.assert_array_equal(scores[:, : units * UNIT], twins.scores(query, keys))
    mixed, first, count = query.copy(), UNIT + 5, 20
    head = KVHead(16, cache[0].ctypes.data, cache[1].ctypes.data, size, 0.0)
    mix(scores[:, first:].ctypes.data, members, head, first, count, head_dim, mixed.ctypes.data, mixed.strides[0])
    some = slice(first, first + count)
    np.testing.assert_array_equal(mixed, twins.mix(query, scores[:, some], values[some]))


def test_weights_of_far_scores_make_no_denormal_sums() -> None:
    scores = np.linspace(-300, 0, 2 * UNIT, dtype=np.float32)
    state = np.zeros(HEAD_DIM + 16, np.float32)
    state[HEAD_DIM] = -1e30  # no positions yet
    weigh(scores.ctypes.data, States(state.ctypes.data, state.nbytes), 0, HEAD_DIM, 0, len(scores))
    assert scores[-1] == 1.0
    assert scores.min() > 8e-27
    assert scores.max(where=scores < 1e-26, initial=0) == scores.min()
    np.testing.assert_allclose(state[HEAD_DIM + 1], scores.sum(dtype=np.float64), rtol=1e-6)


@pairwise(members=[1, 2, 4, 8], head_dim=[32, 64, 512], extreme=[False, True])
def test_integer_tiles_equal_their_twins(members: int, head_dim: int, extreme: bool) -> None:
    rng = np.random.default_rng(head_dim)
    units = 3
    x = rng.standard_normal((2, units * UNIT, head_dim)).astype(np.float32)
    if extreme:  # every code is 127 or -127
        x = np.sign(x)
    cache = cache_of(x, "int8")
    codes, scales = codes_of(cache)
    queries = rng.integers(-127, 128, (members, head_dim))
    weights = rng.integers(0, 128, (units, members, UNIT))
    if extreme:
        queries, weights = np.where(queries < 0, -127, 127), np.full_like(weights, 127)
    factors = rng.random(members).astype(np.float32)
    laid = np.ascontiguousarray(queries.reshape(members, -1, 32).swapaxes(0, 1), np.int8)
    starts = (-instruction_set().int8_zero * queries.sum(axis=1)).astype(np.int32)
    scores = np.zeros((members, units * UNIT), np.float32)

    scratch = attention_memory.scratch_at(0, head_dim)._replace(
        codes=laid.ctypes.data, starts=starts.ctypes.data, query_scales=factors.ctypes.data
    )
    size = cache.strides[1]
    score_keys(
        scratch, 0, members, head_dim, cache[0].ctypes.data, 2 * units, size, scores.ctypes.data, scores.strides[0]
    )
    np.testing.assert_array_equal(scores, twins.integer_scores(queries, factors, codes[0], scales[0]))
    shares = rng.random((units, members)).astype(np.float32)
    start = rng.standard_normal((members, head_dim)).astype(np.float32)
    for chain in (1, units):
        sums = weights.reshape(-1, chain, members, UNIT).sum(axis=(1, 3))
        starts = (-instruction_set().int8_zero * sums).astype(np.int32)
        mixed, packed = start.copy(), weights.astype(np.int8)
        mix_values(
            members, cache[1].ctypes.data, size, packed.ctypes.data, starts.ctypes.data, shares.ctypes.data,
            units // chain, chain, head_dim, mixed.ctypes.data, mixed.strides[0],
        )  # fmt: skip
        np.testing.assert_array_equal(mixed, twins.integer_mix(start, weights, shares, codes[1], chain))
