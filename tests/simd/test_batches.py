"""Several sequences in one forward: each has the same bits as alone."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from ondevice.bundle import Bundle
from ondevice.engines import kv_cache
from ondevice.engines.protocol import MAX_SESSIONS, KVCacheType, Outputs, Rows, TokenTree
from ondevice.engines.simd import buffers
from ondevice.engines.simd import engine as engine_module
from ondevice.engines.simd.engine import SimdEngine, SimdSession
from ondevice.errors import SessionFileError, UsageError
from tests.fixtures.tiny_models import CONTEXT, VOCAB
from tests.simd.forwards import assert_row_alone, drafted, extend, interrupted_allocations, path_to, random_tree, run

SESSIONS = 5


def random_ids(rng: np.random.Generator, most: int) -> list[int]:
    return rng.integers(0, VOCAB, rng.integers(1, most)).tolist()


def random_rows(session: SimdSession, rng: np.random.Generator) -> Rows:
    """A prefill chunk with its last row wanted, or none; a decode row; or a tree with some rows wanted."""
    kind = rng.choice(["prefill", "decode", "tree"])
    if kind == "prefill":
        count = int(rng.integers(17, 50))
        return Rows(session, TokenTree.chain(random_ids(rng, VOCAB)[:count]), [])
    tree = random_tree(rng, 1 if kind == "decode" else int(rng.integers(2, 17)))
    wanted = np.sort(rng.choice(len(tree), rng.integers(0, len(tree) + 1), replace=False))
    return Rows(session, tree, wanted.tolist())


@pytest.mark.parametrize("turned", [False, True], ids=["two threads", "one thread"])
def test_random_batches(pair: tuple[SimdEngine, SimdEngine], turned: bool) -> None:
    """Random subsets of several sequences in random order, for some rounds; then a draft after each sequence."""
    rng = np.random.default_rng(int(turned))
    plain, batched = pair[::-1] if turned else pair
    sessions = [batched.open_session() for _ in range(SESSIONS)]
    alone = [plain.open_session() for _ in range(SESSIONS)]
    for index in range(1, SESSIONS):
        ids = random_ids(rng, CONTEXT // 2)
        extend(sessions[index], ids, rng)
        extend(alone[index], ids, rng)
    for _ in range(4):
        chosen = rng.permutation(SESSIONS)[: rng.integers(1, SESSIONS + 1)]
        batch = [random_rows(sessions[index], rng) for index in chosen if sessions[index].max_rows() > 50]
        if not batch:
            continue
        found = batched.forward(batch)
        for rows, outputs in zip(batch, found, strict=True):
            assert isinstance(rows.session, SimdSession)
            twin = alone[sessions.index(rows.session)]
            assert outputs.rows == sum(len(each.tree) for each in batch)
            for index, row in enumerate(rows.wanted):
                assert_row_alone(twin, rows.tree, row, outputs, index)
            path = path_to(rows.tree, int(rng.integers(-1, len(rows.tree))))
            rows.session.commit(path)
            extend(twin, rows.tree.tokens[path].tolist(), rng)
    for session, twin in zip(sessions, alone, strict=True):
        assert list(session.tokens) == list(twin.tokens)
        assert drafted(session, 2) == drafted(twin, 2)


def test_sixteen_sequences_and_as_many_rows_as_there_may_be(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "MAX_ROWS", 3 * MAX_SESSIONS)
    engine = SimdEngine(bundle, threads=2)
    sessions = [engine.open_session() for _ in range(MAX_SESSIONS)]
    trees = [TokenTree.chain([index, 2 * index, 3]) for index in range(MAX_SESSIONS)]
    found = engine.forward([Rows(*each, range(3)) for each in zip(sessions, trees, strict=True)])
    for outputs, tree in zip(found, trees, strict=True):
        alone = engine.open_session()
        np.testing.assert_array_equal(outputs.logits, run(alone, tree, range(3)).logits)
    engine.close()


def copies(outputs: Outputs) -> tuple[bytes, bytes]:
    return outputs.logits.tobytes(), outputs.hidden.tobytes()


def test_outputs_hold_until_their_session_runs_again(engine: SimdEngine) -> None:
    first, second, third = (engine.open_session() for _ in range(3))
    chain = TokenTree.chain(list(range(6)))
    shared = engine.forward([Rows(first, chain, [1, 5]), Rows(second, chain, [0, 2, 3])])
    expected = [copies(outputs) for outputs in shared]
    for _ in range(3):
        first.rewind(0)
        run(first, chain, range(6))
        run(third, chain, range(6))
        assert copies(shared[1]) == expected[1]
    assert copies(shared[0]) == expected[0], "a buffer is used again only when all its sessions have gone on"
    second.close()
    run(third, chain, range(6))
    assert len(engine._outputs._buffers) == 3


def test_one_sequence_uses_one_buffer(engine: SimdEngine, session: SimdSession) -> None:
    addresses = set()
    for rows in (1, 5, 3, 5, 1):
        addresses.add(run(session, range(rows), range(rows)).logits.ctypes.data)
    assert len(addresses) == 2, "the first, and one that is large enough for all that follow"
    assert len(engine._outputs._buffers) == 1


def test_pending_rows_wait_while_others_run(engine: SimdEngine) -> None:
    first, second, twin = (engine.open_session() for _ in range(3))
    run(first, range(8), [7])
    run(second, range(100, 140), [7])
    second.commit(range(40))
    assert first.pending == 8
    first.commit(range(5))
    extend(twin, range(5))
    np.testing.assert_array_equal(run(first, [7], [0]).logits, run(twin, [7], [0]).logits)


def test_sessions_draft_in_turn(engine: SimdEngine) -> None:
    """The arrays of a draft step belong to its session, and it sees its session's cache only."""
    sessions = [engine.open_session() for _ in range(2)]
    extend(sessions[0], range(40))
    extend(sessions[1], range(90, 99))
    alone = [drafted(session) for session in sessions]
    hidden = np.linspace(-1, 1, engine.target.hidden_size, dtype=np.float32)
    steps = [session.draft_step(9, hidden) for session in sessions]
    for _ in range(2):
        for index, session in enumerate(sessions):
            found = [step.tobytes() for step in (steps[index].candidates, steps[index].logits, steps[index].hidden)]
            assert alone[index][:3] == found
            del alone[index][:3]
            token = int(steps[index].candidates[steps[index].logits.argmax()])
            steps[index] = session.draft_step(token, steps[index].hidden)


def played(engine: SimdEngine, seed: int) -> list[bytes]:
    """The bytes of all outputs of a sequence with drafts, trees, rewinds, snapshots and a fork."""
    rng = np.random.default_rng(seed)
    session, found = engine.open_session(), []
    extend(session, random_ids(rng, 100), rng)
    session.snapshot()
    for turn in range(6):
        found += drafted(session, 2)
        tree = random_tree(rng, int(rng.integers(1, 17)))
        outputs = run(session, tree, range(len(tree)))
        found += copies(outputs)
        session.commit(path_to(tree, len(tree) - 1))
        if turn == 2:
            session.rewind(session.length - 1)
        if turn == 3:
            session = session.fork(session.length // 2)
    return found


def test_sequences_in_several_threads_at_once(bundle: Bundle) -> None:
    engine = SimdEngine(bundle, 2)
    expected = [played(engine, seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda seed: played(engine, seed), range(4))) == expected
    engine.close()


def after(session: SimdSession) -> list[bytes]:
    """The bytes of all outputs of a forward after the committed tokens, whose rows are not committed."""
    return [*copies(run(session, range(5), range(5))), *drafted(session)]


@pytest.fixture
def short_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the history of sliding layers, so that they drop positions early."""
    monkeypatch.setattr(engine_module, "MAX_ROWS", 8)
    monkeypatch.setattr(kv_cache, "SLACK", 8)


@pytest.mark.usefixtures("short_memory")
@pytest.mark.parametrize("kind", get_args(KVCacheType))
def test_a_rewind_to_a_snapshot_changes_no_bit(bundle: Bundle, kind: KVCacheType) -> None:
    engine = SimdEngine(bundle, 1, kv_cache=kind)
    session = engine.open_session()
    ids = np.random.default_rng(0).integers(0, VOCAB, 200).tolist()
    extend(session, ids[:60])
    expected = after(session)
    session.snapshot()
    extend(session, ids[60:])
    assert session.rewind(60) == 60
    assert after(session) == expected
    extend(session, ids[60:])
    child = session.fork(60)
    assert child.length == 60
    assert after(child) == expected
    assert session.rewind(55) == 55, "the margin of a snapshot"
    extend(session, ids[55:60])
    assert after(session) == expected
    engine.close()


@pytest.mark.usefixtures("short_memory")
def test_forks_part(bundle: Bundle) -> None:
    engine = SimdEngine(bundle, 2)
    parent, fresh = engine.open_session(), engine.open_session()
    ids = np.random.default_rng(1).integers(0, VOCAB, 100).tolist()
    extend(parent, ids)
    child = parent.fork()
    expected = after(parent)
    assert after(child) == expected
    extend(child, ids[:30])
    assert after(parent) == expected
    extend(fresh, [*ids, *ids[:30]])
    assert after(child) == after(fresh)
    engine.close()


@pytest.mark.parametrize("kind", get_args(KVCacheType))
def test_a_saved_sequence_goes_on(bundle: Bundle, kind: KVCacheType, tmp_path: Path) -> None:
    engines = [SimdEngine(bundle, threads, kv_cache=kind) for threads in (1, 2)]
    session = engines[0].open_session()
    extend(session, range(100))
    session.save(tmp_path / "saved")
    loaded = engines[1].load_session(tmp_path / "saved")
    assert list(loaded.tokens) == list(range(100))
    assert after(loaded) == after(session)
    other = SimdEngine(bundle, 1, kv_cache="int8" if kind == "fp16" else "fp16")
    with pytest.raises(SessionFileError, match="KV cache"):
        other.load_session(tmp_path / "saved")
    for engine in (*engines, other):
        engine.close()


def test_a_batch_that_is_none(bundle: Bundle, engine: SimdEngine, session: SimdSession) -> None:
    """An invalid batch raises before anything runs, and no session changes."""
    stranger = SimdEngine(bundle, 1)
    one, other = TokenTree.chain([1]), engine.open_session()
    run(session, [1, 2], [1])
    batches = {
        "1 to 16": [Rows(engine.open_session(), one, [0]) for _ in range(MAX_SESSIONS + 1)],
        "twice": [Rows(session, one, [0]), Rows(other, one, [0]), Rows(session, one, [0])],
        "the engine that opened it": [Rows(session, one, [0]), Rows(stranger.open_session(), one, [0])],
        "do not fit": [Rows(session, TokenTree.chain([1] * 250), []) for session in (session, *_three(engine))],
        "wanted rows must be": [Rows(session, one, [0]), Rows(other, one, [1])],
        "token ids must be": [Rows(session, one, [0]), Rows(other, TokenTree.chain([VOCAB]), [0])],
    }
    for message, batch in batches.items():
        with pytest.raises(ValueError, match=message):
            engine.forward(batch)
    with pytest.raises(ValueError, match="1 to 16"):
        engine.forward([])
    other.close()
    with pytest.raises(UsageError, match="closed"):
        engine.forward([Rows(session, one, [0]), Rows(other, one, [0])])
    assert session.pending == 2
    stranger.close()


def _three(engine: SimdEngine) -> list[SimdSession]:
    return [engine.open_session() for _ in range(3)]


def test_a_closed_session(engine: SimdEngine, session: SimdSession) -> None:
    session.close()
    session.close()
    hidden = np.zeros(engine.target.hidden_size, np.float32)
    for use in (session.max_rows, session.snapshot, session.fork, lambda: session.draft_step(1, hidden)):
        with pytest.raises(UsageError, match="closed"):
            use()


def test_a_closed_engine(bundle: Bundle) -> None:
    engine = SimdEngine(bundle, 2)
    session, new = engine.open_session(), engine.open_session()
    extend(session, range(40))
    hidden = np.zeros(engine.target.hidden_size, np.float32)
    session.draft_step(1, hidden)
    engine.close()
    engine.close()
    uses = [
        engine.open_session,
        lambda: run(session, [1], [0]),
        lambda: session.draft_step(1, hidden),
        lambda: new.draft_step(1, hidden),
    ]
    for use in uses:
        with pytest.raises(UsageError, match="closed"):
            use()
    assert session.rewind(3) == 3
    session.close()


def test_an_engine_is_closed_while_others_run(bundle: Bundle) -> None:
    """Each forward either completes or raises."""
    engine = SimdEngine(bundle, 2)
    expected = [copies(run(engine.open_session(), range(seed, seed + 20), range(20))) for seed in range(3)]
    running, refused = threading.Barrier(4), []

    def work(seed: int) -> None:
        session = engine.open_session()
        running.wait()
        try:
            while True:
                assert copies(run(session, range(seed, seed + 20), range(20))) == expected[seed]
        except UsageError as error:
            refused.append(str(error))

    with ThreadPoolExecutor(3) as pool:
        jobs = [pool.submit(work, seed) for seed in range(3)]
        running.wait()
        engine.close()
        for job in jobs:
            job.result()
    assert len(refused) == 3


@pytest.mark.usefixtures("short_memory")
@pytest.mark.parametrize("place", range(4))
def test_an_interrupt_while_the_memory_of_several_grows(
    bundles: dict[str, Bundle], place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffers, "PART", 8)  # small like the caches, so that the scratch memory grows too
    engine = SimdEngine(bundles["e2b"], threads=2)
    sessions = [engine.open_session() for _ in range(2)]
    for session in sessions:
        extend(session, range(20))
    twins = [session.fork() for session in sessions]
    with interrupted_allocations(monkeypatch, place):
        try:
            for session in sessions:
                while True:
                    extend(session, range(8))
                    session.draft_step(1, np.ones(engine.target.hidden_size, np.float32))
        except KeyboardInterrupt:
            pass
    for session, twin in zip(sessions, twins, strict=True):
        extend(twin, list(session.tokens)[20:])
        session.rewind(session.length)
        if session.length == twin.length:
            assert after(session) == after(twin)
    engine.close()


def test_rows_that_an_interrupt_has_lost(bundle: Bundle, short_memory: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sliding cache that was interrupted while its rows moved is not read before its first valid row."""
    engine = SimdEngine(bundle, 1)
    session = engine.open_session()
    extend(session, range(40))
    sliding = session._caches["sliding"]

    def interrupted(length: int) -> None:
        sliding.base = length
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(sliding, "_slide", interrupted)
        with pytest.raises(KeyboardInterrupt):
            extend(session, range(100))
    with pytest.raises(ValueError, match="lost"):
        run(session, [1], [0])
    with pytest.raises(ValueError, match="lost"):
        session.draft_step(1, np.zeros(engine.target.hidden_size, np.float32))
    assert session.rewind(session.length) == 0
    fresh = engine.open_session()
    assert copies(run(session, [1, 2], [1])) == copies(run(fresh, [1, 2], [1]))
    engine.close()
