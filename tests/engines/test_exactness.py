"""A row's result is the same, bit for bit, whatever runs beside it. The promise that lossless drafting rests on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ondevice.bundle import Bundle
from ondevice.engines.ort import OrtEngine
from ondevice.engines.protocol import ROOT, Outputs, TokenTree
from ondevice_export import export
from tests.conftest import REFERENCE

PROMPT = 330
"""Tokens before the rows under test: past the reference pair's window of 256."""

ROUNDING = 1e-4
"""Logits of a branch may differ so much, in float32: a key more or less between two others regroups the engine's sums.
Quantised, an activation near the middle of two int8 steps then falls to the other side, and logits differ by 0.05."""


@pytest.fixture(scope="module")
def engine(reference_bundle: Path) -> Iterator[OrtEngine]:
    made = OrtEngine(Bundle.open(reference_bundle), threads=2)
    yield made
    made.close()


@pytest.fixture(scope="module")
def float_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OrtEngine]:
    bundle = export(REFERENCE / "target", tmp_path_factory.mktemp("float32") / "reference", quantize="none")
    made = OrtEngine(Bundle.open(bundle), threads=2)
    yield made
    made.close()


def tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(6, 4096, size=count).tolist()


def prefill(engine: OrtEngine, ids: list[int], chunk: int = 64) -> None:
    engine.rewind(0)
    for start in range(0, len(ids), chunk):
        part = ids[start : start + chunk]
        engine.forward(TokenTree.chain(part), [len(part) - 1])
        engine.commit(range(len(part)))


def copied(outputs: Outputs) -> tuple[np.ndarray, np.ndarray]:
    return outputs.logits.copy(), outputs.hidden.copy()


def one_by_one(engine: OrtEngine, length: int, path: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Outputs of the last token of `path`, decoded plainly after `length` committed tokens; leaves no trace."""
    for token in path:
        outputs = copied(engine.forward(TokenTree.chain([token]), [0]))
        engine.commit([0])
    assert engine.rewind(length) == length
    return outputs


@pytest.mark.parametrize("length", [1, 61, 120, 255, 256, PROMPT, 900])
def test_a_verified_chain_equals_plain_decoding(engine: OrtEngine, length: int) -> None:
    prefill(engine, tokens(length))
    draft = tokens(8, seed=1)
    logits, hidden = copied(engine.forward(TokenTree.chain(draft), range(8)))
    for row in range(8):
        alone = one_by_one(engine, length, draft[: row + 1])
        np.testing.assert_array_equal(logits[row], alone[0][0])
        np.testing.assert_array_equal(hidden[row], alone[1][0])


@pytest.mark.parametrize("seed", range(6))
def test_every_node_of_a_random_tree_agrees_with_plain_decoding(float_engine: OrtEngine, seed: int) -> None:
    rng = np.random.default_rng(seed)
    length = int(rng.integers(1, 700))
    prefill(float_engine, tokens(length, seed))
    count = int(rng.integers(2, 13))
    parents = np.array([rng.integers(ROOT, row) if row else ROOT for row in range(count)], np.int64)
    tree = TokenTree(np.array(tokens(count, seed + 100), np.int64), parents)
    logits, _ = copied(float_engine.forward(tree, range(count)))
    for row in range(count):
        path, node = [], row
        while node != ROOT:
            path.insert(0, int(tree.tokens[node]))
            node = int(parents[node])
        np.testing.assert_allclose(logits[row], one_by_one(float_engine, length, path)[0][0], rtol=0, atol=ROUNDING)


def test_a_committed_branch_leaves_the_cache_of_plain_decoding(float_engine: OrtEngine) -> None:
    prefill(float_engine, tokens(PROMPT))
    tree = TokenTree(np.array([10, 11, 12, 13, 14], np.int64), np.array([ROOT, 0, 0, 2, 3], np.int64))
    float_engine.forward(tree, [4])
    float_engine.commit([0, 2, 3, 4])
    after_tree, _ = copied(float_engine.forward(TokenTree.chain([15]), [0]))
    prefill(float_engine, [*tokens(PROMPT), 10, 12, 13, 14])
    after_chain, _ = copied(float_engine.forward(TokenTree.chain([15]), [0]))
    np.testing.assert_allclose(after_tree, after_chain, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("chunk", [1, 7, 256])
def test_the_prompt_s_chunks_do_not_show(engine: OrtEngine, chunk: int) -> None:
    outcomes = []
    for size in (64, chunk):
        prefill(engine, tokens(PROMPT), size)
        outcomes.append(copied(engine.forward(TokenTree.chain([5]), [0]))[0])
    np.testing.assert_array_equal(*outcomes)


def test_the_thread_count_does_not_show(engine: OrtEngine, reference_bundle: Path) -> None:
    single = OrtEngine(Bundle.open(reference_bundle), threads=1)
    outcomes = []
    for each in (engine, single):
        prefill(each, tokens(PROMPT))
        outcomes.append(copied(each.forward(TokenTree.chain(tokens(6)), range(6)))[0])
    single.close()
    np.testing.assert_array_equal(*outcomes)


@pytest.mark.parametrize("wanted", [[0], [2, 3], [0, 4]])
def test_unwanted_rows_do_not_show(engine: OrtEngine, wanted: list[int]) -> None:
    prefill(engine, tokens(PROMPT))
    chain = TokenTree.chain(tokens(5))
    every, _ = copied(engine.forward(chain, range(5)))
    some, _ = copied(engine.forward(chain, wanted))
    np.testing.assert_array_equal(some, every[wanted])


@pytest.mark.parametrize("length", [100, PROMPT, 900])
def test_a_draft_after_a_rejection_equals_one_after_a_fresh_prefill(engine: OrtEngine, length: int) -> None:
    """Rejected rows must be gone before the next round drafts, below the window and past it."""
    ids = tokens(length)
    prefill(engine, ids)
    engine.forward(TokenTree.chain(tokens(6, seed=2)), range(6))
    engine.commit([0, 1])
    outputs = engine.forward(TokenTree.chain(tokens(6, seed=3)), range(6))
    hidden = outputs.hidden[0].copy()
    engine.commit([0])
    kept = [*ids, *tokens(6, seed=2)[:2], tokens(6, seed=3)[0]]
    rejected = draft(engine, hidden)
    prefill(engine, kept)
    fresh = draft(engine, hidden)
    for one, other in zip(rejected, fresh, strict=True):
        np.testing.assert_array_equal(one, other)


def draft(engine: OrtEngine, hidden: np.ndarray) -> list[np.ndarray]:
    """Candidates and logits of three steps."""
    token = 9
    found = []
    for _ in range(3):
        step = engine.draft_step(token, hidden)
        found += [step.candidates, step.logits]
        token, hidden = int(step.candidates[step.logits.argmax()]), step.hidden
    return found


def test_a_rewind_past_the_window_s_memory_starts_over(engine: OrtEngine) -> None:
    prefill(engine, tokens(1900))
    assert engine.rewind(1850) == 1850
    assert engine.rewind(10) == 0
    with pytest.raises(ValueError, match="rewind"):
        engine.rewind(11)


def test_rows_that_do_not_fit_are_refused(engine: OrtEngine) -> None:
    engine.rewind(0)
    with pytest.raises(ValueError, match="do not fit"):
        engine.forward(TokenTree.chain(tokens(engine.max_rows() + 1)), [0])
    engine.forward(TokenTree.chain([5, 6, 7]), [0])
    for path in ([3], [1, 0], [0, 0], [-1]):
        with pytest.raises(ValueError, match="not rows"):
            engine.commit(path)
