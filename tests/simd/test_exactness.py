"""A row's logits are the same, bit for bit, whatever the other rows, the tree, the threads and the chunks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ondevice.bundle import Bundle
from ondevice.engines import kv_cache
from ondevice.engines.simd import buffers
from ondevice.engines.simd import engine as engine_module
from ondevice.engines.simd import threads as thread_pool
from ondevice.engines.simd.engine import SimdEngine, SimdSession
from ondevice.engines.simd.tensor_files import TensorFiles
from tests.fixtures.tiny_models import CONTEXT, VOCAB
from tests.simd.forwards import assert_row_alone, drafted, extend, interrupted_allocations, path_to, random_tree, run

MAX_ROWS = 16


def filled(engine: SimdEngine, ids: list[int], rng: np.random.Generator) -> SimdSession:
    session = engine.open_session()
    extend(session, ids, rng)
    return session


@pytest.mark.parametrize("seed", range(4))
def test_random_trees(pair: tuple[SimdEngine, SimdEngine], seed: int) -> None:
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, VOCAB, rng.integers(1, CONTEXT - 2 * MAX_ROWS)).tolist()
    alone, together = (filled(engine, ids, rng) for engine in pair)
    tree = random_tree(rng, int(rng.integers(1, MAX_ROWS + 1)))
    wanted = np.sort(rng.choice(len(tree), rng.integers(1, len(tree) + 1), replace=False)).tolist()
    outputs = run(together, tree, wanted)
    for index, row in enumerate(wanted):
        assert_row_alone(alone, tree, row, outputs, index)
    together.commit(path_to(tree, wanted[-1]))
    fresh = filled(pair[0], [*ids, *(int(tree.tokens[row]) for row in path_to(tree, wanted[-1]))], rng)
    following, afresh = (run(session, [7], [0]).logits for session in (together, fresh))
    np.testing.assert_array_equal(following, afresh)


@pytest.mark.parametrize("length", [3, 150])
def test_drafts_do_not_see_rejected_rows(pair: tuple[SimdEngine, SimdEngine], length: int) -> None:
    rng = np.random.default_rng(length)
    ids = rng.integers(0, VOCAB, length).tolist()
    verified, fresh = (filled(engine, ids, rng) for engine in pair)
    outputs = run(verified, rng.integers(0, VOCAB, 6).tolist(), range(6))
    hidden = outputs.hidden[0].copy()
    verified.commit([])
    steps = [session.draft_step(9, hidden) for session in (verified, fresh)]
    for name in ("candidates", "logits", "hidden"):
        np.testing.assert_array_equal(getattr(steps[0], name), getattr(steps[1], name))


def test_threads_that_come_and_go_change_no_bit(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    class Turns:
        """Gives every run a different number of threads."""

        tried = trying = False

        def __init__(self, most: int, *_: object) -> None:
            self.threads = self._most = most

        def observe(self, *_: float) -> None:
            self.threads = self.threads % self._most + 1

    def computed(threads: int) -> list[Any]:
        engine, rng = SimdEngine(bundle, threads), np.random.default_rng(0)
        session = filled(engine, list(range(50)), rng)
        found: list[Any] = []
        for rows in (1, 5, 1, 3, 30, 2, 5):
            outputs = run(session, rng.integers(0, VOCAB, rows).tolist(), range(rows))
            found.append((outputs.logits.tobytes(), outputs.hidden.tobytes()))
            session.commit(range(rows))
            found.append(drafted(session))
        engine.close()
        return found

    alone = computed(1)
    monkeypatch.setattr(thread_pool, "ThreadChoice", Turns)
    assert computed(3) == alone


def test_caches_that_grow_and_slide_between_drafts(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses are kept between forwards and between drafts, and have to be updated when a cache moves."""
    engines = [SimdEngine(bundle, threads=1)]
    monkeypatch.setattr(engine_module, "MAX_ROWS", 8)
    monkeypatch.setattr(kv_cache, "SLACK", 8)
    engines.append(SimdEngine(bundle, threads=1))
    whole, grown = (engine.open_session() for engine in engines)
    for token in np.random.default_rng(0).integers(0, VOCAB, CONTEXT - 1).tolist():
        outputs = run(grown, [token], [0])
        grown.draft_step(token, outputs.hidden[0])
        grown.commit([0])
        expected = run(whole, [token], [0])
        whole.commit([0])
        np.testing.assert_array_equal(outputs.logits, expected.logits)
        assert drafted(grown, 1) == drafted(whole, 1)
    assert grown._caches["sliding"].base > 0
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("place", range(4))
def test_an_interrupt_while_memory_grows(
    bundles: dict[str, Bundle], place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt at any allocation (caches, scratch, outputs) must not leave stale addresses to the next forward."""
    monkeypatch.setattr(kv_cache, "SLACK", 0)
    monkeypatch.setattr(buffers, "PART", 8)  # small like the caches, so that everything grows now
    engines = [SimdEngine(bundles["e2b"], threads=1)]
    monkeypatch.setattr(engine_module, "MAX_ROWS", 8)
    engines.append(SimdEngine(bundles["e2b"], threads=1))
    whole, disturbed = (engine.open_session() for engine in engines)
    for session in (whole, disturbed):
        for start in range(0, 128, 8):
            run(session, range(start, start + 8), [0])
            session.commit(range(8))
    with interrupted_allocations(monkeypatch, place), pytest.raises(KeyboardInterrupt):
        run(disturbed, range(100, 108), range(8))
    wanted, found = (run(session, range(100, 108), range(8)).logits for session in (whole, disturbed))
    np.testing.assert_array_equal(found, wanted)
    for session in (whole, disturbed):
        session.commit(range(8))
    assert drafted(disturbed) == drafted(whole)
    for engine in engines:
        engine.close()


def test_tables_are_read_again_after_their_pages_were_let_go_of(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    released, release = list[TensorFiles](), TensorFiles.release

    def counted(self: TensorFiles) -> None:
        released.append(self)
        release(self)

    monkeypatch.setattr(TensorFiles, "release", counted)
    found = []
    for every in (3, 1 << 40):
        monkeypatch.setattr(engine_module, "RELEASE_EVERY", every)
        engine = SimdEngine(bundle, threads=1)
        released.clear()
        session = engine.open_session()
        tokens = np.random.default_rng(0).integers(0, VOCAB, 10).tolist()
        found.append([run(session, [token], [0]).logits.copy() for token in tokens])
        assert len(released) == 10 // every
        engine.close()
    often, never = found
    np.testing.assert_array_equal(often, never)
