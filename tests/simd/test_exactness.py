"""The logits of a row are the same, bit for bit, whatever the rows beside it, the tree, the threads and the chunks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import numpy as np
import pytest

from ondevice.bundle import Bundle
from ondevice.engines.protocol import ROOT, KVCacheType, TokenTree
from ondevice.engines.simd import engine as engine_module
from ondevice.engines.simd import kv_store, program
from ondevice.engines.simd.engine import SimdEngine
from ondevice.engines.simd.graph.sources import Sources
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


def drafted(engine: SimdEngine, steps: int = 3) -> list[bytes]:
    """All bits of a draft after what is committed."""
    found = []
    token, hidden = 9, np.linspace(-1, 1, engine.target.hidden_size, dtype=np.float32)
    for _ in range(steps):
        step = engine.draft_step(token, hidden)
        found += [step.candidates.tobytes(), step.logits.tobytes(), step.hidden.tobytes()]
        token, hidden = int(step.candidates[step.logits.argmax()]), step.hidden
    return found


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_draft_shared_among_threads(bundle: Bundle, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for shared_from in (0, 1 << 40):
        monkeypatch.setattr(program, "SHARED_FROM", shared_from)
        engine = SimdEngine(bundle, threads)
        prefill(engine, list(range(50)), np.random.default_rng(0))
        found.append(drafted(engine))
        engine.close()
    assert found[0] == found[1]


def test_caches_that_grow_and_slide_between_drafts(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses are kept from forward to forward and from draft to draft: a cache that moves must be followed."""
    whole = SimdEngine(bundle, threads=1)
    monkeypatch.setattr(engine_module, "MOST_ROWS", 8)
    monkeypatch.setattr(kv_store, "SLACK", 8)
    grown = SimdEngine(bundle, threads=1)
    ids = np.random.default_rng(0).integers(0, VOCAB, CONTEXT - 1).tolist()
    for token in ids:
        outputs = grown.forward(TokenTree.chain([token]), [0])
        grown.draft_step(token, outputs.hidden[0])
        grown.commit([0])
        expected = whole.forward(TokenTree.chain([token]), [0])
        whole.commit([0])
        np.testing.assert_array_equal(outputs.logits, expected.logits)
        assert drafted(grown, 1) == drafted(whole, 1)
    assert grown._caches["sliding"].base > 0
    for engine in (whole, grown):
        engine.close()


@pytest.mark.parametrize("place", range(5))
def test_an_interrupt_while_memory_grows(
    bundles: dict[str, Bundle], place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At whichever array: the next forward must not take for pointed at what is not."""
    whole = SimdEngine(bundles["e2b"], threads=1)
    monkeypatch.setattr(engine_module, "MOST_ROWS", 8)
    disturbed = SimdEngine(bundles["e2b"], threads=1)
    for engine in (whole, disturbed):
        for start in (0, 8):
            engine.forward(TokenTree.chain(list(range(start, start + 8))), [0])
            engine.commit(range(8))
    zeros, made = np.zeros, list[object]()

    def interrupted(*arguments: Any) -> Any:
        made.append(arguments)
        if len(made) > place:
            raise KeyboardInterrupt
        return zeros(*arguments)

    rows = TokenTree.chain(list(range(100, 108)))
    with monkeypatch.context() as patch:
        patch.setattr(np, "zeros", interrupted)
        with pytest.raises(KeyboardInterrupt):
            disturbed.forward(rows, range(8))
    logits = [engine.forward(rows, range(8)).logits for engine in (whole, disturbed)]
    np.testing.assert_array_equal(*logits)
    for engine in (whole, disturbed):
        engine.commit(range(8))
    assert drafted(disturbed) == drafted(whole)
    for engine in (whole, disturbed):
        engine.close()


def test_tables_are_read_again_after_their_pages_were_let_go_of(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    released, release = [], Sources.release
    monkeypatch.setattr(Sources, "release", lambda self: (released.append(self), release(self)))
    found = []
    for every in (3, 1 << 40):
        monkeypatch.setattr(engine_module, "RELEASE_EVERY", every)
        engine = SimdEngine(bundle, threads=1)
        released.clear()
        rows = [TokenTree.chain([token]) for token in np.random.default_rng(0).integers(0, VOCAB, 10).tolist()]
        found.append([engine.forward(row, [0]).logits.copy() for row in rows])
        assert len(released) == 10 // every
        engine.close()
    np.testing.assert_array_equal(*found)
