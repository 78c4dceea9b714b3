"""Several sequences over the toy engine: equal text, shared forwards, fair turns, trouble that stays where it is."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import numpy as np
import pytest
from numpy.typing import NDArray

from ondevice.engines.protocol import Rows, TokenTree
from ondevice.errors import UsageError
from ondevice.generate import batch as batch_module
from ondevice.generate.batch import FIRST_PREFILL_CHUNK, PREFILL_DELAY_S, Batch, ForwardTimes, Slot, _first_rows
from ondevice.generate.loop import Loop, generate, run
from ondevice.generate.request import Limits, SamplingOptions
from ondevice.generate.sampling.sampler import Sampler
from ondevice.generate.stats import Round
from tests.fixtures.toy_engine import VOCAB, Clock, ToyEngine

FORWARD_S = 0.004
"""Seconds of a forward of one row per sequence."""


def prompt(seed: int, count: int = 20) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, count).tolist()


def generated(
    batch: Batch, prompt_ids: list[int], tokens: int, joined: Callable[[], object] = lambda: None
) -> list[int]:
    """A whole generation, read as fast as possible; `joined` is called when it has its slot."""
    slot = batch.join()
    assert slot is not None
    joined()
    session = batch._engine.open_session()
    found: list[int] = []
    try:
        for this in run(generate(session, prompt_ids, Sampler(SamplingOptions(0.0)), Limits(tokens)), slot.forward):
            found += this.token_ids
            slot.pause()
            slot.resume()
    finally:
        slot.leave()
    return found


def awaited(
    clock: Clock, count: int, before: Callable[[Sequence[Rows]], None] = lambda batch: None
) -> tuple[ToyEngine, Batch]:
    """An engine whose forwards end when the readers of its batch are back: all must have joined before one submits."""

    def forward(rows: Sequence[Rows]) -> None:
        clock.now += FORWARD_S
        while len(batch) > 1 and any(slot._rows is None for slot in batch._slots):
            time.sleep(0.0002)
        before(rows)

    engine = ToyEngine(before=forward)
    batch = Batch(engine, count)
    return engine, batch


def in_threads(*jobs: Callable[[], object]) -> list[object]:
    """The result of each job, or the error that it raised."""
    results: list[object] = [None] * len(jobs)

    def work(index: int, job: Callable[[], object]) -> None:
        try:
            results[index] = job()
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=work, args=pair) for pair in enumerate(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)
        assert not thread.is_alive()
    return results


def alone(prompt_ids: list[int], tokens: int) -> list[int]:
    return generated(Batch(ToyEngine(), 1), prompt_ids, tokens)


def test_one_sequence_has_forwards_of_its_own() -> None:
    engine = ToyEngine()
    batch = Batch(engine, 4)
    assert generated(batch, prompt(0), 30) == alone(prompt(0), 30)
    assert engine.batches == [[20], *[[1]] * 29]
    assert len(batch) == 0


@pytest.mark.parametrize("count", [2, 4, 7])
def test_many_sequences_share_forwards_and_change_nothing(clock: Clock, count: int) -> None:
    (engine, batch), together = awaited(clock, count), threading.Barrier(count)
    jobs = [
        lambda seed=seed: generated(batch, prompt(seed, 30 + 10 * seed), 40, together.wait) for seed in range(count)
    ]
    assert in_threads(*jobs) == [alone(prompt(seed, 30 + 10 * seed), 40) for seed in range(count)]
    decoded = [rows for rows in engine.batches if set(rows) == {1}]
    assert np.mean([len(rows) for rows in decoded]) > 0.8 * count


def test_a_reader_in_turn_with_others_is_not_waited_for(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread that reads two generations by turns: neither can come while the other one runs."""
    waits: list[float] = []

    def wait(wakeup: SimpleQueue[None], seconds: float) -> None:
        waits.append(seconds)
        clock.now += seconds

    monkeypatch.setattr(batch_module, "_sleep", wait)
    engine = ToyEngine(before=clock.taking(FORWARD_S))
    batch = Batch(engine, 2)
    loops = []
    for seed in (0, 1):
        slot = batch.join()
        assert slot is not None
        sampler = Sampler(SamplingOptions(0.0))
        loops.append((slot, run(generate(engine.open_session(), prompt(seed), sampler, Limits(30)), slot.forward)))
    found: list[list[int]] = [[], []]
    for _ in range(30):
        for tokens, (slot, rounds) in zip(found, loops, strict=True):
            slot.resume()
            tokens.extend(next(rounds).token_ids)
            slot.pause()
    assert found == [alone(prompt(seed), 30) for seed in (0, 1)]
    assert sum(waits) < FORWARD_S


class Waiting:
    """Slots whose rows are there, without threads."""

    def __init__(self, engine: ToyEngine, *trees: TokenTree) -> None:
        self.batch = Batch(engine, 16)
        self.slots: list[Slot] = []
        for tree in trees:
            self.add(tree)

    def add(self, tree: TokenTree, *, decoding: bool = False, blocks: Sequence[tuple[int, int]] = ()) -> None:
        slot = self.batch.join()
        assert slot is not None
        wanted = range(len(tree)) if decoding else [len(tree) - 1]
        slot.decoding = decoding
        slot._submit(Rows(self.batch._engine.open_session(), tree, wanted, blocks=blocks))
        self.slots.append(slot)

    def selected(self) -> list[tuple[int, int]]:
        """Which slots take part in the next forward, with how many rows."""
        return [(self.slots.index(slot), len(rows.tree)) for slot, rows in self.batch._select()]


def chain(count: int) -> TokenTree:
    return TokenTree.chain([1] * count)


def test_short_prompts_share_a_forward_and_long_ones_take_turns() -> None:
    waiting = Waiting(ToyEngine(chunk=64), chain(20), chain(30), chain(60), chain(14))
    assert waiting.selected() == [(0, 20), (1, 30), (3, 14)]
    assert Waiting(ToyEngine(chunk=64), chain(64), chain(64)).selected() == [(0, 64)]


def test_a_prefill_beside_decoding_sequences_is_cut() -> None:
    waiting = Waiting(ToyEngine(chunk=512), chain(500))
    waiting.add(chain(5), decoding=True)
    waiting.add(chain(1), decoding=True)
    assert waiting.selected() == [(1, 5), (2, 1), (0, FIRST_PREFILL_CHUNK)]
    waiting.batch.times = ForwardTimes(decode_s=0.05, prefill_row_s=0.002)
    assert waiting.selected() == [(1, 5), (2, 1), (0, 75)]
    waiting.batch.times = ForwardTimes(decode_s=0.05, prefill_row_s=2.0)
    assert waiting.selected() == [(1, 5), (2, 1), (0, 1)]


def test_drafts_that_do_not_fit_together_take_turns() -> None:
    waiting = Waiting(ToyEngine(chunk=64))
    for count in (40, 30, 20):
        waiting.add(chain(count), decoding=True)
    assert waiting.selected() == [(0, 40), (2, 20)]
    waiting.batch._done(waiting.slots[0])
    waiting.batch._done(waiting.slots[2])
    assert waiting.selected() == [(1, 30)]


def test_a_block_is_never_cut() -> None:
    waiting = Waiting(ToyEngine(chunk=512))
    waiting.add(chain(500), blocks=[(30, 40), (60, 100)])
    waiting.add(chain(5), decoding=True)
    for row_s, count in ((0.15 / 35, 30), (0.15 / 50, 50), (0.15 / 75, 60), (0.15 / 110, 110)):
        waiting.batch.times = ForwardTimes(decode_s=0.05, prefill_row_s=0.9999 * row_s)
        assert waiting.selected() == [(1, 5), (0, count)]
    ((_, rows),) = [each for each in waiting.batch._select() if each[0] is waiting.slots[0]]
    assert list(rows.blocks) == [(30, 40), (60, 100)]
    assert _first_rows(rows, 45).blocks == [(30, 40)]


def test_a_prefill_that_just_fits_keeps_all_the_rows_that_it_wants() -> None:
    rows = Rows(ToyEngine().open_session(), chain(20), range(20))
    assert list(_first_rows(rows, 20).wanted) == list(range(20))
    assert list(_first_rows(rows, 19).wanted) == [18]


def test_a_block_that_comes_first_is_run_whole_whatever_it_takes() -> None:
    waiting = Waiting(ToyEngine(chunk=512))
    waiting.add(chain(300), blocks=[(0, 280)])
    waiting.add(chain(5), decoding=True)
    waiting.batch.times = ForwardTimes(decode_s=0.05, prefill_row_s=0.15)
    assert waiting.selected() == [(1, 5), (0, 280)]
    for _ in range(14):
        waiting.add(chain(17), decoding=True)
    assert waiting.selected() == [(0, 280)]  # the sequences that decode have no room beside it


def test_a_prefill_is_whole_again_when_nobody_reads_the_others(clock: Clock) -> None:
    waiting = Waiting(ToyEngine(chunk=512), chain(500))
    other = waiting.batch.join()
    assert other is not None
    other.decoding = True
    other.pause()
    assert waiting.selected() == [(0, FIRST_PREFILL_CHUNK)]
    clock.now += 1.01 * PREFILL_DELAY_S
    assert waiting.selected() == [(0, 500)]


def test_a_prefill_is_cut_beside_a_sequence_that_decoded_alone_so_far(clock: Clock) -> None:
    waiting = Waiting(ToyEngine(chunk=512))
    slot = waiting.batch.join()
    assert slot is not None
    session = waiting.batch._engine.open_session()
    rounds = run(generate(session, prompt(0), Sampler(SamplingOptions(0.0)), Limits(9)), slot.forward)
    next(rounds), next(rounds)
    slot.pause()
    waiting.add(chain(500))
    assert waiting.selected() == [(0, FIRST_PREFILL_CHUNK)]


class Generations:
    """Generations that share forwards without threads: all of them submit their rows, then one forward is run."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.running: list[tuple[Slot, Loop, list[int]]] = []

    def begin(self, prompt_ids: list[int], tokens: int) -> list[int]:
        """Returns the list that the tokens will be appended to."""
        slot, text = self.batch.join(), list[int]()
        assert slot is not None
        loop = generate(self.batch._engine.open_session(), prompt_ids, Sampler(SamplingOptions(0.0)), Limits(tokens))
        self.running.append((slot, loop, text))
        self._submit(slot, loop, text, next(loop))
        return text

    def forward(self) -> None:
        """Run one forward, and submit the next rows of the generations that took part."""
        self.batch._drive(self.running[0][0])
        for slot, loop, text in list(self.running):
            if slot._rows is None:
                self._submit(slot, loop, text, loop.send(slot._outputs))

    def _submit(self, slot: Slot, loop: Loop, text: list[int], item: Rows | Round | None) -> None:
        while isinstance(item, Round):
            text += item.token_ids
            item = next(loop, None)
        if item is None:
            slot.leave()
            self.running.remove((slot, loop, text))
            return
        slot.decoding = len(item.wanted) == len(item.tree)
        slot._submit(item)


def test_cut_prefills_take_turns_and_lose_nothing(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two long prompts while others decode: both get on, nobody is held up, the text is the same."""
    monkeypatch.setattr(batch_module, "PREFILL_DELAY_S", 3 * FORWARD_S)

    def slower(batch: Sequence[Rows]) -> None:
        clock.now += FORWARD_S + 0.0002 * sum(len(rows.tree) - 1 for rows in batch)

    engine = ToyEngine(chunk=512, before=slower)
    generations = Generations(Batch(engine, 4))
    found = [generations.begin(prompt(seed), 60) for seed in (0, 1)]
    while len(found[0]) < 6:
        generations.forward()
    found += [generations.begin(prompt(seed, 300), 5) for seed in (2, 3)]
    while generations.running:
        generations.forward()
    assert found == [alone(prompt(0), 60), alone(prompt(1), 60), alone(prompt(2, 300), 5), alone(prompt(3, 300), 5)]
    shared = [rows for rows in engine.batches if rows[:2] == [1, 1] and len(rows) > 2]
    assert len(shared) > 10
    assert max(sum(rows[2:]) for rows in shared) == 60, "12 ms"


def test_the_pace_of_a_prefill_is_what_it_adds() -> None:
    times = ForwardTimes()
    assert times.prefill_chunk() == FIRST_PREFILL_CHUNK
    times.observe(rows=4, wanted=4, prefilling=0, seconds=0.05)
    times.observe(rows=50, wanted=4, prefilling=1, seconds=0.144)
    assert times.prefill_row_s == pytest.approx(0.002)
    assert times.prefill_chunk() == 75
    times.observe(rows=512, wanted=1, prefilling=1, seconds=1.024)
    assert times.prefill_row_s == pytest.approx(0.002)


def test_slots_are_given_in_order() -> None:
    batch = Batch(ToyEngine(), 1)
    first = batch.join()
    assert first is not None
    order: list[int] = []
    threads = []

    def work(number: int) -> None:
        slot = batch.join()
        assert slot is not None
        order.append(number)
        slot.leave()

    for number in range(5):
        threads.append(threading.Thread(target=work, args=(number,)))
        threads[-1].start()
        while len(batch._queue) <= number:
            time.sleep(0.001)
    assert order == []
    first.leave()
    for thread in threads:
        thread.join(timeout=300)
    assert order == [0, 1, 2, 3, 4]


def test_waiting_for_a_slot_can_be_cancelled() -> None:
    batch = Batch(ToyEngine(), 1)
    slot = batch.join()
    assert slot is not None
    cancelled = False

    def cancel() -> None:
        nonlocal cancelled
        time.sleep(0.05)
        cancelled = True
        batch.wake()

    results = in_threads(lambda: batch.join(lambda: cancelled), cancel)
    assert results[0] is None
    assert not batch._queue
    slot.leave()
    assert batch.join() is not None


def test_a_thread_does_not_wait_for_itself() -> None:
    batch = Batch(ToyEngine(), 2)
    slots = [batch.join(), batch.join()]
    for slot in slots:
        assert slot is not None
        slot.pause()
    with pytest.raises(UsageError, match=r"this thread has 2 unfinished generations.*max_sequences"):
        batch.join()
    assert not batch._queue
    first = slots[0]
    assert first is not None
    in_threads(first.resume)  # another thread's now: it may come to an end
    waiting = threading.Thread(target=batch.join)
    waiting.start()
    first.leave()
    waiting.join(timeout=300)
    assert not waiting.is_alive()


def test_threads_do_not_wait_for_each_other() -> None:
    """Each has a slot and asks for a second one: the last to ask is told, and the other gets the one that it leaves."""
    batch, both, told = Batch(ToyEngine(), 2), threading.Barrier(2), list[str]()

    def run() -> None:
        own = batch.join()
        assert own is not None
        own.pause()
        both.wait(timeout=300)
        try:
            further = batch.join()
            assert further is not None
            further.leave()
        except UsageError as error:
            told.append(str(error))
        own.leave()

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)
        assert not thread.is_alive()
    [message] = told
    assert message.startswith("2 threads with an unfinished generation each wait for another one")
    assert len(batch) == 0


def test_a_slot_that_was_lost_becomes_free() -> None:
    batch = Batch(ToyEngine(), 1)
    slot = batch.join()
    assert slot is not None
    del slot
    gc.collect()
    assert len(batch) == 0
    assert batch.join() is not None


@pytest.mark.parametrize("places", [0, 17, -1])
def test_so_many_places_there_are_not(places: int) -> None:
    with pytest.raises(UsageError, match=f"max_sequences must be within 1 to 16, not {places}"):
        Batch(ToyEngine(), places)


def test_trouble_of_one_sequence_is_its_own(clock: Clock) -> None:
    """A session that is closed under its own generation, as nobody should: the others never hear of it."""
    (engine, batch), together = awaited(clock, 3), threading.Barrier(3)

    def doomed() -> None:
        slot = batch.join()
        assert slot is not None
        together.wait()
        session = engine.open_session()
        try:
            loop = generate(session, prompt(9), Sampler(SamplingOptions(0.0)), Limits(50))
            for count, _ in enumerate(run(loop, slot.forward)):
                if count == 10:
                    session.close()
        finally:
            slot.leave()

    jobs = [lambda seed=seed: generated(batch, prompt(seed), 50, together.wait) for seed in (1, 2)]
    error, *texts = in_threads(doomed, *jobs)
    assert isinstance(error, UsageError)
    assert texts == [alone(prompt(1), 50), alone(prompt(2), 50)]
    assert len(batch) == 0


def test_a_forward_without_enough_memory_keeps_none() -> None:
    """Its sequences run alone then; nothing of it waits for the garbage collector."""
    buffers: list[weakref.ref[NDArray[np.uint8]]] = []

    def fail(batch: Sequence[Rows]) -> None:
        if len(batch) > 1:
            buffer = np.zeros(1 << 16, np.uint8)
            buffers.append(weakref.ref(buffer))
            raise MemoryError

    waiting = Waiting(ToyEngine(before=fail), chain(3), chain(4))
    gc.disable()
    try:
        waiting.batch._drive(waiting.slots[0])
        assert [buffer() is None for buffer in buffers] == [True]
    finally:
        gc.enable()
    assert [slot._outputs is not None for slot in waiting.slots] == [True, True]


def test_an_error_that_a_second_try_does_not_have_is_forgotten() -> None:
    """Memory is short, and the leader is interrupted while it runs each sequence alone; the next one runs them anew."""
    forwards = iter([MemoryError, MemoryError, KeyboardInterrupt])

    def fail(batch: Sequence[Rows]) -> None:
        if (error := next(forwards, None)) is not None:
            raise error

    waiting = Waiting(ToyEngine(before=fail), chain(3), chain(4))
    first, second = waiting.slots
    with pytest.raises(KeyboardInterrupt):
        waiting.batch._drive(second)
    waiting.batch._drive(first)
    assert [slot._error for slot in waiting.slots] == [None, None]
    assert [slot._outputs is not None for slot in waiting.slots] == [True, True]


def test_an_interrupt_of_the_leader_harms_nobody_else(clock: Clock) -> None:
    """Whichever thread runs a shared forward when it is interrupted: that one ends, the others run it again."""
    struck: list[int] = []

    def strike(batch: Sequence[Rows]) -> None:
        if len(batch) == 3 and not struck:
            struck.append(threading.get_ident())
            raise KeyboardInterrupt

    (_, batch), together = awaited(clock, 3, strike), threading.Barrier(3)
    results = in_threads(*[lambda seed=seed: generated(batch, prompt(seed), 40, together.wait) for seed in range(3)])
    interrupted = [seed for seed, result in enumerate(results) if isinstance(result, KeyboardInterrupt)]
    assert len(interrupted) == len(struck) == 1
    for seed in {0, 1, 2} - set(interrupted):
        assert results[seed] == alone(prompt(seed), 40)
    assert not batch._submitted
    assert len(batch) == 0
