"""Pictures whose tokens see each other in sliding layers (12B, 26B-A4B, 31B): as transformers computes them, and alike
however they are run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ondevice.bundle import Bundle
from ondevice.engines.choice import open_engine
from ondevice.engines.kv_cache import attention_mask
from ondevice.engines.ort import OrtEngine
from ondevice.engines.protocol import AttentionOptions, Engine, Rows, Session, TokenTree
from ondevice.engines.simd.caches import LookupSettings
from ondevice.engines.simd.engine import SimdEngine
from tests.conftest import ENGINES
from tests.fixtures.tiny_models import BEGIN, BLOCKWISE, END, IMAGE, WINDOW
from tests.media.towers import reference_model

RNG = np.random.default_rng(3)
SIZES = (2 * WINDOW, 7, 1)
"""Soft rows of each picture. The first one is wider than the window; the second and third are side by side."""
EMBEDDINGS = RNG.normal(0, 1.0, (sum(SIZES), 64)).astype(np.float32)
TEXT = [RNG.integers(20, 300, count).tolist() for count in (9, 3, 11)]
SOFT = [RNG.integers(-(1 << 63), 0, count).tolist() for count in SIZES]
PROMPT = [
    *TEXT[0], BEGIN, *SOFT[0], END, *TEXT[1], BEGIN, *SOFT[1], END, BEGIN, *SOFT[2], END, *TEXT[2]
]  # fmt: skip
BLOCKS = [(begin := PROMPT.index(soft[0]), begin + len(soft)) for soft in SOFT]
WHOLE = len(PROMPT)


@pytest.fixture(scope="session", params=BLOCKWISE)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def oracle(checkpoints: dict[str, Path], family: str) -> Any:
    return reference_model(checkpoints[family], family)


def opened(bundle: Bundle, name: Any) -> Engine:
    return open_engine(name, bundle, 2, None, kv_cache="fp16", attention=AttentionOptions())


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest, seeing: dict[tuple[str, str], Bundle], family: str) -> Iterator[Engine]:
    made = opened(seeing[family, "int8"], request.param)
    yield made
    made.close()


@pytest.fixture(scope="module")
def floats(seeing: dict[tuple[str, str], Bundle], family: str) -> Iterator[Engine]:
    made = opened(seeing[family, "none"], "ort")
    yield made
    made.close()


def rows_of(session: Session, stop: int, embeddings: np.ndarray = EMBEDDINGS, *, blocks: bool = True) -> Rows:
    """The prompt's next tokens up to `stop`, all outputs wanted. With `blocks`, no block may be cut."""
    start = session.length
    before, count = (sum(token < 0 for token in part) for part in (PROMPT[:start], PROMPT[start:stop]))
    own = [(begin - start, end - start) for begin, end in BLOCKS if start < end and begin < stop] if blocks else []
    return Rows(
        session,
        TokenTree.chain(PROMPT[start:stop]),
        range(stop - start),
        soft=embeddings[before : before + count] if count else None,
        blocks=own,
    )


def read(
    engine: Engine,
    cuts: Sequence[int] = (WHOLE,),
    embeddings: np.ndarray = EMBEDDINGS,
    *,
    session: Session | None = None,
    blocks: bool = True,
) -> tuple[Session, np.ndarray]:
    """A session that has read the prompt up to each cut in turn, and the logits of all rows that this took."""
    session, logits = session or engine.open_session(), []
    for stop in cuts:
        (outputs,) = engine.forward([rows_of(session, stop, embeddings, blocks=blocks)])
        logits.append(outputs.logits.copy())
        session.commit(range(session.pending))
    return session, np.concatenate(logits)


BORDERS = (
    [BLOCKS[0][0], WHOLE],
    [BLOCKS[0][1], BLOCKS[1][0], BLOCKS[2][0], WHOLE],
    [3, *BLOCKS[0], BLOCKS[0][1] + 2, *BLOCKS[1], *BLOCKS[2], WHOLE - 1, WHOLE],
)
"""Ways to cut the prompt between blocks."""


def masks_of_transformers(oracle: Any) -> Any:
    """By kind of layer, float32[1, 1, T, T], 0 where a row sees. Gemma4Unified's forward makes others by itself."""
    import torch

    ids = torch.tensor([[IMAGE if token < 0 else token for token in PROMPT]])
    return oracle.create_masks_for_generate(
        oracle.config, oracle.get_input_embeddings()(ids), None, None, torch.arange(WHOLE)[None], (ids == IMAGE).long()
    )


@pytest.mark.needs("oracle", "onnxruntime")
@pytest.mark.parametrize("cuts", [[WHOLE], *BORDERS], ids=len)
def test_float_weights_give_the_logits_of_transformers(floats: Engine, oracle: Any, cuts: list[int]) -> None:
    import torch
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    ids = torch.tensor([[IMAGE if token < 0 else token for token in PROMPT]])
    with torch.no_grad():
        given = BaseModelOutputWithPooling(pooler_output=(torch.tensor(EMBEDDINGS),))
        expected = oracle(ids, mm_encoder_outputs={"image": given}, attention_mask=masks_of_transformers(oracle))
    np.testing.assert_allclose(read(floats, cuts)[1], expected.logits[0].numpy(), atol=1e-4, rtol=0)


@pytest.mark.needs("oracle")
@pytest.mark.parametrize("cuts", [[WHOLE], *BORDERS], ids=len)
def test_the_masks_are_those_of_transformers(oracle: Any, cuts: list[int]) -> None:
    expected = {kind: mask[0, 0].numpy() == 0 for kind, mask in masks_of_transformers(oracle).items()}
    start = 0
    for stop in cuts:
        tree = TokenTree.chain(PROMPT[start:stop])
        own = [(begin - start, end - start) for begin, end in BLOCKS if start <= begin < stop]
        for kind, window in (("full_attention", None), ("sliding_attention", WINDOW)):
            found = attention_mask(tree, start, (0, stop), window, own)
            np.testing.assert_array_equal(found, expected[kind][start:stop, :stop], err_msg=kind)
        start = stop


def test_quantised_weights_are_close(engine: Engine, floats: Engine) -> None:
    """Much closer than the logits of the same rows without blocks."""
    found, expected, causal = read(engine)[1], read(floats)[1], read(floats, blocks=False)[1]
    first, last = BLOCKS[0][0], BLOCKS[0][1] - 1
    errors, steps = (np.sqrt(((each - expected) ** 2).mean(axis=1)) for each in (found, causal))
    assert 3 * errors[first:last].mean() < steps[first:last].mean()
    assert errors[first:last].mean() < 2 * errors[:first].mean()
    assert not steps[:first].any()


def test_cuts_between_blocks_change_no_bit(engine: Engine) -> None:
    whole = read(engine)[1]
    for cuts in BORDERS:
        np.testing.assert_array_equal(read(engine, cuts)[1], whole)


SETTINGS: dict[str, dict[str, Any]] = {
    "int8": {"kv_cache": "int8"},
    "lookup": {"lookup": LookupSettings("lookup", keys=32, window=64, learn=32)},
    "nomad": {"lookup": LookupSettings("nomad", keys=32, window=64, learn=32)},
    "nomad of int8": {"kv_cache": "int8", "lookup": LookupSettings("nomad", keys=32, window=64, learn=32)},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_cuts_change_no_bit_with_other_caches_and_attentions(
    seeing: dict[tuple[str, str], Bundle], family: str, setting: str
) -> None:
    engine = SimdEngine(seeing[family, "int8"], threads=2, **SETTINGS[setting])
    cuts = [*BORDERS[1][:-1], WHOLE]
    whole, exact = read(engine, [BLOCKS[0][1], WHOLE])[1], read(engine, cuts)[1]
    np.testing.assert_array_equal(exact, whole)
    changed = EMBEDDINGS.copy()
    changed[SIZES[0] - 1] += 0.5
    rows = slice(*BLOCKS[0])
    assert (read(engine, cuts, changed)[1][rows] != whole[rows]).any(axis=1).all()
    engine.close()


def test_rows_see_their_block_and_what_was_before(engine: Engine) -> None:
    """A change of the last row of a picture reaches all of it, and nothing before it."""
    whole, last = read(engine)[1], sum(SIZES[:2]) - 1
    changed = EMBEDDINGS.copy()
    changed[last] += 0.5
    same = (read(engine, embeddings=changed)[1] == whole).all(axis=1)
    begin, end = BLOCKS[1]
    assert same[:begin].all()
    assert not same[begin:end].any()
    causal = read(engine, blocks=False)[1]
    same = (read(engine, embeddings=changed, blocks=False)[1] == causal).all(axis=1)
    assert same[: end - 1].all()


def test_the_order_of_forwards_leaves_nothing_behind(engine: Engine) -> None:
    """Rows without blocks after rows with blocks, in the same engine."""
    causal = read(engine, blocks=False)[1]
    read(engine)
    np.testing.assert_array_equal(read(engine, blocks=False)[1], causal)


def test_a_forward_of_several_sequences(engine: Engine) -> None:
    text = RNG.integers(20, 300, 25).tolist()

    def of_text(session: Session) -> Rows:
        return Rows(session, TokenTree.chain(text), range(len(text)))

    whole = read(engine)[1]
    (alone,) = engine.forward([of_text(engine.open_session())])
    expected_text = alone.logits.copy()
    sessions = [engine.open_session() for _ in range(5)]
    read(engine, [BLOCKS[0][0]], session=sessions[3])
    read(engine, [BLOCKS[1][0]], session=sessions[4])
    batch = [
        of_text(sessions[0]),
        rows_of(sessions[1], BLOCKS[1][1]),
        of_text(sessions[2]),
        rows_of(sessions[3], BLOCKS[0][1]),
        rows_of(sessions[4], WHOLE),
    ]
    found = engine.forward(batch)
    for index in (0, 2):
        np.testing.assert_array_equal(found[index].logits, expected_text)
    np.testing.assert_array_equal(found[1].logits, whole[: BLOCKS[1][1]])
    np.testing.assert_array_equal(found[3].logits, whole[slice(*BLOCKS[0])])
    np.testing.assert_array_equal(found[4].logits, whole[BLOCKS[1][0] :])


@pytest.mark.parametrize("cut", [BLOCKS[0][0], BLOCKS[0][1], BLOCKS[1][0], WHOLE])
def test_forks_files_and_rewinds(engine: Engine, tmp_path: Path, cut: int) -> None:
    whole = read(engine)[1]
    session, _ = read(engine, [cut])
    session.save(tmp_path / "session")
    others = [session.fork(), engine.load_session(tmp_path / "session")]
    session.snapshot()
    if cut < WHOLE:
        for each in (*others, session):
            np.testing.assert_array_equal(read(engine, session=each)[1], whole[cut:])
        assert session.rewind(cut) == cut
        np.testing.assert_array_equal(read(engine, session=session)[1], whole[cut:])
    draft = [5, 7, 9, 30]
    for each in (*others, session):
        (outputs,) = engine.forward([Rows(each, TokenTree.chain(draft), range(4))])
        together = outputs.logits.copy()
        for row, token in enumerate(draft):
            (outputs,) = engine.forward([Rows(each, TokenTree.chain([token]), [0])])
            np.testing.assert_array_equal(outputs.logits[0], together[row])
            each.commit([0])


def test_a_long_text_before_and_behind(engine: Engine) -> None:
    """The sliding caches have moved by the time of the picture, and again by the time of the last rows."""
    begin, end = BLOCKS[0]
    text = RNG.integers(20, 300, 200 - end).tolist()

    def logits(pieces: Sequence[int]) -> np.ndarray:
        session, found = engine.open_session(), []
        for start in range(0, len(text), 30):
            part = text[start : start + 30]
            engine.forward([Rows(session, TokenTree.chain(part), [0])])
            session.commit(range(len(part)))
        for count in pieces:
            first = session.length - len(text)
            tokens = PROMPT[first : first + count]
            soft = EMBEDDINGS[: SIZES[0]] if tokens[-1] < 0 or tokens[0] < 0 or first < begin < first + count else None
            blocks = [(begin - first, end - first)] if soft is not None else []
            rows = Rows(session, TokenTree.chain(tokens), range(len(tokens)), soft=soft, blocks=blocks)
            found.append(engine.forward([rows])[0].logits.copy())
            session.commit(range(len(tokens)))
        return np.concatenate(found)

    np.testing.assert_array_equal(logits([begin, end - begin, 3]), logits([end + 3]))


def test_wrong_blocks_are_refused(engine: Engine) -> None:
    session = engine.open_session()
    tokens = [3, -5, -6, 4]
    wrong: list[tuple[int, int]] = [(0, 2), (1, 4), (1, 1), (2, 1), (-3, -1), (2, 5)]
    for block in wrong:
        with pytest.raises(ValueError, match="are not of soft rows"):
            engine.forward([Rows(session, TokenTree.chain(tokens), [0], soft=EMBEDDINGS[:2], blocks=[block])])
    with pytest.raises(ValueError, match="there are none"):
        engine.forward([Rows(session, TokenTree.chain([3, 4]), [0], blocks=[(0, 1)])])
    tree = TokenTree(np.array(tokens), np.array([-1, 0, 0, 1]))
    with pytest.raises(ValueError, match="are not of soft rows"):
        engine.forward([Rows(session, tree, [0], soft=EMBEDDINGS[:2], blocks=[(1, 3)])])


@pytest.mark.needs("onnxruntime")
def test_the_memory_of_scores_limits_text_and_no_picture(
    seeing: dict[tuple[str, str], Bundle], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block is never cut, however long the sequence; rows of text are, as without a tower."""
    engine = OrtEngine(seeing[family, "int8"], 1)
    whole = read(engine)[1]
    monkeypatch.setattr("ondevice.engines.ort.SCORES", engine.query_heads * engine.most_rows)
    session = engine.open_session()
    assert (session.max_rows(), session.max_rows(SIZES[0])) == (1, SIZES[0])
    cuts = [stop for begin, end in [(0, 0), *BLOCKS] for stop in (begin, end)]
    pieces = [stop for stop in range(1, WHOLE + 1) if not any(begin < stop < end for begin, end in BLOCKS)]
    assert set(cuts[2:]) <= set(pieces)
    np.testing.assert_array_equal(read(engine, pieces, session=session)[1], whole)
    engine.close()
