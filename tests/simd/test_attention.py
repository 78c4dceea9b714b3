"""Attention against its numpy twin, and its indifference to how keys lie in the cache and to the rows beside it."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import pytest

from ondevice.engines.protocol import ROOT, KVCacheType, TokenTree
from ondevice.engines.simd.attention_scratch import AttentionScratch
from ondevice.engines.simd.cache_rows import BITS
from ondevice.engines.simd.forward_state import ForwardState
from ondevice.engines.simd.kernels import slots
from ondevice.engines.simd.kernels.attention import (
    ROWS,
    KVHead,
    Output,
    Queries,
    RowGroup,
    Scratch,
    attend,
    mix,
    read_sequence,
    score,
)
from ondevice.engines.simd.kernels.attention_tile import HEADS
from ondevice.engines.simd.sequence_record import SequenceRecord
from tests.simd import twins
from tests.simd.memory import cache_of, numbers_of, read_records

HEAD_DIM = 64
SLIDING = 1

pytestmark = pytest.mark.parametrize("kind", get_args(KVCacheType))


def run(
    query: twins.Floats, cache: npt.NDArray[Any], tree: TokenTree, row: int, length: int, window: int
) -> twins.Quantized:
    """What the records of some rows' heads hold, and zeros for all other rows.

    Args:
        query: [rows, heads, head_dim], of rows `row` and following.
        cache: keys and values of one head, [2, positions, 1]
        window: positions that a row sees.
    """
    count, heads, head_dim = query.shape
    bits = 16 if cache.dtype == np.float16 else 8
    state, record, scratch = ForwardState(len(tree), {}, bits), SequenceRecord({}), AttentionScratch(head_dim, 1)
    record.set_rows(tree, length)
    positions = length + tree.depths()
    state.set_rows(tree.tokens, positions, positions + 1, np.arange(len(tree)))
    state.set_window(window)
    scratch.reserve(cache.shape[1])
    keys, values = cache
    blocks = heads * head_dim // 32
    records = np.zeros(len(positions) * blocks * 40, np.uint8)
    for start in range(0, heads, HEADS):
        attend(
            RowGroup(state.slots, read_sequence(record.address, SLIDING), SLIDING, slots.ALL, row, count),
            Queries(query[:, start:].ctypes.data, query.strides[0], min(HEADS, heads - start), head_dim),
            KVHead(bits, keys.ctypes.data, values.ctypes.data, cache.strides[1]),
            Scratch(scratch.address, scratch.stride),
            Output(records.ctypes.data, start * head_dim // 32, blocks, 8),
        )
    return read_records(records, len(positions))


def assert_same(found: twins.Quantized, row: int, expected: twins.Quantized, other: int) -> None:
    """The same bits in two rows."""
    np.testing.assert_array_equal(found.codes[row], expected.codes[other])
    np.testing.assert_array_equal(found.exponents[row], expected.exponents[other])


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("length", [0, 1, 15, 16, 200])
def test_attention_equals_its_twin(kind: KVCacheType, heads: int, length: int) -> None:
    rng = np.random.default_rng(heads * 1000 + length)
    query = rng.standard_normal((1, heads, HEAD_DIM)).astype(np.float32) * np.float32(0.3)
    cache = cache_of(rng.standard_normal((2, length + 1, HEAD_DIM)).astype(np.float32), kind)
    window = length - length // 3 + 1
    found = run(query, cache, TokenTree.chain([1]), 0, length, window)
    keys, values = numbers_of(cache[:, -window:])
    expected = twins.attend(query[0], keys, values).reshape(1, -1)
    step = np.exp2(found.exponents).repeat(32, axis=1)
    assert (np.abs(found.values() - expected) <= 0.5001 * step + 1e-5).all()


def test_a_row_of_a_tree_sums_what_it_would_after_its_ancestors(kind: KVCacheType) -> None:
    rng = np.random.default_rng(0)
    length, parents = 37, np.array([-1, 0, 0, 2, 1, 3])
    tree = TokenTree(np.arange(6), parents)
    cache = cache_of(rng.standard_normal((2, length + 6, HEAD_DIM)).astype(np.float32), kind)
    query = rng.standard_normal((1, 4, HEAD_DIM)).astype(np.float32)
    in_tree = run(query, cache, tree, 5, length, 21)
    path = [0, 2, 3, 5]
    committed = np.ascontiguousarray(np.concatenate([cache[:, :length], cache[:, [length + i for i in path]]], axis=1))
    assert_same(in_tree, 5, run(query, committed, TokenTree.chain([5]), 0, length + 3, 21), 0)


@pytest.mark.parametrize("head_dim", [32, 64, 96])
@pytest.mark.parametrize("window", [3, 20, 500])
@pytest.mark.parametrize("branches", [0.0, 0.4])
@pytest.mark.parametrize("length", [0, 5, 90])
def test_rows_together_are_rows_alone(
    kind: KVCacheType, head_dim: int, window: int, branches: float, length: int
) -> None:
    rng = np.random.default_rng(length)
    parents = [int(rng.integers(ROOT, row)) if rng.random() < branches else row - 1 for row in range(30)]
    tree = TokenTree(np.arange(30), np.array(parents))
    assert tree.is_chain == (branches == 0.0)
    cache = cache_of(rng.standard_normal((2, length + 30, head_dim)).astype(np.float32), kind)
    query = rng.standard_normal((30, 3, head_dim)).astype(np.float32)
    for start in range(0, 30, ROWS):
        some = query[start : start + ROWS]
        together = run(some, cache, tree, start, length, window)
        for row in range(start, start + len(some)):
            assert_same(together, row, run(query[row : row + 1], cache, tree, row, length, window), row)


@pytest.mark.parametrize("head_dim", [32, 64, 512])
def test_tiles_equal_their_twins(kind: KVCacheType, head_dim: int) -> None:
    rng = np.random.default_rng(head_dim)
    count = 11
    query = rng.standard_normal((HEADS, head_dim)).astype(np.float32)
    cache = cache_of(rng.standard_normal((2, count, head_dim)).astype(np.float32), kind)
    keys, values = cache[:, :, 0]
    bits, size = BITS[kind], cache.strides[1]
    scores = np.zeros((HEADS, count), np.float32)
    score(bits, query.ctypes.data, HEADS, head_dim, keys.ctypes.data, size, count, scores.ctypes.data, 4 * count)
    if kind == "fp16":
        expected, weights = twins.scores(query, keys), scores
    else:
        expected, weights = twins.scores(query, keys["codes"]) * keys["scale"], scores * values["scale"]
        values = values["codes"]
    np.testing.assert_array_equal(scores, expected)
    # a pair's memory holds what is mixed, then the weights
    pairs = np.concatenate([query, scores], axis=1)
    at = pairs.ctypes.data
    mix(bits, at + 4 * head_dim, pairs.strides[0], cache[1].ctypes.data, size, count, head_dim, at)
    np.testing.assert_array_equal(pairs[:, :head_dim], twins.mix(query, weights, values))
