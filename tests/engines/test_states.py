"""Layers with states (the gated delta rule), on both engines: drafts that are accepted in part, files, snapshots."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ondevice
from ondevice.bundle import Bundle
from ondevice.engines.layer_path import LayerPath
from ondevice.engines.protocol import Engine, Rows, TokenTree
from ondevice.engines.simd.engine import SimdEngine
from ondevice.errors import OndeviceError, SessionFileError
from ondevice_export import export
from tests.conftest import ENGINES, MakePair, Once
from tests.engines.test_families import read, run
from tests.fixtures.hostile import hostile_header
from tests.fixtures.tiny_families import VOCAB, WINDOW
from tests.simd.forwards import path_to, random_tree

FAMILY = "qwen3.5"
CHUNK = 90
"""Tokens that are more than a file holds beyond those that a sequence needs."""


@pytest.fixture(scope="session")
def bundle(make_pair: MakePair, once: Once, kernels: None) -> Bundle:
    def export_it(directory: Path) -> None:
        export(make_pair(FAMILY) / "target", directory / "bundle", quantize="int8")

    return Bundle.open(once("states", export_it) / "bundle")


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest, bundle: Bundle) -> Iterator[Engine]:
    with ondevice.load(bundle.path, engine=request.param, threads=1) as model:
        yield model.engine


def random_tokens(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, count).tolist()


def half_committed(session: Any, tokens: list[int], kept: int) -> None:
    run(session, tokens, [])
    session.commit(range(kept))


@pytest.mark.parametrize("seed", range(3))
def test_a_sequence_with_drafts_in_part_accepted_is_that_of_its_tokens(engine: Engine, seed: int) -> None:
    """Also if it is forked where committed tokens will be read again."""
    rng, session = np.random.default_rng(seed), engine.open_session()
    tokens: list[int] = []
    for _ in range(12):
        drafted = rng.integers(0, VOCAB, int(rng.integers(1, 12))).tolist()
        kept = int(rng.integers(0, len(drafted) + 1))
        found = run(session, drafted, list(range(len(drafted))))
        expected = run(read(engine, tokens), drafted, list(range(len(drafted))))
        np.testing.assert_array_equal(found, expected)
        session.commit(range(kept))
        tokens += drafted[:kept]
        if tokens and rng.random() < 0.4:
            session = session.fork()
    assert session.length == len(tokens)


def test_a_file_has_the_rows_that_are_read_again(engine: Engine, tmp_path: Path) -> None:
    """A part of a prompt was committed: more rows than a file holds after the window otherwise."""
    session, tokens = engine.open_session(), random_tokens(1, 30 + CHUNK)
    for chunk in (tokens[:30], tokens[30:]):
        half_committed(session, [*chunk, 1, 2, 3], len(chunk))
    session.save(tmp_path / "file")
    for other in (engine.load_session(tmp_path / "file"), session.fork(), session):
        np.testing.assert_array_equal(run(other, [5, 6], [0, 1]), run(read(engine, tokens), [5, 6], [0, 1]))


@pytest.mark.parametrize("read_tokens", [-1, 201, 10**30, None, "60"])
def test_a_file_whose_states_do_not_fit_its_rows_is_refused(engine: Engine, tmp_path: Path, read_tokens: Any) -> None:
    session = read(engine, random_tokens(2, 200))
    session.save(tmp_path / "file")
    assert engine.load_session(tmp_path / "file").length == 200
    hostile_header(tmp_path / "file", {"read": read_tokens})
    with pytest.raises(SessionFileError, match="damaged"):
        engine.load_session(tmp_path / "file")


def test_a_file_that_asks_for_more_rows_than_there_are_is_refused(bundle: Bundle, tmp_path: Path) -> None:
    """Rows before the window, or more than a forward reads."""
    engine = SimdEngine(bundle, threads=1)
    read(engine, random_tokens(2, 200)).save(tmp_path / "file")
    hostile_header(tmp_path / "file", {"read": 40})
    with pytest.raises(SessionFileError, match="rows from 128 on do not fit a sequence of 200 tokens"):
        engine.load_session(tmp_path / "file")
    session = read(engine, random_tokens(2, 50))
    half_committed(session, random_tokens(3, 121), 120)
    session.save(tmp_path / "file")
    assert engine.load_session(tmp_path / "file").length == 170
    engine.rows_of_one = 119
    with pytest.raises(SessionFileError, match="states behind 50 of 170 tokens"):
        engine.load_session(tmp_path / "file")
    engine.close()


def test_a_sequence_goes_back_to_a_snapshot_or_the_begin(engine: Engine) -> None:
    session, tokens = engine.open_session(), random_tokens(3, 100)
    half_committed(session, [*tokens[:40], 9], 40)
    session.snapshot()  # the states do not include 40 tokens: there is none to take
    fork = session.fork(39)
    np.testing.assert_array_equal(run(fork, [4], [0]), run(read(engine, tokens[:39]), [4], [0]))
    half_committed(session, tokens[40:60], 20)
    assert (session.rewind(59), session.length) == (0, 0)
    session = read(engine, tokens[:60])
    session.snapshot()
    half_committed(session, tokens[60:], 30)
    assert session.rewind(75) == 75
    np.testing.assert_array_equal(run(session, [4], [0]), run(read(engine, tokens[:75]), [4], [0]))
    session.commit([0])
    assert session.rewind(75) == 60
    np.testing.assert_array_equal(run(session, [4], [0]), run(read(engine, tokens[:60]), [4], [0]))


@pytest.mark.parametrize("reads_again", [False, True])
def test_an_interrupt_behind_a_forward_loses_states_that_it_replaced(
    bundle: Bundle, reads_again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens that are read again would be in the states twice. The session goes back to a snapshot, or the begin."""
    engine, tokens = SimdEngine(bundle, threads=1), random_tokens(7, 60)
    session = read(engine, tokens[:40])
    session.snapshot()
    run(session, tokens[40:], [])
    session.commit(range(20 - reads_again))
    compute = engine._target.run

    def interrupted(*arguments: Any) -> int:
        compute(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(engine._target, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(session, [5, 6, 7], [])
    monkeypatch.undo()
    if reads_again:
        for use in (lambda: run(session, [5], [0]), lambda: session.save("file")):
            with pytest.raises(ValueError, match="states were lost in an interrupt: rewind this session"):
                use()
        session.snapshot()
        assert session.fork().length == 40
        assert session.rewind(session.length) == 40
    kept = tokens[: session.length]
    assert session.length == (40 if reads_again else 60)
    np.testing.assert_array_equal(run(session, [5, 6], [0, 1]), run(read(engine, kept), [5, 6], [0, 1]))
    engine.close()


def test_rows_of_a_tree_have_the_states_of_their_ancestors(bundle: Bundle) -> None:
    engine, rng = SimdEngine(bundle, threads=2), np.random.default_rng(4)
    session, tokens = engine.open_session(), random_tokens(4, WINDOW + 5)
    half_committed(session, [*tokens, 1], len(tokens))
    for _ in range(6):
        tree = random_tree(rng, int(rng.integers(2, 14)))
        [outputs] = engine.forward([Rows(session, tree, range(len(tree)))])
        found = outputs.logits.copy()
        for row in range(len(tree)):
            path = path_to(tree, row)
            drafted = [int(tree.tokens[each]) for each in path]
            np.testing.assert_array_equal(run(read(engine, tokens), drafted, [len(path) - 1])[0], found[row])
        path = path_to(tree, int(rng.integers(len(tree))))
        session.commit(path)
        tokens = [*tokens, *(int(tree.tokens[each]) for each in path)]
    engine.close()


def test_rows_to_read_again_that_do_not_fit_beside_others(bundle: Bundle) -> None:
    """They read before it, in forwards of their own."""
    engine = SimdEngine(bundle, threads=1)
    most = engine.open_session().max_rows()
    tokens = [random_tokens(seed, most - 1) for seed in (5, 6)]
    sessions = [engine.open_session() for _ in tokens]
    for session, each in zip(sessions, tokens, strict=True):
        half_committed(session, [*each, 1], len(each))
        assert len(session.unread) == most - 1
    outputs = engine.forward([Rows(session, TokenTree.chain([7, 8]), [1]) for session in sessions])
    for each, found in zip(tokens, outputs, strict=True):
        np.testing.assert_array_equal(run(read(engine, each), [7, 8], [1]), found.logits)
    engine.close()


def test_what_states_cannot_do_is_refused(bundle: Bundle) -> None:
    with ondevice.load(bundle.path, engine="simd", threads=1) as model:
        session = model.engine.open_session()
        rows = Rows(session, TokenTree.chain([1]), [0], LayerPath(stop=1))
        with pytest.raises(ValueError, match="rows of a model with states pass all layers"):
            model.engine.forward([rows])
        with pytest.raises(OndeviceError, match="has states"):
            model.generate([1, 2, 3], max_new_tokens=4, drafter="self")


@pytest.mark.needs("onnxruntime")
def test_trees_are_not_for_onnx_runtime(bundle: Bundle) -> None:
    with ondevice.load(bundle.path, engine="ort", threads=1) as model:
        session = model.engine.open_session()
        tree = TokenTree(np.array([1, 2]), np.array([-1, -1]))
        with pytest.raises(ValueError, match="are a chain on the ort engine"):
            model.engine.forward([Rows(session, tree, [0])])
        plain = model.generate([1, 2, 3, 1, 2, 3, 1, 2], max_new_tokens=12, drafter="none")
        assert model.generate([1, 2, 3, 1, 2, 3, 1, 2], max_new_tokens=12, drafter="ngram").token_ids == plain.token_ids
