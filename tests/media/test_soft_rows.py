"""Rows that come with embeddings instead of ids: as transformers computes them, and alike however they are run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ondevice.bundle import Bundle
from ondevice.engines.choice import open_engine
from ondevice.engines.protocol import AttentionOptions, Engine, Rows, Session, TokenTree
from tests.conftest import ENGINES
from tests.fixtures.tiny_models import BEGIN, END, IMAGE, VOCAB

RNG = np.random.default_rng(3)
SOFT = 30
"""Soft rows of the prompt, more than the window of 16."""
EMBEDDINGS = RNG.normal(0, 1.0, (SOFT, 64)).astype(np.float32)
BEFORE, AFTER = RNG.integers(20, 300, 9).tolist(), RNG.integers(20, 300, 11).tolist()
VIRTUAL = RNG.integers(-(1 << 63), 0, SOFT).tolist()
PROMPT = [*BEFORE, BEGIN, *VIRTUAL, END, *AFTER]
FIRST = len(BEFORE) + 1
"""Position of the first soft row."""


@pytest.fixture(scope="module", params=ENGINES)
def engine_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def opened(bundle: Bundle, name: Any) -> Engine:
    return open_engine(name, bundle, 2, None, kv_cache="fp16", attention=AttentionOptions())


@pytest.fixture(scope="module")
def engine(seeing: dict[tuple[str, str], Bundle], family: str, engine_name: str) -> Iterator[Engine]:
    made = opened(seeing[family, "int8"], engine_name)
    yield made
    made.close()


def rows_of(
    session: Session, tokens: Sequence[int], wanted: Sequence[int], embeddings: np.ndarray = EMBEDDINGS
) -> Rows:
    """The next tokens of the prompt, with the embeddings of those that are soft."""
    first, count = max(0, session.length - FIRST), sum(token < 0 for token in tokens)
    return Rows(session, TokenTree.chain(tokens), wanted, soft=embeddings[first : first + count] if count else None)


def read(engine: Engine, tokens: Sequence[int], chunk: int) -> tuple[Session, np.ndarray]:
    """A session that has read the prompt in chunks, and the logits of all its rows."""
    session, logits = engine.open_session(), []
    while session.length < len(tokens):
        part = tokens[session.length : session.length + chunk]
        (outputs,) = engine.forward([rows_of(session, part, range(len(part)))])
        logits.append(outputs.logits.copy())
        session.commit(range(len(part)))
    return session, np.concatenate(logits)


@pytest.fixture(scope="module")
def floats(seeing: dict[tuple[str, str], Bundle], family: str) -> Iterator[Engine]:
    made = opened(seeing[family, "none"], "ort")
    yield made
    made.close()


@pytest.mark.needs("oracle", "onnxruntime")
def test_float_weights_give_the_logits_of_transformers(floats: Engine, oracle: Any) -> None:
    """Including the per-layer embeddings at soft rows: those of padding, whose id is not 0 here."""
    import torch
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    ids = torch.tensor([[IMAGE if token < 0 else token for token in PROMPT]])
    with torch.no_grad():
        given = BaseModelOutputWithPooling(pooler_output=(torch.tensor(EMBEDDINGS),))
        expected = oracle(ids, mm_encoder_outputs={"image": given}).logits[0].numpy()
    np.testing.assert_allclose(read(floats, PROMPT, 13)[1], expected, atol=1e-4, rtol=0)


def test_quantised_weights_are_close(engine: Engine, floats: Engine) -> None:
    """At soft rows as at text rows: an embedding in the wrong place, or scaled, or with other per-layer embeddings, is
    far off.
    """
    found, expected = (read(each, PROMPT, len(PROMPT))[1] for each in (engine, floats))
    errors = np.sqrt(((found - expected) ** 2).mean(axis=1) / (expected**2).mean(axis=1))
    text = np.delete(np.arange(len(PROMPT)), np.s_[FIRST : FIRST + SOFT])
    assert errors[FIRST : FIRST + SOFT].mean() < 2 * errors[text].mean() < 0.3, errors


def test_chunks_change_no_bit(engine: Engine) -> None:
    whole = read(engine, PROMPT, len(PROMPT))[1]
    for chunk in (1, 7, 20):
        np.testing.assert_array_equal(read(engine, PROMPT, chunk)[1], whole)


@pytest.mark.needs("onnxruntime")
def test_a_single_soft_row_that_is_run_twice(seeing: dict[tuple[str, str], Bundle], family: str) -> None:
    """As on CPUs where ONNX Runtime adds up a single row in another order."""
    engine: Any = opened(seeing[family, "int8"], "ort")
    whole = read(engine, PROMPT, len(PROMPT))[1]
    engine.pads_single_rows = True
    np.testing.assert_array_equal(read(engine, PROMPT, 1)[1], whole)
    engine.close()


def test_the_embeddings_count_and_the_numbers_do_not(engine: Engine) -> None:
    def logits(tokens: Sequence[int], embeddings: np.ndarray) -> np.ndarray:
        session = engine.open_session()
        return engine.forward([rows_of(session, tokens, range(len(tokens)), embeddings)])[0].logits.copy()

    plain = logits(PROMPT, EMBEDDINGS)
    renamed = [token - 1 if token < 0 else token for token in PROMPT]
    np.testing.assert_array_equal(logits(renamed, EMBEDDINGS), plain)
    changed = EMBEDDINGS.copy()
    changed[7] += 0.5
    other = logits(PROMPT, changed)
    np.testing.assert_array_equal(other[: FIRST + 7], plain[: FIRST + 7])
    assert (other[FIRST + 7 :] != plain[FIRST + 7 :]).any(axis=1).all()


def test_text_and_soft_rows_share_a_forward(engine: Engine) -> None:
    text = RNG.integers(20, 300, 25).tolist()
    alone = [read(engine, each, len(each))[1] for each in (PROMPT, text)]
    sessions = [engine.open_session() for _ in range(3)]
    batch = [
        rows_of(sessions[0], PROMPT, range(len(PROMPT))),
        Rows(sessions[1], TokenTree.chain(text), range(len(text))),
        rows_of(sessions[2], PROMPT[:20], [19], EMBEDDINGS + 1),
    ]
    found = engine.forward(batch)
    np.testing.assert_array_equal(found[0].logits, alone[0])
    np.testing.assert_array_equal(found[1].logits, alone[1])
    assert (found[2].logits[0] != alone[0][19]).any()


def test_drafts_fork_and_rewind_behind_soft_rows(engine: Engine, tmp_path: Path) -> None:
    session, _ = read(engine, PROMPT, len(PROMPT))
    draft = [5, 7, 9, 30]

    def verified(which: Session) -> np.ndarray:
        (outputs,) = engine.forward([Rows(which, TokenTree.chain(draft), range(4))])
        return outputs.logits.copy()

    whole = verified(session)
    session.save(tmp_path / "session")
    loaded = engine.load_session(tmp_path / "session")
    assert list(loaded.tokens) == list(session.tokens) == PROMPT
    for other in (session.fork(), loaded):
        np.testing.assert_array_equal(verified(other), whole)
    for row, token in enumerate(draft):
        (outputs,) = engine.forward([Rows(session, TokenTree.chain([token]), [0])])
        np.testing.assert_array_equal(outputs.logits[0], whole[row])
        session.commit([0])
    length = FIRST + SOFT // 2  # within the picture
    reached = session.rewind(length)
    part = PROMPT[reached:]
    engine.forward([rows_of(session, part, [len(part) - 1])])
    session.commit(range(len(part)))
    np.testing.assert_array_equal(verified(session), whole)


def test_wrong_soft_rows_are_refused(engine: Engine) -> None:
    session = engine.open_session()
    tree = TokenTree.chain([3, -5, -6])
    wrong: list[Any] = [None, EMBEDDINGS[:1], EMBEDDINGS[:3], EMBEDDINGS[:2, :-1], EMBEDDINGS[:2].astype(np.float64)]
    for soft in wrong:
        with pytest.raises(ValueError, match=r"must be within|have embeddings"):
            engine.forward([Rows(session, tree, [0], soft=soft)])
    with pytest.raises(ValueError, match="must be within"):
        engine.forward([Rows(session, TokenTree.chain([VOCAB, -5, -6]), [0], soft=EMBEDDINGS[:2])])
