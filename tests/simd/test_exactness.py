"""The logits of a row are the same, bit for bit, whatever the rows beside it, the tree, the threads and the chunks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

import numpy as np
import pytest

from ondevice.bundle import Bundle
from ondevice.engines.protocol import ROOT, KVCacheType, TokenTree
from ondevice.engines.simd.engine import SimdEngine
from tests.tiny_models import CONTEXT, VOCAB

MOST_ROWS = 16


@pytest.fixture(scope="module", params=get_args(KVCacheType))
def pair(bundle: Bundle, request: pytest.FixtureRequest) -> Iterator[tuple[SimdEngine, SimdEngine]]:
    """One engine with a thread, one with two."""
    engines = SimdEngine(bundle, 1, kv_cache=request.param), SimdEngine(bundle, 2, kv_cache=request.param)
    yield engines
    for engine in engines:
        engine.close()


def prefill(engine: SimdEngine, ids: list[int], rng: np.random.Generator) -> None:
    """Commit `ids` in random chunks."""
    engine.rewind(0)
    start = 0
    while start < len(ids):
        part = ids[start : start + int(rng.integers(1, 60))]
        engine.forward(TokenTree.chain(part), [len(part) - 1])
        engine.commit(range(len(part)))
        start += len(part)


def random_tree(rng: np.random.Generator, count: int) -> TokenTree:
    """Mostly chains with branches, now and then a bush."""
    branch = rng.choice([0.0, 0.3, 1.0])
    parents = [int(rng.integers(ROOT, row)) if rng.random() < branch else row - 1 for row in range(count)]
    return TokenTree(rng.integers(0, VOCAB, count), np.array(parents, np.int64))


def path_to(tree: TokenTree, row: int) -> list[int]:
    path: list[int] = []
    while row != ROOT:
        path.insert(0, row)
        row = int(tree.parents[row])
    return path


@pytest.mark.parametrize("seed", range(8))
def test_random_trees(pair: tuple[SimdEngine, SimdEngine], seed: int) -> None:
    rng = np.random.default_rng(seed)
    alone, together = pair
    ids = rng.integers(0, VOCAB, rng.integers(1, CONTEXT - 2 * MOST_ROWS)).tolist()
    for engine in pair:
        prefill(engine, ids, rng)
    tree = random_tree(rng, int(rng.integers(1, MOST_ROWS + 1)))
    count = len(tree.tokens)
    wanted = np.sort(rng.choice(count, rng.integers(1, count + 1), replace=False)).tolist()
    outputs = together.forward(tree, wanted)
    for index, row in enumerate(wanted):
        for ancestor in path_to(tree, row):
            plain = alone.forward(TokenTree.chain([int(tree.tokens[ancestor])]), [0])
            alone.commit([0])
        np.testing.assert_array_equal(outputs.logits[index], plain.logits[0])
        np.testing.assert_array_equal(outputs.hidden[index], plain.hidden[0])
        assert alone.rewind(len(ids)) == len(ids)
    together.commit(path_to(tree, wanted[-1]))
    prefill(alone, [*ids, *(int(tree.tokens[row]) for row in path_to(tree, wanted[-1]))], rng)
    following = [engine.forward(TokenTree.chain([7]), [0]).logits.copy() for engine in pair]
    np.testing.assert_array_equal(*following)


@pytest.mark.parametrize("length", [3, 40, 150])
def test_drafts_do_not_see_rejected_rows(pair: tuple[SimdEngine, SimdEngine], length: int) -> None:
    rng = np.random.default_rng(length)
    ids = rng.integers(0, VOCAB, length).tolist()
    for engine in pair:
        prefill(engine, ids, rng)
    verified, fresh = pair
    outputs = verified.forward(TokenTree.chain(rng.integers(0, VOCAB, 6).tolist()), range(6))
    hidden = outputs.hidden[0].copy()
    verified.commit([])
    steps = [engine.draft_step(9, hidden) for engine in (verified, fresh)]
    for name in ("candidates", "logits", "hidden"):
        np.testing.assert_array_equal(getattr(steps[0], name), getattr(steps[1], name))
