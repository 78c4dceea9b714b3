"""A row's result is the same, bit for bit, whatever other rows the forward has. Lossless drafting depends on this."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ondevice.bundle import Bundle
from ondevice.engines.ort import OrtEngine, OrtSession
from ondevice.engines.protocol import ROOT, TokenTree
from ondevice_export import export
from tests.conftest import REFERENCE
from tests.engines.sequences import copied, drafts, forward, prefill, tokens
from tests.fixtures.mxfp4 import save_in_mxfp4

PROMPT = 330
"""Number of tokens before the rows under test, beyond the reference pair's window of 256."""

ROUNDING = 1e-4
"""Tolerance for logits of a branch in float32: an additional key between two others regroups the engine's sums.
With quantised weights, an activation near the middle of two int8 steps may then round to the other one, and logits
differ by 0.05."""


@pytest.fixture(scope="module")
def session(reference_bundle: Path) -> Iterator[OrtSession]:
    engine = OrtEngine(Bundle.open(reference_bundle), threads=2)
    yield engine.open_session()
    engine.close()


@pytest.fixture(scope="module", params=["int4-affine", "int4-table", "mxfp4"])
def session_of_format(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OrtSession]:
    directory = tmp_path_factory.mktemp(request.param)
    if request.param == "mxfp4":
        bundle = export(save_in_mxfp4(REFERENCE / "target", directory / "target"), directory / "reference")
    else:
        bundle = export(REFERENCE / "target", directory / "reference", quantize=request.param, head_bits=4)
    engine = OrtEngine(Bundle.open(bundle), threads=2)
    yield engine.open_session()
    engine.close()


@pytest.fixture(scope="module")
def float_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OrtSession]:
    bundle = export(REFERENCE / "target", tmp_path_factory.mktemp("float32") / "reference", quantize="none")
    engine = OrtEngine(Bundle.open(bundle), threads=2)
    yield engine.open_session()
    engine.close()


def one_by_one(session: OrtSession, length: int, path: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Outputs of the last token of `path`, decoded one token at a time after `length` committed tokens.

    The session is rewound to `length` afterwards.
    """
    for token in path:
        outputs = copied(forward(session, [token], [0]))
        session.commit([0])
    assert session.rewind(length) == length
    return outputs


@pytest.mark.parametrize("length", [1, 61, 120, 255, 256, PROMPT, 900])
def test_a_verified_chain_equals_plain_decoding(session: OrtSession, length: int) -> None:
    assert_a_chain_is_plain_decoding(session, length)


@pytest.mark.parametrize("length", [1, 61, PROMPT])
def test_a_verified_chain_of_other_formats_equals_plain_decoding(session_of_format: OrtSession, length: int) -> None:
    """Minimums are multiplied in floats, in which ONNX Runtime rounds a single row differently; levels of a table as
    weights of 8 bits.
    """
    assert_a_chain_is_plain_decoding(session_of_format, length)


def assert_a_chain_is_plain_decoding(session: OrtSession, length: int) -> None:
    prefill(session, tokens(length))
    draft = tokens(8, seed=1)
    logits, hidden = copied(forward(session, draft, range(8)))
    for row in range(8):
        alone = one_by_one(session, length, draft[: row + 1])
        np.testing.assert_array_equal(logits[row], alone[0][0])
        np.testing.assert_array_equal(hidden[row], alone[1][0])


@pytest.mark.parametrize("seed", range(6))
def test_every_node_of_a_random_tree_agrees_with_plain_decoding(float_session: OrtSession, seed: int) -> None:
    rng = np.random.default_rng(seed)
    length = int(rng.integers(1, 700))
    prefill(float_session, tokens(length, seed))
    count = int(rng.integers(2, 13))
    parents = np.array([rng.integers(ROOT, row) if row else ROOT for row in range(count)], np.int64)
    tree = TokenTree(np.array(tokens(count, seed + 100), np.int64), parents)
    logits, _ = copied(forward(float_session, tree, range(count)))
    for row in range(count):
        path: list[int] = []
        node = row
        while node != ROOT:
            path.insert(0, int(tree.tokens[node]))
            node = int(parents[node])
        np.testing.assert_allclose(logits[row], one_by_one(float_session, length, path)[0][0], rtol=0, atol=ROUNDING)


def test_a_committed_branch_leaves_the_cache_of_plain_decoding(float_session: OrtSession) -> None:
    prefill(float_session, tokens(PROMPT))
    tree = TokenTree(np.array([10, 11, 12, 13, 14], np.int64), np.array([ROOT, 0, 0, 2, 3], np.int64))
    forward(float_session, tree, [4])
    float_session.commit([0, 2, 3, 4])
    after_tree, _ = copied(forward(float_session, [15], [0]))
    prefill(float_session, [*tokens(PROMPT), 10, 12, 13, 14])
    after_chain, _ = copied(forward(float_session, [15], [0]))
    np.testing.assert_allclose(after_tree, after_chain, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("chunk", [1, 7, 256])
def test_the_prompt_s_chunks_do_not_show(session: OrtSession, chunk: int) -> None:
    outcomes = []
    for size in (64, chunk):
        prefill(session, tokens(PROMPT), size)
        outcomes.append(copied(forward(session, [5], [0]))[0])
    np.testing.assert_array_equal(outcomes[0], outcomes[1])


def test_the_thread_count_does_not_show(session: OrtSession, reference_bundle: Path) -> None:
    single = OrtEngine(Bundle.open(reference_bundle), threads=1)
    outcomes = []
    for each in (session, single.open_session()):
        prefill(each, tokens(PROMPT))
        outcomes.append(copied(forward(each, tokens(6), range(6)))[0])
    single.close()
    np.testing.assert_array_equal(outcomes[0], outcomes[1])


@pytest.mark.parametrize("wanted", [[0], [2, 3], [0, 4]])
def test_unwanted_rows_do_not_show(session: OrtSession, wanted: list[int]) -> None:
    prefill(session, tokens(PROMPT))
    chain = TokenTree.chain(tokens(5))
    every, _ = copied(forward(session, chain, range(5)))
    some, _ = copied(forward(session, chain, wanted))
    np.testing.assert_array_equal(some, every[wanted])


@pytest.mark.parametrize("length", [100, PROMPT, 900])
def test_a_draft_after_a_rejection_equals_one_after_a_fresh_prefill(session: OrtSession, length: int) -> None:
    """Rejected rows must be removed before the next round drafts, both below the window's length and beyond it."""
    ids = tokens(length)
    prefill(session, ids)
    forward(session, tokens(6, seed=2), range(6))
    session.commit([0, 1])
    outputs = forward(session, tokens(6, seed=3), range(6))
    hidden = outputs.hidden[0].copy()
    session.commit([0])
    kept = [*ids, *tokens(6, seed=2)[:2], tokens(6, seed=3)[0]]
    rejected = drafts(session, hidden)
    prefill(session, kept)
    fresh = drafts(session, hidden)
    for one, other in zip(rejected, fresh, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_rewind_past_the_window_s_memory_starts_over(session: OrtSession) -> None:
    prefill(session, tokens(1900))
    assert session.rewind(1850) == 1850
    assert session.rewind(10) == 0
    with pytest.raises(ValueError, match="rewind"):
        session.rewind(11)


def test_rows_that_do_not_fit_are_refused(session: OrtSession) -> None:
    session.rewind(0)
    with pytest.raises(ValueError, match="do not fit"):
        forward(session, tokens(session.max_rows() + 1), [0])
    forward(session, [5, 6, 7], [0])
    for path in ([3], [1, 0], [0, 0], [-1]):
        with pytest.raises(ValueError, match="not a path"):
            session.commit(path)
