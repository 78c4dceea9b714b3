"""Several sessions of the `ort` engine, in turn, in one forward or in two threads, give the same outputs as alone."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper

from ondevice.bundle import Bundle
from ondevice.engines.kv_cache import MARGIN
from ondevice.engines.layer_path import LayerPath
from ondevice.engines.ort import PREFILL_ROWS, Binding, OrtEngine, OrtSession
from ondevice.engines.protocol import MAX_SESSIONS, ROOT, Rows, Session, TokenTree
from ondevice.errors import SessionFileError, UsageError
from tests.engines.sequences import copied, drafts, extend, forward, tokens
from tests.fixtures.toy_engine import ToyEngine

WINDOW = 256
"""Sliding window of the reference pair, in tokens."""

LONG = 1700
"""Length at which sliding caches have dropped the first tokens; the context has 2,048 tokens."""


@pytest.fixture(scope="module")
def bundle(reference_bundle: Path) -> Bundle:
    return Bundle.open(reference_bundle)


@pytest.fixture(scope="module")
def engine(bundle: Bundle) -> Iterator[OrtEngine]:
    made = OrtEngine(bundle, threads=1)
    yield made
    made.close()


def opened(engine: OrtEngine, ids: list[int]) -> OrtSession:
    """Open a session and commit these tokens."""
    session = engine.open_session()
    extend(session, ids, PREFILL_ROWS)
    return session


def answers(session: OrtSession) -> list[np.ndarray]:
    """Run and commit a few rows, then draft; returns all outputs."""
    logits, hidden = copied(forward(session, tokens(5, seed=99), range(5)))
    session.commit(range(3))
    return [logits, hidden, *drafts(session, hidden[2])]


def assert_equal(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def assert_holds(session: OrtSession, ids: list[int]) -> None:
    """Assert that the session continues, bit for bit, like a new session with the tokens `ids`."""
    assert list(session.tokens) == ids
    assert_equal(answers(session), answers(opened(session.engine, ids)))


@dataclass
class Step:
    """The rows of one session in one forward, their outputs, and the committed rows."""

    tree: TokenTree
    wanted: list[int]
    path: list[int]
    logits: np.ndarray
    hidden: np.ndarray


def random_rows(session: OrtSession, rng: np.random.Generator) -> Rows:
    """Random rows for a forward: a prefill chunk, a decode row or a tree of drafts."""
    count = int(rng.choice([1, 6, 12, 60]))
    parents = np.arange(-1, count - 1)
    if count in (6, 12):
        parents = np.array([rng.integers(ROOT, row) if row else ROOT for row in range(count)])
    wanted = np.flatnonzero(rng.random(count) < 0.5).tolist()
    return Rows(session, TokenTree(rng.integers(6, 4096, count), parents), wanted)


def random_path(tree: TokenTree, rng: np.random.Generator) -> list[int]:
    path: list[int] = []
    row = int(rng.integers(-1, len(tree)))
    while row != ROOT:
        path.insert(0, row)
        row = int(tree.parents[row])
    return path


@pytest.mark.parametrize("seed", range(3))
def test_random_batches_change_no_bit(engine: OrtEngine, seed: int) -> None:
    """Prefill chunks, decode rows and trees in one forward, below and beyond the window, compared with each alone."""
    rng = np.random.default_rng(seed)
    prompts = [tokens(length, seed) for length in (0, 30, WINDOW - 10, LONG)]
    sessions = [opened(engine, prompt) for prompt in prompts]
    histories: list[list[Step]] = [[] for _ in sessions]
    for _ in range(15):
        chosen = rng.permutation(len(sessions))[: rng.integers(1, len(sessions) + 1)]
        batch = [random_rows(sessions[index], rng) for index in chosen]
        for index, rows, outputs in zip(chosen, batch, engine.forward(batch), strict=True):
            assert outputs.rows == sum(len(each.tree) for each in batch)
            assert len(outputs.logits) == len(outputs.hidden) == len(rows.wanted)
            path = random_path(rows.tree, rng)
            histories[index].append(Step(rows.tree, list(rows.wanted), path, *copied(outputs)))
            sessions[index].commit(path)
    for prompt, history in zip(prompts, histories, strict=True):
        alone = opened(engine, prompt)
        for step in history:
            assert_equal(copied(forward(alone, step.tree, step.wanted)), [step.logits, step.hidden])
            alone.commit(step.path)


def test_the_seconds_are_those_of_the_whole_forward(engine: OrtEngine) -> None:
    sessions = [engine.open_session() for _ in range(3)]
    found = engine.forward([Rows(session, TokenTree.chain(tokens(60)), [59]) for session in sessions])
    assert len({outputs.seconds for outputs in found}) == 1
    assert found[0].seconds > 0


def test_outputs_hold_until_the_session_runs_again(engine: OrtEngine) -> None:
    first, second = engine.open_session(), engine.open_session()
    outputs = forward(first, tokens(6), range(6))
    before = copied(outputs)
    forward(second, tokens(6, seed=1), range(6))
    second.commit([0])
    forward(second, tokens(60, seed=2), range(60))
    second.close()
    assert_equal([outputs.logits, outputs.hidden], before)


def test_a_session_keeps_its_pending_rows_while_others_run(engine: OrtEngine) -> None:
    first, second = opened(engine, tokens(300)), opened(engine, tokens(300, seed=1))
    forward(first, [10, 11, 12], [2])
    forward(second, [20, 21, 22], [2])
    first.commit([0, 1])
    second.commit([0])
    assert_holds(first, [*tokens(300), 10, 11])
    assert_holds(second, [*tokens(300, seed=1), 20])


def test_drafts_of_two_sessions_in_turn(engine: OrtEngine) -> None:
    sessions = [opened(engine, tokens(length, seed=length)) for length in (100, 700)]
    hidden = forward(sessions[0], [5], [0]).hidden[0].copy()
    alone = [drafts(session, hidden, steps=1) for session in sessions]
    steps = [session.draft_step(9, hidden) for session in sessions]
    for expected, step in zip(alone, steps, strict=True):
        assert_equal([step.candidates, step.logits, step.hidden], expected)


def test_sessions_that_take_turns_bind_nothing_anew(engine: OrtEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = [opened(engine, tokens(length)) for length in (130, 140)]
    hidden = np.zeros(engine.target.hidden_size, np.float32)

    def turn() -> None:
        engine.forward([Rows(session, TokenTree.chain([7]), [0]) for session in sessions])
        for session in sessions:
            session.commit([0])
            session.draft_step(9, hidden)

    turn()
    bound: list[str] = []
    monkeypatch.setattr(Binding, "_bind", lambda self, bind, name, value: bound.append(name))
    for _ in range(20):
        turn()
    assert not bound


def test_two_threads_with_a_session_each(engine: OrtEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads get the same outputs as alone, and one graph runs at a time."""
    prompts = [tokens(600, seed) for seed in range(2)]
    alone = [generated(opened(engine, prompt)) for prompt in prompts]
    found: dict[int, list[np.ndarray]] = {}
    begin, running, run_graph = threading.Barrier(2), threading.Lock(), Binding.run
    overlaps: list[Binding] = []

    def watched(self: Binding) -> None:
        if not running.acquire(blocking=False):
            overlaps.append(self)
            return
        run_graph(self)
        running.release()

    monkeypatch.setattr(Binding, "run", watched)

    def run(index: int) -> None:
        begin.wait()
        found[index] = generated(opened(engine, prompts[index]))

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not overlaps
    for index, expected in enumerate(alone):
        assert_equal(found[index], expected)


def generated(session: OrtSession) -> list[np.ndarray]:
    """The outputs of rounds with three drafts and their verification, of which one row is committed."""
    found, token = [], 9
    hidden = np.zeros(session.engine.target.hidden_size, np.float32)
    for _ in range(40):
        found += drafts(session, hidden)
        logits, states = copied(forward(session, [token, 10, 11, 12], range(4)))
        session.commit([0])
        token, hidden = int(logits[0].argmax()), states[0]
        found += [logits, states]
    return found


@pytest.mark.parametrize("back", [0, 1, MARGIN])
@pytest.mark.parametrize("boundary", [100, WINDOW + 10, 800])
def test_a_snapshot_restores_what_sliding_layers_lost(engine: OrtEngine, boundary: int, back: int) -> None:
    ids = tokens(LONG)
    session = opened(engine, ids[:boundary])
    session.snapshot()
    extend(session, ids[boundary:])
    assert session.rewind(boundary - back) == boundary - back
    assert_holds(session, ids[: boundary - back])


def test_without_a_snapshot_a_rewind_starts_over(engine: OrtEngine) -> None:
    session = opened(engine, tokens(LONG))
    assert session.rewind(WINDOW) == 0
    extend(session, tokens(50))
    assert_holds(session, tokens(50))


@pytest.mark.parametrize(
    ("length", "reached"), [(None, LONG), (LONG - 100, LONG - 100), (720, 700), (700, 700), (650, 650), (400, 0)]
)
def test_a_fork_and_its_origin_go_their_own_ways(engine: OrtEngine, length: int | None, reached: int) -> None:
    ids = tokens(LONG)
    session = opened(engine, ids[:700])
    session.snapshot()
    extend(session, ids[700:])
    fork = session.fork(length)
    extend(fork, tokens(30, seed=1))
    extend(session, tokens(30, seed=2))
    assert_holds(fork, [*ids[:reached], *tokens(30, seed=1)])
    assert_holds(session, [*ids, *tokens(30, seed=2)])


@pytest.mark.parametrize("length", [1, 100, WINDOW + 1, LONG])
def test_a_sequence_survives_on_disk(engine: OrtEngine, bundle: Bundle, tmp_path: Path, length: int) -> None:
    session = opened(engine, tokens(length))
    session.save(tmp_path / "prompt.session")
    expected = answers(session)
    other = OrtEngine(bundle, threads=1)
    for each in (engine, other):
        loaded = each.load_session(tmp_path / "prompt.session")
        assert list(loaded.tokens) == tokens(length)
        assert_equal(answers(loaded), expected)
    other.close()


def test_a_file_of_something_else_is_refused(engine: OrtEngine, bundle: Bundle, tmp_path: Path) -> None:
    path = tmp_path / "prompt.session"
    opened(engine, tokens(100)).save(path)
    files = {name: entry for name, entry in bundle.manifest.files.items() if name != "tokenizer.json"}
    foreign = OrtEngine(Bundle(bundle.path, dataclasses.replace(bundle.manifest, files=files)), threads=1)
    with pytest.raises(SessionFileError, match="another bundle"):
        foreign.load_session(path)
    with pytest.raises(SessionFileError, match="100 tokens, and here a sequence has 1 to 99"):
        OrtEngine(bundle, threads=1, context_length=99).load_session(path)
    full = OrtEngine(bundle, threads=1, context_length=100).load_session(path)
    assert list(full.tokens) == tokens(100)
    data = path.read_bytes()
    path.write_bytes(data[:5000] + bytes([data[5000] ^ 1]) + data[5001:])
    with pytest.raises(SessionFileError, match="damaged"):
        engine.load_session(path)
    with pytest.raises(FileNotFoundError):
        engine.load_session(tmp_path / "nothing")


def test_what_a_session_holds(engine: OrtEngine) -> None:
    session = opened(engine, tokens(300))
    empty = session.nbytes
    assert empty > 0
    session.snapshot()
    assert session.nbytes > empty
    fork = session.fork()
    session.close()
    assert session.nbytes == 0
    assert_holds(fork, tokens(300))


def test_a_run_that_fails_leaves_nothing_half_done(engine: OrtEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = [opened(engine, tokens(300, seed)) for seed in range(4)]
    for session in sessions:
        forward(session, [7, 8], [1])
    run, count = Binding.run, 0

    def failing(self: Binding) -> None:
        nonlocal count
        count += 1
        if count == 2:
            raise MemoryError
        run(self)

    with monkeypatch.context() as patched:
        patched.setattr(Binding, "run", failing)
        with pytest.raises(MemoryError):
            engine.forward([Rows(session, TokenTree.chain([9, 10]), [0]) for session in sessions[:3]])
    for session in sessions[:3]:
        with pytest.raises(ValueError, match="not a path"):
            session.commit([0])
    sessions[3].commit([0])
    assert_holds(sessions[3], [*tokens(300, seed=3), 7])
    for seed, session in enumerate(sessions[:3]):
        assert_holds(session, tokens(300, seed))


@pytest.mark.parametrize("arena", [True, False])
def test_a_lack_of_memory_is_told_from_a_broken_graph(
    bundle: Bundle, engine: OrtEngine, monkeypatch: pytest.MonkeyPatch, arena: bool
) -> None:
    """A shared forward without enough memory is run again by each sequence alone, and any other error ends it."""
    short, session = _shortage(arena), opened(engine, tokens(30))
    with monkeypatch.context() as patched:
        patched.setattr(session._bound, "_graph", SimpleNamespace(run_with_iobinding=_raising(short)))
        with pytest.raises(MemoryError, match="not enough memory for onnxruntime to run this bundle's graphs"):
            forward(session, [7], [0])
    with monkeypatch.context() as patched:
        patched.setattr("onnxruntime.InferenceSession", _raising(short))
        with pytest.raises(MemoryError, match="not enough memory for onnxruntime to load"):
            OrtEngine(bundle, threads=1)
    assert_holds(session, tokens(30))


def test_an_exception_of_a_signal_handler_is_no_broken_graph(
    bundle: Bundle, engine: OrtEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a time limit that ends while a graph is run."""
    session = opened(engine, tokens(30))
    with monkeypatch.context() as patched:
        patched.setattr(session._bound, "_graph", SimpleNamespace(run_with_iobinding=_raising(TimeoutError())))
        with pytest.raises(TimeoutError):
            forward(session, [7], [0])
    with monkeypatch.context() as patched:
        patched.setattr("onnxruntime.InferenceSession", _raising(TimeoutError()))
        with pytest.raises(TimeoutError):
            OrtEngine(bundle, threads=1)
    assert_holds(session, tokens(30))


def _shortage(arena: bool) -> Exception:
    """ONNX Runtime's own error where a node's output has 2**58 bytes."""
    nodes = [helper.make_node("Expand", ["value", "shape"], ["out"])]
    inputs = [
        helper.make_tensor_value_info("value", TensorProto.FLOAT, [1]),
        helper.make_tensor_value_info("shape", TensorProto.INT64, [1]),
    ]
    graph = helper.make_graph(nodes, "large", inputs, [helper.make_tensor_value_info("out", TensorProto.FLOAT, None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    options = onnxruntime.SessionOptions()
    options.enable_cpu_mem_arena, options.log_severity_level = arena, 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    with pytest.raises(Exception, match="alloc") as caught:
        session.run(None, {"value": np.ones(1, np.float32), "shape": np.array([1 << 56])})
    return caught.value


def _raising(error: Exception) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


def test_the_context_fills_up(bundle: Bundle) -> None:
    engine = OrtEngine(bundle, threads=1, context_length=20)
    session = opened(engine, tokens(18))
    assert session.max_rows() == 2
    with pytest.raises(ValueError, match="3 rows do not fit: at most 2 now"):
        forward(session, [7, 8, 9], [0])
    forward(session, [7, 8], [0])
    session.commit([0, 1])
    assert session.max_rows() == 0
    assert session.draft_step(7, np.zeros(engine.target.hidden_size, np.float32)).logits.shape
    engine.close()


@pytest.mark.parametrize("context", [0, 1, 10**9])
def test_an_impossible_context(bundle: Bundle, context: int) -> None:
    with pytest.raises(UsageError, match="context"):
        OrtEngine(bundle, threads=1, context_length=context)


def rows(session: Session, ids: Sequence[int] = (7,), wanted: Sequence[int] = (0,)) -> Rows:
    return Rows(session, TokenTree.chain(ids), wanted)


BAD_BATCHES: dict[str, tuple[Callable[[OrtSession], list[Rows]], str]] = {
    "empty": (lambda session: [], "0 sessions do not fit"),
    "too many sessions": (
        lambda session: [rows(session.engine.open_session()) for _ in range(MAX_SESSIONS + 1)],
        "17 sessions do not fit: a forward has 1 to 16",
    ),
    "the same session twice": (lambda session: [rows(session), rows(session)], "twice"),
    "a session of another kind": (
        lambda session: [rows(session), rows(ToyEngine().open_session())],
        "opened it",
    ),
    "too many rows of one": (lambda session: [rows(session, [7] * (PREFILL_ROWS + 1))], "rows do not fit: at most 256"),
    "too many rows together": (
        lambda session: [rows(session, [7] * 200), rows(session.engine.open_session(), [7] * 57)],
        "rows do not fit: at most 256 in one forward",
    ),
    "a token beyond the vocabulary": (lambda session: [rows(session, [6144])], r"token ids must be within 0\.\.6143"),
    "a negative token": (lambda session: [rows(session, [7, -1])], "token ids must be"),
    "a wanted row that is none": (lambda session: [rows(session, [7, 8], [2])], "wanted rows must be"),
    "a negative wanted row": (lambda session: [rows(session, [7, 8], [-1])], "wanted rows must be"),
    "a wanted row twice": (lambda session: [rows(session, [7, 8], [1, 1])], "wanted rows must be"),
    "wanted rows out of order": (lambda session: [rows(session, [7, 8], [1, 0])], "wanted rows must be"),
}


@pytest.mark.parametrize(("make", "words"), BAD_BATCHES.values(), ids=BAD_BATCHES.keys())
def test_a_bad_batch_is_refused_before_anything_runs(
    engine: OrtEngine, make: Callable[[OrtSession], list[Rows]], words: str
) -> None:
    session, good = opened(engine, tokens(10)), engine.open_session()
    for each in (session, good):
        forward(each, [11, 12], [1])
    bad = make(session)
    for batch in (bad, [rows(good), *bad] if 0 < len(bad) < MAX_SESSIONS else bad):
        with pytest.raises(ValueError, match=words):
            engine.forward(batch)
    session.commit([0, 1])  # the pending rows are still pending
    good.commit([0, 1])
    assert_holds(session, [*tokens(10), 11, 12])


def test_a_session_of_another_engine(engine: OrtEngine, bundle: Bundle) -> None:
    other = OrtEngine(bundle, threads=1)
    with pytest.raises(ValueError, match="engine that opened it"):
        engine.forward([rows(other.open_session())])
    other.close()


def test_a_closed_session_says_so(engine: OrtEngine, tmp_path: Path) -> None:
    session = opened(engine, tokens(10))
    session.close()
    session.close()
    hidden = np.zeros(engine.target.hidden_size, np.float32)
    uses: list[Callable[[], object]] = [
        lambda: engine.forward([rows(engine.open_session()), rows(session)]), session.max_rows, session.snapshot,
        lambda: session.commit([0]), lambda: session.rewind(0), session.fork, lambda: session.draft_step(7, hidden),
        lambda: session.save(tmp_path / "x"),
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(UsageError, match="this session is closed"):
            use()


def test_a_closed_engine_says_so(bundle: Bundle, tmp_path: Path) -> None:
    engine = OrtEngine(bundle, threads=1)
    session = opened(engine, tokens(10))
    session.save(tmp_path / "prompt.session")
    engine.close()
    engine.close()
    hidden = np.zeros(engine.target.hidden_size, np.float32)
    uses: list[Callable[[], object]] = [
        engine.open_session, lambda: engine.load_session(tmp_path / "prompt.session"), session.fork,
        lambda: engine.forward([rows(session)]), lambda: session.draft_step(7, hidden),
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(UsageError, match="this engine is closed"):
            use()
    session.close()


@pytest.mark.parametrize(
    ("token", "size", "words"),
    [(6144, 192, "token ids"), (-1, 192, "token ids"), (7, 191, "hidden state"), (7, 0, "hidden state")],
)
def test_a_bad_draft_step(engine: OrtEngine, token: int, size: int, words: str) -> None:
    session = opened(engine, tokens(10))
    with pytest.raises(ValueError, match=words):
        session.draft_step(token, np.zeros(size, np.float32))


def test_a_draft_needs_a_drafter_and_something_before_it(engine: OrtEngine, bundle: Bundle) -> None:
    hidden = np.zeros(engine.target.hidden_size, np.float32)
    with pytest.raises(ValueError, match="nothing is committed"):
        engine.open_session().draft_step(7, hidden)
    manifest = bundle.manifest
    tensors = {graph: table for graph, table in manifest.tensors.items() if graph != "drafter.onnx"}
    without = OrtEngine(Bundle(bundle.path, dataclasses.replace(manifest, drafter=None, tensors=tensors)), threads=1)
    assert without.drafter is None
    with pytest.raises(UsageError, match="no drafter"):
        opened(without, tokens(10)).draft_step(7, hidden)


def test_it_runs_all_layers_or_none(engine: OrtEngine) -> None:
    session = engine.open_session()
    with pytest.raises(UsageError, match="use --engine simd"):
        engine.forward([Rows(session, TokenTree.chain([1]), [0], LayerPath(stop=1))])
