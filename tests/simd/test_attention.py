"""Attention against its numpy twin, and its indifference to how keys lie in the cache."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from ondevice.engines.protocol import TokenTree
from ondevice.engines.simd.kernels import rows
from ondevice.engines.simd.kernels.attention import HEADS, attend
from ondevice.engines.simd.state import ForwardState
from tests.simd import twins
from tests.simd.memory import read_records

HEAD_DIM = 64
FULL = 0


def run(
    query: twins.Floats,
    cache: npt.NDArray[np.float16],
    tree: TokenTree,
    row: int,
    length: int,
    first: int,
) -> npt.NDArray[np.uint8]:
    """The records of one row's heads, query [heads, HEAD_DIM], over cache [2, positions, HEAD_DIM]."""
    heads = len(query)
    state = ForwardState(1, {}, 1)
    state.set_tree(tree, length)
    positions = length + tree.depths()
    state.set_kind("full", positions, np.full(len(positions), first), positions + 1, 0)
    state.reserve_scores(cache.shape[1])
    keys, values = cache
    blocks = heads * HEAD_DIM // 32
    records = np.zeros(len(positions) * blocks * 40, np.uint8)
    for start in range(0, heads, HEADS):
        attend(
            state.slots, FULL, rows.ALL, row, query[start:].ctypes.data, min(HEADS, heads - start), HEAD_DIM,
            keys.ctypes.data, values.ctypes.data, 2 * HEAD_DIM, int(state.slots[rows.SCORES]),
            int(state.slots[rows.SCORES_STRIDE]), records.ctypes.data, start * HEAD_DIM // 32, blocks, 8,
        )  # fmt: skip
    return records


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("length", [0, 1, 15, 16, 200])
def test_attention_equals_its_twin(heads: int, length: int) -> None:
    rng = np.random.default_rng(heads * 1000 + length)
    query = rng.standard_normal((heads, HEAD_DIM)).astype(np.float32) * np.float32(0.3)
    cache = rng.standard_normal((2, length + 1, HEAD_DIM)).astype(np.float16)
    first = length // 3
    found = read_records(run(query, cache, TokenTree.chain([1]), 0, length, first), 1)
    expected = twins.attend(query, cache[0, first:], cache[1, first:]).reshape(1, -1)
    step = np.exp2(found.exponents).repeat(32, axis=1)
    assert (np.abs(found.values() - expected) <= 0.5001 * step + 1e-5).all()


def test_a_row_of_a_tree_sums_what_it_would_after_its_ancestors() -> None:
    rng = np.random.default_rng(0)
    length, parents = 37, np.array([-1, 0, 0, 2, 1, 3])
    tree = TokenTree(np.arange(6), parents)
    cache = rng.standard_normal((2, length + 6, HEAD_DIM)).astype(np.float16)
    query = rng.standard_normal((4, HEAD_DIM)).astype(np.float32)
    in_tree = read_records(run(query, cache, tree, 5, length, 20), 6)
    path = [0, 2, 3, 5]
    committed = np.ascontiguousarray(np.concatenate([cache[:, :length], cache[:, [length + i for i in path]]], axis=1))
    alone = read_records(run(query, committed, TokenTree.chain([5]), 0, length + 3, 20), 1)
    np.testing.assert_array_equal(in_tree.codes[5], alone.codes[0])
    np.testing.assert_array_equal(in_tree.exponents[5], alone.exponents[0])
