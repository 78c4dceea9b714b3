"""The sequence logic that both engines' sessions share: commit, rewind, snapshots, forks and files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ondevice.engines import sequence
from ondevice.engines.kv_cache import MARGIN, SLACK
from ondevice.engines.protocol import ROOT, Rows, TokenTree
from ondevice.engines.session_file import MAGIC
from ondevice.errors import SessionFileError, UsageError
from tests.fixtures.toy_engine import VOCAB, WINDOW, ToyEngine, ToySession, logits_after

LONG = 5 * (WINDOW + SLACK)


def ids(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, count).tolist()


def extend(session: ToySession, tokens: list[int]) -> None:
    """Run and commit tokens in chunks, as a prefill does."""
    while tokens:
        part, tokens = tokens[: session.max_rows()], tokens[session.max_rows() :]
        session.engine.forward([Rows(session, TokenTree.chain(part), [len(part) - 1])])
        session.commit(range(len(part)))


def check(session: ToySession, tokens: list[int]) -> None:
    """Assert that the session has these tokens and gives the right next logits."""
    assert list(session.tokens) == tokens == session.held()
    assert session.length == len(tokens)
    outputs = session.engine.forward([Rows(session, TokenTree.chain([7]), [0])])[0]
    np.testing.assert_array_equal(outputs.logits[0], logits_after([*tokens, 7]))


@pytest.fixture
def session() -> ToySession:
    return ToyEngine().open_session()


def test_a_path_of_a_tree_is_committed(session: ToySession) -> None:
    extend(session, ids(20))
    tree = TokenTree(np.array([1, 2, 3, 4, 5]), np.array([ROOT, 0, 0, 2, 1]))
    session.engine.forward([Rows(session, tree, [4])])
    session.commit([0, 2, 3])
    check(session, [*ids(20), 1, 3, 4])


@pytest.mark.parametrize("path", [[1], [0, 1, 2], [0, 0], [2, 0], [0, 5], [-1]])
def test_only_a_path_can_be_committed(session: ToySession, path: list[int]) -> None:
    tree = TokenTree(np.array([1, 2, 3, 4, 5]), np.array([ROOT, 0, 0, 2, 1]))
    session.engine.forward([Rows(session, tree, [4])])
    with pytest.raises(ValueError, match="not a path"):
        session.commit(path)


def test_nothing_can_be_committed_twice(session: ToySession) -> None:
    extend(session, [1])
    with pytest.raises(ValueError, match="not a path"):
        session.commit([0])


def test_a_rewind_goes_back_as_far_as_sliding_layers_can(session: ToySession) -> None:
    tokens = ids(LONG)
    extend(session, tokens)
    assert session.rewind(LONG - SLACK // 2) == LONG - SLACK // 2
    check(session, tokens[: LONG - SLACK // 2])
    assert session.rewind(WINDOW) == 0
    check(session, [])
    with pytest.raises(ValueError, match="cannot rewind to 1 from 0"):
        session.rewind(1)


@pytest.mark.parametrize("back", [0, 1, MARGIN])
def test_a_rewind_goes_back_to_a_snapshot(session: ToySession, back: int) -> None:
    tokens, boundary = ids(LONG), LONG // 2
    extend(session, tokens[:boundary])
    session.snapshot()
    extend(session, tokens[boundary:])
    assert session.rewind(boundary - back) == boundary - back
    check(session, tokens[: boundary - back])
    extend(session, ids(LONG, 1))
    check(session, [*tokens[: boundary - back], *ids(LONG, 1)])


def test_a_rewind_to_where_no_snapshot_is_goes_to_the_one_before(session: ToySession) -> None:
    tokens = ids(3 * LONG)
    for boundary in (LONG, 2 * LONG, 3 * LONG):
        extend(session, tokens[session.length : boundary])
        session.snapshot()
        session.snapshot()  # the same position again: no second snapshot is stored
    assert session.rewind(2 * LONG - MARGIN - 1) == LONG
    check(session, tokens[:LONG])
    assert session.rewind(LONG - MARGIN - 1) == 0


def test_snapshots_are_bounded_in_number_and_bytes(session: ToySession, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = session.nbytes
    for index in range(sequence.SNAPSHOTS + 5):
        extend(session, ids(100, index))
        session.snapshot()
    lengths = [kept.length for kept in session._snapshots]
    assert lengths == [100 * (index + 1) for index in range(5, sequence.SNAPSHOTS + 5)]
    one = session._snapshots[-1].nbytes
    assert session.nbytes >= empty + sequence.SNAPSHOTS * one
    monkeypatch.setattr(sequence, "SNAPSHOT_BYTES", 3 * one)
    extend(session, ids(100))
    session.snapshot()
    assert len(session._snapshots) == 3


@pytest.mark.parametrize("length", [None, 0, 1, 500, LONG // 2, LONG - 1])
def test_a_fork_and_its_origin_go_their_own_ways(session: ToySession, length: int | None) -> None:
    tokens = ids(LONG)
    extend(session, tokens[: LONG // 2])
    session.snapshot()
    extend(session, tokens[LONG // 2 :])
    fork = session.fork(length)
    wanted = LONG if length is None else length
    reached = wanted if wanted > LONG - SLACK // 2 or wanted == LONG // 2 else 0
    check(fork, tokens[:reached])
    extend(fork, ids(LONG, 1))
    extend(session, ids(LONG, 2))
    check(fork, [*tokens[:reached], *ids(LONG, 1)])
    check(session, [*tokens, *ids(LONG, 2)])
    fork.close()
    check(session, [*tokens, *ids(LONG, 2)])


def test_a_sequence_survives_on_disk(session: ToySession, tmp_path: Path) -> None:
    path = tmp_path / "prompt.session"
    for length in (3, LONG):
        session.rewind(0)
        extend(session, ids(length))
        session.save(path)
        check(session.engine.load_session(path), ids(length))
        check(session, ids(length))
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def damaged(data: bytes, index: int) -> bytes:
    return data[:index] + bytes([data[index] ^ 1]) + data[index + 1 :]


def with_header(data: bytes, **changes: Any) -> bytes:
    """The file with changed header fields and a corrected header size."""
    start = len(MAGIC) + 12
    size = int.from_bytes(data[len(MAGIC) + 4 : start], "little")
    header = json.dumps({**json.loads(data[start : start + size]), **changes}).encode()
    return data[: len(MAGIC) + 4] + len(header).to_bytes(8, "little") + header + data[start + size :]


def test_a_damaged_file_is_refused(session: ToySession, tmp_path: Path) -> None:
    path = tmp_path / "prompt.session"
    extend(session, ids(700))
    session.save(path)
    data = path.read_bytes()
    rng = np.random.default_rng(0)
    for index in [*range(60), *rng.integers(0, len(data), 40).tolist(), len(data) - 1]:
        path.write_bytes(damaged(data, index))
        with pytest.raises(SessionFileError, match=r"prompt\.session cannot be loaded: it "):
            session.engine.load_session(path)
    for wrong in (b"", data[:100], data[:-1], data + b"x", bytes(1000)):
        path.write_bytes(wrong)
        with pytest.raises(SessionFileError, match="it is damaged"):
            session.engine.load_session(path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"content": "other"}, "it belongs to another bundle"),
        ({"engine": "simd"}, "of the simd engine with a none KV cache, and this is toy with none"),
        ({"kv_cache": "int8"}, "int8 KV cache"),
        ({"tokens": [1] * 701}, "damaged"),
        ({"tokens": []}, "it has 0 tokens"),
        ({"tokens": [VOCAB] * 700}, "damaged"),
        ({"tokens": [True] * 700}, "damaged"),
        ({"tokens": "x" * 700}, "damaged"),
        ({"tokens": [1] * 20_000}, "it has 20000 tokens, and here a sequence has 1 to 9999"),
        ({"bases": {"full": 0, "sliding": 0}}, "damaged"),
        ({"bases": {"full": 1, "sliding": 620}}, "damaged"),
        ({"bases": {"full": 0, "sliding": 699}}, "damaged"),
        ({"bases": {"full": 0, "sliding": -5}}, "damaged"),
        ({"bases": []}, "damaged"),
    ],
)
def test_a_foreign_file_is_refused(session: ToySession, tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    path = tmp_path / "prompt.session"
    extend(session, ids(700))
    session.save(path)
    path.write_bytes(with_header(path.read_bytes(), **changes))
    with pytest.raises(SessionFileError, match=words):
        session.engine.load_session(path)


def test_a_version_of_tomorrow_is_refused(session: ToySession, tmp_path: Path) -> None:
    path = tmp_path / "prompt.session"
    extend(session, ids(7))
    session.save(path)
    data = path.read_bytes()
    path.write_bytes(data[: len(MAGIC)] + bytes([9]) + data[len(MAGIC) + 1 :])
    with pytest.raises(SessionFileError, match="version 9"):
        session.engine.load_session(path)


def test_no_file_and_no_room_for_one(session: ToySession, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="an empty sequence cannot be saved"):
        session.save(tmp_path / "prompt.session")
    extend(session, [1])
    with pytest.raises(FileNotFoundError):
        session.engine.load_session(tmp_path / "nothing")
    with pytest.raises(SessionFileError, match="not a file"):
        session.engine.load_session(tmp_path)
    with pytest.raises(FileNotFoundError):
        session.save(tmp_path / "nowhere" / "prompt.session")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no named pipes")
def test_a_pipe_or_a_device_is_not_replaced(session: ToySession, tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    extend(session, ids(30))
    with pytest.raises(FileExistsError, match="not a file"):
        session.save(path)
    assert path.is_fifo()


def test_a_failed_save_leaves_the_old_file(
    session: ToySession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "prompt.session"
    extend(session, ids(30))
    session.save(path)
    before = path.read_bytes()
    extend(session, ids(30))

    def full(_: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="no space"):
        session.save(path)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_depths_and_ancestors_of_a_tree() -> None:
    """The tree has rows 0 -> 1 -> 2 and 1 -> 3, and row 4 directly after the cache; chains have their own code path."""
    tree = TokenTree(np.arange(5), np.array([ROOT, 0, 1, 1, ROOT]))
    assert tree.depths().tolist() == [0, 1, 2, 2, 0]
    assert [np.flatnonzero(row).tolist() for row in tree.ancestors()] == [[0], [0, 1], [0, 1, 2], [0, 1, 3], [4]]
    chain = TokenTree.chain([7, 7, 7])
    assert chain.depths().tolist() == [0, 1, 2]
    assert chain.ancestors().sum(axis=1).tolist() == [1, 2, 3]


@pytest.mark.parametrize("parents", [[ROOT, 1], [ROOT, 2], [ROOT, -2], [0], []])
def test_parents_must_be_earlier_rows(parents: list[int]) -> None:
    with pytest.raises(ValueError, match="parent"):
        TokenTree(np.zeros(len(parents), np.int64), np.array(parents, np.int64))


def test_a_closed_session_says_so(session: ToySession, tmp_path: Path) -> None:
    extend(session, [1, 2])
    session.close()
    session.close()
    uses: list[Callable[[], object]] = [
        lambda: session.commit([0]), lambda: session.rewind(0), session.snapshot, session.fork,
        lambda: session.save(tmp_path / "x"),
        lambda: session.engine.forward([Rows(session, TokenTree.chain([1]), [0])]),
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(UsageError, match="this session is closed"):
            use()
