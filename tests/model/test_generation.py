"""Generations of one model at the same time, and every way in which one of them can end."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ondevice.engines.protocol import Outputs, Rows, Session
from ondevice.errors import SessionFileError, UsageError
from ondevice.generate.batch import Batch, Slot
from ondevice.generate.drafters.protocol import Draft, DraftRequest, Forecast
from ondevice.generation import Generation, Step
from ondevice.model import Model
from tests.fixtures.model_made import SPECIALS, model_over, write_bundle
from tests.fixtures.toy_engine import VOCAB, ToyEngine, ToySession

PROMPT = "abcde abcde abcde "
ENDLESS = 5000
"""New tokens of a generation that is still running when it is cancelled, however late a busy machine does that."""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("toy"))


@pytest.fixture
def model(bundle: Path) -> Iterator[Model]:
    with model_over(ToyEngine(), bundle) as model:
        yield model


def pausing(seconds: float) -> Callable[[Sequence[Rows]], None]:
    return lambda _: time.sleep(seconds)


@pytest.fixture
def slow(bundle: Path) -> Iterator[Model]:
    """Two milliseconds a forward, two sequences at a time."""
    with model_over(ToyEngine(before=pausing(0.002)), bundle, max_sequences=2) as model:
        yield model


def ids(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(SPECIALS, VOCAB, count).tolist()


def plain(bundle: Path, prompt: str | list[int], **options: Any) -> tuple[int, ...]:
    with model_over(ToyEngine(), bundle) as model:
        return model.generate(prompt, **options).token_ids


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def join(*threads: threading.Thread) -> None:
    for thread in threads:
        thread.join(timeout=300)
        assert not thread.is_alive()


def free(model: Model) -> bool:
    """Whether no generation holds a place, and the model still answers."""
    return not len(model._scheduler.batch) and bool(model.generate(PROMPT, max_new_tokens=1).token_ids)


def test_generations_at_once_say_what_each_says_alone(bundle: Path) -> None:
    prompts = [ids(10 + 7 * number, number) for number in range(6)]
    options: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 1.0, "seed": 3}] * 3
    expected = [plain(bundle, prompt, max_new_tokens=50, **each) for prompt, each in zip(prompts, options, strict=True)]
    found: dict[int, tuple[int, ...]] = {}

    def all_joined(rows: Sequence[Rows]) -> None:
        time.sleep(0.001)
        while len(model._scheduler.batch) < 3 and len(engine.batches) < 10:
            time.sleep(0.001)

    engine = ToyEngine(before=all_joined)
    with model_over(engine, bundle, max_sequences=3) as model:

        def work(number: int) -> None:
            found[number] = model.generate(prompts[number], max_new_tokens=50, **options[number]).token_ids

        join(*[in_thread(partial(work, number)) for number in range(6)])
        assert free(model)
        assert any(len(rows) == 3 for rows in engine.batches)
        assert max(len(rows) for rows in engine.batches) == 3
    assert [found[number] for number in range(6)] == expected


def test_generations_by_turns_in_one_thread(model: Model, bundle: Path) -> None:
    streams = [model.stream(ids(20, seed), max_new_tokens=30) for seed in range(3)]
    found: list[list[int]] = [[], [], []]
    for steps in zip(*streams, strict=False):
        for tokens, step in zip(found, steps, strict=True):
            tokens.extend(step.token_ids)
    for seed, tokens in enumerate(found):
        assert tuple(tokens) == plain(bundle, ids(20, seed), max_new_tokens=30)[: len(tokens)]
        assert len(tokens) > 20


def test_one_thread_does_not_wait_for_itself(slow: Model) -> None:
    streams = [slow.stream(PROMPT) for _ in range(3)]
    next(streams[0]), next(streams[1])
    with pytest.raises(UsageError, match="2 unfinished generations"):
        next(streams[2])
    streams[0].close()
    assert next(slow.stream(PROMPT)).token_ids


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no interval timers")
def test_a_signal_handler_s_exception_is_not_lost_beside_other_generations(slow: Model, bundle: Path) -> None:
    def too_late(*_: object) -> None:
        raise TimeoutError

    def limited(seconds: float) -> None:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        slow.generate(PROMPT, max_new_tokens=ENDLESS)

    found: list[tuple[int, ...]] = []
    other = in_thread(lambda: found.append(slow.generate(PROMPT, max_new_tokens=600, seed=1).token_ids))
    before = signal.signal(signal.SIGALRM, too_late)
    try:
        for number in range(10):
            with pytest.raises(TimeoutError):
                limited(0.05 + 0.001 * number)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    join(other)
    assert found == [plain(bundle, PROMPT, max_new_tokens=600, seed=1)]
    assert free(slow)


def test_a_callback_does_not_wait_for_its_own_generation(bundle: Path) -> None:
    with model_over(ToyEngine(), bundle, max_sequences=1) as model:

        def answer(done: int, total: int) -> None:
            model.generate(PROMPT, max_new_tokens=1)

        with pytest.raises(UsageError, match="this thread has 1 unfinished generation"):
            model.generate(PROMPT, on_prefill=answer)
        assert free(model)


def test_stats_tell_what_was_cached(model: Model) -> None:
    first = model.generate(ids(100), max_new_tokens=20)
    assert first.stats.cached_tokens == 0
    again = model.generate([*ids(100), *first.token_ids, 5], max_new_tokens=20)
    assert again.stats.cached_tokens == 100 + 19  # the last token has no KV yet
    assert again.stats.prompt_tokens == 121
    other = model.generate([*ids(40), *ids(30, 1)], max_new_tokens=5)
    assert other.stats.cached_tokens == 40
    assert model.generate([*ids(100), *first.token_ids, 5], max_new_tokens=1).stats.cached_tokens == 120


def test_a_prompt_is_kept_where_a_later_one_went_far_beyond_it(model: Model) -> None:
    """The sliding cache no longer has the rows at its end: they are in a snapshot."""
    for more in ([], ids(1000, 1)):
        model.generate([*ids(300), *more], max_new_tokens=1)
    assert model.generate([*ids(300), *ids(30, 2)], max_new_tokens=1).stats.cached_tokens == 300


def test_a_prompt_on_disk_is_not_computed_again(model: Model, bundle: Path, tmp_path: Path) -> None:
    path = tmp_path / "system.prefix"
    assert model.save_prefix(ids(200), path) == 200
    expected = plain(bundle, [*ids(200), *ids(30, 1)], max_new_tokens=20)
    with model_over(ToyEngine(), bundle) as fresh:
        assert fresh.load_prefix(path) == 200
        reply = fresh.generate([*ids(200), *ids(30, 1)], max_new_tokens=20)
        assert reply.token_ids == expected
        assert reply.stats.cached_tokens == 200
        path.write_bytes(path.read_bytes()[:-5])
        with pytest.raises(SessionFileError, match=r"system\.prefix cannot be loaded"):
            fresh.load_prefix(path)
        assert free(fresh)
    with pytest.raises(FileNotFoundError):
        model.save_prefix(ids(20), tmp_path / "nowhere" / "x")
    assert free(model)


def test_a_system_prompt_on_disk_serves_a_chat(model: Model, tmp_path: Path) -> None:
    system = {"role": "system", "content": "abcde " * 20}
    saved = model.save_prefix([system], tmp_path / "system.prefix")
    model.forget()
    model.load_prefix(tmp_path / "system.prefix")
    reply = model.generate([system, {"role": "user", "content": "abc"}], max_new_tokens=3)
    assert saved - 10 < reply.stats.cached_tokens <= saved


def test_each_generation_has_stats_of_its_own(slow: Model) -> None:
    streams = [slow.stream(ids(30, seed), max_new_tokens=count) for seed, count in ((0, 10), (1, 25))]
    join(*[in_thread(partial(list, stream)) for stream in streams])
    assert [stream.stats.new_tokens for stream in streams] == [10, 25]


def test_cancelling_one_leaves_the_others(slow: Model, bundle: Path) -> None:
    found: dict[str, list[Step]] = {}
    streams = {
        "kept": slow.stream(ids(20, 0), max_new_tokens=60),
        "dropped": slow.stream(ids(20, 1), max_new_tokens=ENDLESS),
    }

    def read(name: str) -> None:
        found[name] = list(streams[name])

    threads = [in_thread(partial(read, name)) for name in streams]
    while streams["dropped"].stats.new_tokens < 5:
        time.sleep(0.001)
    streams["dropped"].cancel()
    join(*threads)
    assert found["dropped"][-1].finish_reason == "cancelled"
    assert found["kept"][-1].finish_reason == "length"
    tokens = tuple(token for step in found["kept"] for token in step.token_ids)
    assert tokens == plain(bundle, ids(20, 0), max_new_tokens=60)


def ended(model: Model, count: int, end: Callable[[], None]) -> list[str | None]:
    """Why each of `count` long generations ended, when `end` is called while two of them run and the others wait."""
    streams = [model.stream(ids(20, seed), max_new_tokens=ENDLESS) for seed in range(count)]
    reasons: list[str | None] = []

    def read(stream: Generation) -> None:
        reasons.append(list(stream)[-1].finish_reason)

    threads = [in_thread(partial(read, stream)) for stream in streams]
    while sum(stream.stats.new_tokens > 3 for stream in streams) < 2:
        time.sleep(0.001)
    end()
    join(*threads)
    return reasons


def test_cancelling_all_reaches_those_that_wait_for_their_turn(slow: Model) -> None:
    assert ended(slow, 5, slow.cancel) == ["cancelled"] * 5
    assert free(slow)


def test_a_cancellation_before_the_first_step_is_not_forgotten(model: Model) -> None:
    """As a GUI's button does it while the first generation still compiles."""
    for cancel in (lambda stream: stream.cancel(), lambda _: model.cancel()):
        stream = model.stream(PROMPT, max_new_tokens=100)
        cancel(stream)
        steps = list(stream)
        assert [step.finish_reason for step in steps] == ["cancelled"]
        assert steps[0].token_ids == ()
    assert free(model)


def test_a_generation_that_begins_after_a_cancellation_is_not_cancelled(model: Model) -> None:
    model.cancel()
    assert model.generate(PROMPT, max_new_tokens=3).finish_reason == "length"


def test_closing_from_another_thread_while_a_step_is_computed(slow: Model) -> None:
    stream = slow.stream(PROMPT, max_new_tokens=ENDLESS)
    steps: list[Step] = []
    thread = in_thread(lambda: steps.extend(stream))
    while not steps:
        time.sleep(0.001)
    stream.close()
    join(thread)
    assert sum(len(step.token_ids) for step in steps) < ENDLESS
    assert list(stream) == []
    assert free(slow)


def test_a_generation_is_a_context(model: Model) -> None:
    with model.stream(PROMPT, max_new_tokens=100) as stream:
        next(stream)
    assert list(stream) == []
    assert free(model)


def test_an_abandoned_generation_ends(slow: Model) -> None:
    for _ in range(5):
        next(slow.stream(PROMPT))
    gc.collect()
    assert free(slow)


def test_a_generation_that_nobody_started_holds_nothing(slow: Model) -> None:
    streams = [slow.stream(PROMPT) for _ in range(9)]
    assert free(slow)
    del streams
    assert free(slow)


def test_a_cancelled_asyncio_task_leaves_the_model_free(slow: Model) -> None:
    async def read(stream: Generation) -> None:
        while True:
            await asyncio.to_thread(next, stream)

    async def main() -> None:
        with slow.stream(PROMPT, max_new_tokens=ENDLESS) as stream:
            task = asyncio.create_task(read(stream))
            while stream.stats.new_tokens < 5:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())
    assert free(slow)


def failing(after: int) -> Callable[..., Any]:
    calls: list[int] = []

    def fail(logits: np.ndarray, context: Sequence[int]) -> np.ndarray:
        calls.append(1)
        if len(calls) > after:
            raise ZeroDivisionError("a processor's own fault")
        return logits

    return fail


@pytest.mark.parametrize("place", ["processor", "progress", "drafter"])
def test_what_fails_in_one_generation_stays_there(slow: Model, bundle: Path, place: str) -> None:
    def progress(done: int, total: int) -> None:
        raise ZeroDivisionError("a callback's own fault")

    class Broken(Copier):
        def draft(self, request: DraftRequest) -> Draft:
            raise ZeroDivisionError("a drafter's own fault")

    options: dict[str, dict[str, Any]] = {
        "processor": {"logits_processors": [failing(10)]},
        "progress": {"on_prefill": progress},
        "drafter": {"drafter": Broken(), "num_assistant_tokens_schedule": "constant"},
    }
    found: list[tuple[int, ...]] = []
    good = in_thread(lambda: found.append(slow.generate(ids(30), max_new_tokens=60).token_ids))
    with pytest.raises(ZeroDivisionError, match="own fault"):
        slow.generate(ids(30, 1), max_new_tokens=60, **options[place])
    join(good)
    assert found == [plain(bundle, ids(30), max_new_tokens=60)]
    assert free(slow)


def test_a_callback_may_close_its_generation_but_not_read_it(model: Model) -> None:
    def close(done: int, total: int) -> None:
        stream.close()

    stream = model.stream(ids(300), on_prefill=close)
    assert [step.finish_reason for step in stream] == ["cancelled"]

    def read(done: int, total: int) -> None:
        next(reading)

    reading = model.stream(ids(300), on_prefill=read)
    with pytest.raises(UsageError, match="its own generation"):
        next(reading)
    assert free(model)


class Copier:
    """Drafts the prompt again, and writes down which sequence it was shown."""

    name = "copier"

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []
        self._tokens: list[int] = []

    def begin(self, prompt_ids: Sequence[int], session: Session) -> None:
        self.prompts.append(list(session.tokens))
        self._tokens = list(prompt_ids)

    def forget(self) -> None:
        self._tokens = []

    def forecast(self, nodes: int) -> Forecast:
        return Forecast(np.full(min(nodes, len(self._tokens)), 0.9, np.float32), self.name)

    def draft(self, request: DraftRequest) -> Draft:
        return Draft.chain(self._tokens[: request.nodes], source=self.name)

    def observe(self, emitted: Sequence[int], outputs: Outputs, path: Sequence[int]) -> None:
        assert len(outputs.logits) > max(path)


def test_an_application_brings_a_drafter_of_its_own(model: Model, bundle: Path) -> None:
    drafter = Copier()
    reply = model.generate(PROMPT, max_new_tokens=30, drafter=drafter, num_assistant_tokens_schedule="constant")
    assert reply.token_ids == plain(bundle, PROMPT, max_new_tokens=30)
    assert reply.stats.drafter == "copier"
    assert reply.stats.drafted > 0
    assert drafter.prompts == [model.encode(PROMPT)]


@pytest.mark.parametrize("stop", ["b", "ab", "d ", "e\n", ("bc", "a c")])
def test_the_token_ids_before_a_stop_string_do_not_depend_on_drafts(bundle: Path, stop: str | tuple[str, ...]) -> None:
    """The string may end within a round, or span tokens of two."""
    undrafted = plain(bundle, PROMPT, max_new_tokens=80, temperature=0.0, stop=stop, drafter="none")
    for count in (1, 2, 5, 8):
        with model_over(ToyEngine(), bundle) as model:
            reply = model.generate(
                PROMPT,
                max_new_tokens=80,
                temperature=0.0,
                stop=stop,
                drafter=Copier(),
                num_assistant_tokens=count,
                num_assistant_tokens_schedule="constant",
            )
        assert reply.token_ids == undrafted


@pytest.mark.parametrize("stop", [(), ("ab", "d ", "zz"), "e\n"])
@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_the_pieces_of_a_step_are_its_text(model: Model, drafter: str, stop: str | tuple[str, ...]) -> None:
    """Also where text is held back, because a character or a stop string is not complete yet."""
    options: dict[str, Any] = {"num_assistant_tokens_schedule": "constant"} if drafter != "none" else {}
    taken = list(model.stream(PROMPT, max_new_tokens=60, drafter=drafter, stop=stop, **options))
    for step in taken:
        assert "".join(piece.text for piece in step.pieces) == step.text
        assert [piece.origin for piece in step.pieces].count("accepted") == step.accepted
    assert any(step.accepted for step in taken) == (drafter == "ngram")
    made = [piece.token_id for step in taken for piece in step.pieces if piece.token_id is not None]
    kept = [token for step in taken for token in step.token_ids]
    assert made[: len(kept)] == kept
    if not stop:
        assert made == kept


def test_a_drafter_serves_one_generation_at_a_time(model: Model) -> None:
    drafter = Copier()
    first, second = (model.stream(PROMPT, drafter=drafter) for _ in range(2))
    next(first)
    with pytest.raises(UsageError, match=r"this drafter \(copier\) serves another generation"):
        next(second)
    first.close()
    assert model.generate(PROMPT, max_new_tokens=2, drafter=drafter).stats.drafter == "copier"


def test_an_interrupt_at_the_end_of_a_generation_frees_its_drafter(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes where the drafter is to be given back."""

    class Struck:
        @property
        def lock(self) -> object:
            raise KeyboardInterrupt

    drafter = Copier()
    stream = model.stream(PROMPT, drafter=drafter)
    next(stream)
    with monkeypatch.context() as patch:
        patch.setattr(model._scheduler, "_lock", Struck())
        with pytest.raises(KeyboardInterrupt):
            stream.close()
    gc.collect()
    assert model.generate(PROMPT, max_new_tokens=2, drafter=drafter).stats.drafter == "copier"


def test_a_closed_model_says_so_everywhere(bundle: Path) -> None:
    model = model_over(ToyEngine(), bundle)
    length = model.context_length
    model.close()
    model.close()
    assert model.context_length == length
    for use in (lambda: model.encode("abc"), lambda: model.stream("abc"), model.forget, lambda: model.generate("abc")):
        with pytest.raises(UsageError, match="this model is closed"):
            use()
    model.cancel()


def test_closing_ends_every_generation(bundle: Path) -> None:
    model = model_over(ToyEngine(before=pausing(0.002)), bundle, max_sequences=2)
    assert ended(model, 4, model.close) == ["cancelled"] * 4
    assert model._scheduler._engine_closed


class ClosableEngine(ToyEngine):
    """Opens no sessions once it is closed, as engines of real weights."""

    closed = False

    def open_session(self) -> ToySession:
        if self.closed:
            raise UsageError("this engine is closed")
        return super().open_session()

    def close(self) -> None:
        self.closed = True


def test_closing_while_a_generation_takes_its_slot_cancels_it(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_over(ClosableEngine(), bundle)

    def slot_of_a_closed_model(batch: Batch) -> Slot:
        model.close()  # as another thread may, between the last check and the slot
        return Slot(batch)

    monkeypatch.setattr("ondevice.generate.batch.Slot", slot_of_a_closed_model)
    assert model.generate(PROMPT).finish_reason == "cancelled"
    assert not len(model._scheduler.batch)


def test_a_closed_model_keeps_no_drafter(bundle: Path) -> None:
    model = model_over(ToyEngine(), bundle)
    model.generate(PROMPT, max_new_tokens=5, drafter="ngram")
    drafters = [weakref.ref(drafter) for each in model._scheduler._drafters.items() for drafter in each]
    model.close()
    gc.collect()
    assert [drafter() for drafter in drafters] == [None]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # struck inside a weakref callback
@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs POSIX timers")
def test_no_interrupt_leaves_a_model_busy(bundle: Path) -> None:
    """Ctrl-C at any moment of short generations, with another one beside it."""
    rng = np.random.default_rng(0)
    engine = ToyEngine()
    model = model_over(engine, bundle, max_sequences=2)
    expected, beside = plain(bundle, PROMPT, max_new_tokens=6), plain(bundle, ids(20), max_new_tokens=40)
    stop, wrong = threading.Event(), []

    def other() -> None:
        while not stop.is_set():
            found = model.generate(ids(20), max_new_tokens=40).token_ids
            if found != beside:
                wrong.append(found)

    def strike(*_: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, strike)
    thread = in_thread(other)
    interrupted = 0
    try:
        for _ in range(400):
            try:
                signal.setitimer(signal.ITIMER_REAL, float(rng.uniform(2e-5, 6e-3)))
                with model.stream(PROMPT, max_new_tokens=6) as stream:
                    tokens = [token for step in stream for token in step.token_ids]
                signal.setitimer(signal.ITIMER_REAL, 0)
                assert tuple(tokens) == expected
            except KeyboardInterrupt:
                interrupted += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, previous)
        stop.set()
        join(thread)
    assert interrupted > 20
    assert not wrong
    gc.collect()
    assert free(model)
    assert model.generate(PROMPT, max_new_tokens=6).token_ids == expected
    model.close()
