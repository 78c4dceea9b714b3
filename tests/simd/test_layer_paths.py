"""Forwards along a layer path: skipped layers have no effect, finished rows are not run again, no bit changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any

import numpy as np
import pytest

from ondevice.arrays import Int64Array
from ondevice.bundle import Bundle
from ondevice.engines import kv_cache
from ondevice.engines.layer_path import WHOLE, LayerPath
from ondevice.engines.protocol import KVCacheType, Outputs, Rows, TokenTree
from ondevice.engines.simd import engine as engine_module
from ondevice.engines.simd.caches import LookupSettings
from ondevice.engines.simd.engine import SimdEngine, SimdSession
from ondevice.engines.simd.threads import ThreadPool
from tests.fixtures.tiny_models import CONTEXT, VOCAB
from tests.simd.conftest import FAMILIES, LOOKUP
from tests.simd.forwards import extend, random_tree, run

CASES: list[tuple[KVCacheType, LookupSettings | None]] = [("fp16", None), ("int8", None), ("fp16", LOOKUP)]
SETTINGS = [
    *(("e2b", *case) for case in CASES),
    *((family, *CASES[number % 3]) for number, family in enumerate(FAMILIES[1:], 1)),
]
"""Every family and every case occur, but not every combination: layer paths and kinds of attention are independent."""


@pytest.fixture(
    scope="module",
    params=SETTINGS,
    ids=[f"{family}-{'lookup' if lookup else kind}" for family, kind, lookup in SETTINGS],
)
def engine(bundles: dict[str, Bundle], request: pytest.FixtureRequest) -> Iterator[SimdEngine]:
    family, kind, lookup = request.param
    made = SimdEngine(bundles[family], threads=2 if family == "e2b" else 1, kv_cache=kind, lookup=lookup)
    yield made
    made.close()


def paths_of(engine: SimdEngine) -> list[LayerPath]:
    """Some valid paths of this target: sub-layers left out, near the end and elsewhere, and early ends."""
    layers = engine.target.layers
    read = {source for layer in layers if (source := layer.mixer.kv_source) is not None}
    free, last = frozenset(range(len(layers))) - read, len(layers) - 1
    return [
        LayerPath(without_attention=frozenset({last})),
        LayerPath(without_mlp=frozenset({last})),
        LayerPath(frozenset({last}), frozenset({last})),
        LayerPath(free, frozenset({0})),
        LayerPath(free & {0, 1}, frozenset(range(len(layers)))),
        *(LayerPath(stop=stop) for stop in range(1, len(layers) + 1)),
        LayerPath(frozenset({0}) - read, stop=last),
    ]


def along(session: SimdSession, tokens: Sequence[int], wanted: Sequence[int], path: LayerPath) -> Outputs:
    return session.engine.forward([Rows(session, TokenTree.chain(tokens), wanted, path)])[0]


def copied(outputs: Outputs) -> Outputs:
    return replace(outputs, logits=outputs.logits.copy(), hidden=outputs.hidden.copy())


def assert_same(found: Outputs, wanted: Outputs) -> None:
    np.testing.assert_array_equal(found.logits, wanted.logits)
    np.testing.assert_array_equal(found.hidden, wanted.hidden)


def test_drafted_rows_teach_whole_ones_no_threads(engine: SimdEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft and the verification that continues it are different kinds of work when the thread count is learnt.

    After the kept rows of an early exit, a draft has almost nothing left to do and a verification all upper layers.
    """
    kinds: list[int] = []
    pool = engine._program.pool

    def run_noted(plan: Int64Array, state: Int64Array, kind: int, units: int = 1) -> int:
        kinds.append(kind)
        return ThreadPool.run(pool, plan, state, kind, units)

    monkeypatch.setattr(pool, "run", run_noted)
    session, tokens = engine.open_session(), [5, 6, 7, 8]
    extend(session, [1, 2, 3])
    del kinds[:]
    for count in range(1, 5):
        along(session, tokens[:count], [count - 1], LayerPath(stop=1))
    drafted = set(kinds)
    del kinds[:]
    run(session, tokens, range(4))
    assert len(kinds) == 1, "the upper layers"
    assert kinds[0] not in drafted


@pytest.mark.parametrize("length", [3, 180])
def test_a_whole_forward_is_the_same_in_two_pieces(engine: SimdEngine, length: int) -> None:
    """A forward in two pieces equals a complete one, after any draft and with any number of the drafted rows."""
    rng = np.random.default_rng(length)
    session, plain = engine.open_session(), engine.open_session()
    for each in (session, plain):
        extend(each, np.random.default_rng(0).integers(0, VOCAB, length).tolist())
    tokens = rng.integers(0, VOCAB, 6).tolist()
    expected = copied(run(plain, tokens, range(6)))
    for path, (drafted, verified) in zip(paths_of(engine), cycle(((3, 4), (5, 6), (6, 3))), strict=False):
        for count in range(1, drafted + 1):
            along(session, tokens[:count], [count - 1], path)
        wanted = range(verified)
        found = run(session, tokens[:verified], wanted)
        np.testing.assert_array_equal(found.logits, expected.logits[:verified])
        np.testing.assert_array_equal(found.hidden, expected.hidden[:verified])
    session.commit(range(3))
    plain.commit(range(3))
    assert_same(run(session, [7, 8], [0, 1]), run(plain, [7, 8], [0, 1]))


def test_a_draft_is_the_same_token_by_token(engine: SimdEngine) -> None:
    rng = np.random.default_rng(1)
    session, at_once = engine.open_session(), engine.open_session()
    for each in (session, at_once):
        extend(each, np.random.default_rng(0).integers(0, VOCAB, 140).tolist())
    tokens = rng.integers(0, VOCAB, 5).tolist()
    for path in paths_of(engine):
        expected = copied(along(at_once, tokens, range(5), path))
        along(at_once, [1], [0], WHOLE)  # forgets them
        for count in range(1, 6):
            found = along(session, tokens[:count], [count - 1], path)
            np.testing.assert_array_equal(found.logits[0], expected.logits[count - 1])
            np.testing.assert_array_equal(found.hidden[0], expected.hidden[count - 1])
        assert_same(along(session, tokens, range(5), path), expected)


def test_what_is_left_out_shows(engine: SimdEngine) -> None:
    session = engine.open_session()
    extend(session, np.random.default_rng(0).integers(0, VOCAB, 40).tolist())
    seen = {run(session, [5], [0]).logits.tobytes()}
    paths = [path for path in paths_of(engine) if path.stop is None]
    for path in paths:
        seen.add(along(session, [5], [0], path).logits.tobytes())
    assert len(seen) == 1 + len(paths)


def test_an_early_end_answers_the_residual_stream(engine: SimdEngine) -> None:
    """The output of an early end after the last layer, normed, is the hidden state of a complete forward."""
    session, count = engine.open_session(), len(engine.target.layers)
    extend(session, [3, 1, 4])
    expected = copied(run(session, [5, 9], [0, 1]))
    end = along(session, [5, 9], [0, 1], LayerPath(stop=count))
    assert end.logits.shape == (2, 0)
    scale = 1 / np.sqrt(np.mean(end.hidden.astype(np.float64) ** 2, axis=1, keepdims=True) + 1e-6)
    ratio = expected.hidden / (end.hidden * scale)
    np.testing.assert_allclose(ratio[0], ratio[1], rtol=1e-4)  # the norm's weights


def test_drafts_are_never_committed(engine: SimdEngine) -> None:
    session = engine.open_session()
    extend(session, [3, 1, 4])
    run(session, [5], [0])
    along(session, [5], [0], LayerPath(stop=1))
    assert session.pending == 0
    with pytest.raises(ValueError, match="not a path of rows"):
        session.commit([0])


def test_other_sequences_beside_pieces(engine: SimdEngine) -> None:
    """Several sequences share a forward: some drafted different numbers of rows, one is a tree, one prefills."""
    rng = np.random.default_rng(2)
    texts = [rng.integers(0, VOCAB, size).tolist() for size in (9, 60, 140, 33)]
    trees = [
        TokenTree.chain(rng.integers(0, VOCAB, 4).tolist()),
        TokenTree.chain(rng.integers(0, VOCAB, 3).tolist()),
        random_tree(rng, 6),
        TokenTree.chain(rng.integers(0, VOCAB, 20).tolist()),
    ]
    wanted: list[Sequence[int]] = [range(4), range(3), range(6), [19]]
    for path in paths_of(engine):
        sessions, alone = [[engine.open_session() for _ in texts] for _ in range(2)]
        for each in (sessions, alone):
            for session, text in zip(each, texts, strict=True):
                extend(session, text)
        for count in (1, 2, 3):
            along(sessions[0], trees[0].tokens[:count].tolist(), [count - 1], path)
        along(sessions[1], [int(trees[1].tokens[0])], [0], path)
        batch = [Rows(*each) for each in zip(sessions, trees, wanted, strict=True)]
        for found, session, tree, rows in zip(engine.forward(batch), alone, trees, wanted, strict=True):
            assert_same(found, run(session, tree, rows))


def test_caches_that_slide_while_a_draft_is_made(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    engines = [SimdEngine(bundle, threads=1)]
    monkeypatch.setattr(engine_module, "MAX_ROWS", 8)
    monkeypatch.setattr(kv_cache, "SLACK", 0)
    engines.append(SimdEngine(bundle, threads=1))
    plain, drafting = (engine.open_session() for engine in engines)
    path = paths_of(engines[0])[2]
    rng = np.random.default_rng(0)
    while plain.length < CONTEXT - 8:
        tokens = rng.integers(0, VOCAB, 5).tolist()
        for count in range(1, 5):
            along(drafting, tokens[:count], [count - 1], path)
        assert_same(run(drafting, tokens, range(5)), run(plain, tokens, range(5)))
        for session in (plain, drafting):
            session.commit(range(3))
    assert drafting._caches["sliding"].base > 0
    for engine in engines:
        engine.close()


def test_mtp_steps_between_drafts(engine: SimdEngine) -> None:
    """Both drafters of a portfolio work on the same session."""
    session = engine.open_session()
    extend(session, [3, 1, 4, 1, 5])
    hidden = np.linspace(-1, 1, engine.target.hidden_size, dtype=np.float32)
    expected = session.draft_step(7, hidden).logits.copy()
    along(session, [9, 2], [1], paths_of(engine)[0])
    np.testing.assert_array_equal(session.draft_step(7, hidden).logits, expected)
    found = copied(run(session, [9, 2, 6], range(3)))
    other = engine.open_session()
    extend(other, [3, 1, 4, 1, 5])
    assert_same(found, run(other, [9, 2, 6], range(3)))


def test_a_rewind_between_a_draft_and_its_verification(engine: SimdEngine) -> None:
    session, other = engine.open_session(), engine.open_session()
    extend(session, [3, 1, 4, 1, 5])
    extend(other, [3, 1, 4])
    along(session, [9, 2], [1], LayerPath(stop=1))
    assert session.rewind(3) == 3
    assert_same(run(session, [9, 2], range(2)), run(other, [9, 2], range(2)))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (LayerPath(stop=0), "ends at a layer from 1"),
        (LayerPath(stop=99), "ends at a layer from 1"),
        (LayerPath(without_mlp=frozenset({99})), "and no 99"),
        (LayerPath(without_attention=frozenset({-1})), "and no -1"),
    ],
)
def test_paths_that_do_not_exist(engine: SimdEngine, path: LayerPath, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        along(engine.open_session(), [1], [0], path)


def test_a_cache_that_others_read_is_written(engine: SimdEngine) -> None:
    layers = engine.target.layers
    for source in {source for layer in layers if (source := layer.mixer.kv_source) is not None}:
        with pytest.raises(ValueError, match="other layers read its cache"):
            along(engine.open_session(), [1], [0], LayerPath(frozenset({source})))


def test_rows_of_one_forward_pass_one_path(engine: SimdEngine) -> None:
    sessions = [engine.open_session() for _ in range(2)]
    paths: list[Any] = [WHOLE, LayerPath(stop=1)]
    batch = [Rows(session, TokenTree.chain([1]), [0], path) for session, path in zip(sessions, paths, strict=True)]
    with pytest.raises(ValueError, match="the same path"):
        engine.forward(batch)
