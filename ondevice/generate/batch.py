"""Continuous batching: sequences that generate at the same time share the forwards of one engine.

Rows are nearly free, so four sequences in one forward take little longer than one. Each sequence holds a `Slot` of the
`Batch`. A slot submits rows with `Slot.forward`, which returns when they were run.

There is no engine thread. The threads that read generations run the forwards: a thread that submits rows while no
forward is being prepared becomes the driver, collects the rows of all slots and runs one forward for them; the others
sleep on their wakeup events. So a sequence that runs alone needs no second thread, which matters because waking one
takes 50 us, a fifth of a small model's token.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import TypeVar

from ondevice.engines.protocol import MAX_SESSIONS, Engine, Outputs, Rows, TokenTree
from ondevice.errors import UsageError
from ondevice.forks import ReentrantLock

PREFILL_DELAY_S = 0.15
"""Seconds that a prefill chunk may add to the forwards of sequences that are decoding. A slot whose reader stays away
for longer is no longer taken into account."""

FIRST_PREFILL_CHUNK = 32
"""Rows of a prefill chunk next to decoding sequences until the time of a row is known."""

READER_WAIT = 0.1
"""Share of a forward's time for which the driver waits for a reader that usually comes back within it. A slower one
takes part in the next forward."""

POLL_S = 0.05
"""Seconds after which a sleeping thread checks its condition without a wakeup: the thread that should have sent it may
have been interrupted."""

WakeupEvent = SimpleQueue[None]
"""A thread sleeps until an item is put. Not a condition variable: those are written in Python, and Ctrl-C inside one
can leave its lock held forever."""


class Turn:
    """A request that waits for a slot.

    thread : identifier of the thread that waits
    """

    def __init__(self) -> None:
        self.wakeup: WakeupEvent = SimpleQueue()
        self.thread = threading.get_ident()


class Slot:
    """The right of one sequence to take part in forwards, from its first to its last. Used by one thread at a time.

    Attributes:
        decoding: whether the outputs of all rows submitted last are wanted, as in a decoding round; such rows are run
            together. Otherwise they are a prefill, which may be cut.
        paused: whether the reader has a round, and has not asked for the next one. Until it has rows to submit after
            that, its thread is preparing them.
        thread: identifier of the thread that read the sequence last.
    """

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self.paused = False
        self._since = perf_counter()
        """When it was paused or resumed, when its rows were submitted, or when they were run, whichever came last."""
        self._last_pause_s = 0.0
        self._rows: Rows | None = None
        """The submitted rows, which wait for a forward; None once they were run. This alone says whether they wait, and
        it is written last: an interrupt between two writes leaves nothing half done."""
        self._outputs: Outputs | None = None
        self._error: Exception | None = None
        self._wakeup: WakeupEvent = SimpleQueue()
        self.decoding = False
        self.thread = threading.get_ident()

    def forward(self, rows: Rows) -> Outputs:
        """Run these rows, together with those of other slots. Of a prefill, perhaps only the first rows are run; the
        outputs are then those of the last row that was.

        Raises:
            Exception: whatever the engine raises for these rows; other slots are not affected.
        """
        self.decoding = len(rows.wanted) == len(rows.tree)
        return self._batch._forward(self, rows)

    def pause(self) -> None:
        """A round goes to the reader, who may take any time before asking for the next one."""
        self.paused, self._since = True, perf_counter()

    def resume(self) -> None:
        """The reader has asked for the next round."""
        now = perf_counter()
        self.paused, self._since, self._last_pause_s = False, now, now - self._since
        self.thread = threading.get_ident()

    def leave(self) -> None:
        """The sequence has ended: free the slot for a waiting request."""
        self._batch._leave(self)

    def _submit(self, rows: Rows) -> None:
        self._outputs, self._error, self._since = None, None, perf_counter()
        self._rows = rows

    def _is_abandoned(self) -> bool:
        """Whether its reader has not asked for the next round for so long that prefills need not respect it."""
        return self.paused and perf_counter() - self._since > PREFILL_DELAY_S

    def _expected_in(self, now: float, forward_s: float) -> float:
        """Seconds that a forward of `forward_s` seconds should still wait for this slot's rows; 0 or less: none."""
        if self._rows is not None:
            return 0.0
        patience = READER_WAIT * forward_s if self.paused else forward_s
        if self.paused and self._last_pause_s > patience:
            return 0.0
        return self._since + patience - now


@dataclass
class ForwardTimes:
    """Measured times of forwards, from which the size of prefill chunks follows. 0.0 before the first measurement.

    decode_s : seconds of the last forward without a prefill
    prefill_row_s : seconds that a row of a prefill adds to a forward
    """

    decode_s: float = 0.0
    prefill_row_s: float = 0.0

    def observe(self, rows: int, wanted: int, prefilling: int, seconds: float) -> None:
        """Learn from a forward of `rows` rows, of which the outputs of `wanted` were needed, with `prefilling` prefills
        among its sequences.
        """
        if not prefilling:
            self.decode_s = seconds
            return
        decode_s = self.decode_s if wanted > prefilling else 0.0
        row_s = max(seconds - decode_s, 0.1 * seconds) / (rows - wanted + prefilling)
        self.prefill_row_s = row_s if not self.prefill_row_s else (self.prefill_row_s + row_s) / 2

    def prefill_chunk(self) -> int:
        """Rows of prefills that delay decoding sequences by no more than PREFILL_DELAY_S."""
        return max(1, int(PREFILL_DELAY_S / self.prefill_row_s)) if self.prefill_row_s else FIRST_PREFILL_CHUNK


class Batch:
    """The slots of an engine, the queue of requests that wait for one, and the shared forwards.

    A forward has no thread of its own. Each thread that submits rows sleeps until they were run; one of them, the
    driver, gathers the submitted rows of all and runs a forward with them. Its own rows are among them, so that it then
    resigns and returns to its reader, and the thread of another slot, if its rows still wait, becomes the driver:

        _forward         rows submitted -> asleep, or driver -> rows were run
        _becomes_driver  asleep, until one or the other
        _resign          the driver's place is free; wakes those that wait
        _retract         an exception: rows are taken back, when no running forward can include them

    Fairness: a decoding sequence takes part in every forward, or where not all drafts fit, in a later one. Of prefills,
    the one that has waited longest comes first, in chunks that do not delay decoding sequences for long.
    """

    def __init__(self, engine: Engine, max_sequences: int) -> None:
        """
        Args:
            engine: runs the forwards.
            max_sequences: number of slots, up to MAX_SESSIONS; further requests wait.

        Raises:
            UsageError: another number.
        """
        if not 0 < max_sequences <= MAX_SESSIONS:
            raise UsageError(f"max_sequences must be within 1 to {MAX_SESSIONS}, not {max_sequences}")
        self._engine = engine
        self._max_slots = max_sequences
        self._lock = ReentrantLock()  # reentrant: a signal handler may call `wake` while its own thread holds it
        self._references: list[weakref.ref[Slot]] = []
        """The slots in use. Weak, so that a slot whose owner was lost to an interrupt becomes free."""
        self._queue: list[weakref.ref[Turn]] = []
        """Requests that wait for a slot, first come, first served. Weak for the same reason: one that an interrupt has
        left behind would be waited for by all later ones."""
        self._driver: Slot | None = None
        """The slot whose thread runs the next forward."""
        self.times = ForwardTimes()

    def __len__(self) -> int:
        """Number of slots in use."""
        return len(self._slots)

    @property
    def _slots(self) -> list[Slot]:
        return _alive(self._references)

    @property
    def _turns(self) -> list[Turn]:
        return _alive(self._queue)

    @property
    def _submitted(self) -> list[Slot]:
        """Slots whose rows wait for a forward, oldest first. Looked up, not kept: a list beside `Slot._rows` held a
        slot twice after an interrupt between two writes, and so did the next forward."""
        return sorted((slot for slot in self._slots if slot._rows is not None), key=lambda slot: slot._since)

    # The queue for slots.

    def join(self, cancelled: Callable[[], bool] = lambda: False) -> Slot | None:
        """Wait for a free slot and take it.

        Args:
            cancelled: called now and then, and after every `wake`.

        Returns:
            The slot; None if `cancelled` returned True before one was free.

        Raises:
            UsageError: all slots belong to unfinished generations of threads that wait for a slot themselves, as this
                one does; this call may come from a callback of one of them.
        """
        turn = Turn()
        try:
            with self._lock.lock:
                self._queue.append(weakref.ref(turn))
            while not cancelled():
                with self._lock.lock:
                    if self._turns[0] is turn and len(self._slots) < self._max_slots:
                        slot = Slot(self)
                        self._references = [weakref.ref(each) for each in (*self._slots, slot)]
                        return slot
                    self._check_others()
                _sleep(turn.wakeup, POLL_S)
            return None
        finally:
            with self._lock.lock:
                self._queue = [weakref.ref(each) for each in self._turns if each is not turn]
            self.wake()

    def wake(self) -> None:
        """Let all waiting requests check whether a slot is free, or whether they were cancelled."""
        with self._lock.lock:
            for turn in self._turns:
                turn.wakeup.put(None)

    def _check_others(self) -> None:
        """Raise UsageError if no slot can become free while the threads wait that have them."""
        slots, waiting = self._slots, {turn.thread for turn in self._turns}
        if len(slots) < self._max_slots or not all(slot.thread in waiting for slot in slots):
            return
        if len({slot.thread for slot in slots}) == 1:
            who = f"this thread has {len(slots)} unfinished generation{'s' if len(slots) > 1 else ''}"
        else:
            who = f"{len(slots)} threads with an unfinished generation each wait for another one"
        raise UsageError(
            f"{who}, and the model runs {self._max_slots} at a time: finish or close one of them, or load the model "
            "with a larger max_sequences"
        )

    def _leave(self, slot: Slot) -> None:
        with self._lock.lock:
            self._references = [weakref.ref(each) for each in self._slots if each is not slot]
            if self._driver is not None:
                self._driver._wakeup.put(None)
        self._resign(slot)
        self.wake()

    # One forward, as a submitting thread sees it.

    def _forward(self, slot: Slot, rows: Rows) -> Outputs:
        """Submit rows, and sleep or drive forwards until they were run."""
        if len(self._slots) == 1:
            (outputs,) = self._engine.forward([rows])
            self._learn([rows], outputs)
            return outputs
        try:
            with self._lock.lock:
                slot._submit(rows)
                if self._driver is not None:
                    self._driver._wakeup.put(None)
            while self._becomes_driver(slot):
                self._drive(slot)
                self._resign(slot)
        except BaseException:
            self._resign(slot)
            self._retract(slot)
            raise
        if slot._error is not None:
            raise slot._error
        assert slot._outputs is not None
        return slot._outputs

    def _becomes_driver(self, slot: Slot) -> bool:
        """Sleep until the slot's rows were run (False), or until there is no driver: then this slot is (True)."""
        while True:
            with self._lock.lock:
                if slot._rows is None:
                    return False
                if self._driver is None or self._driver not in self._slots:
                    self._driver = slot
                    return True
            _sleep(slot._wakeup, POLL_S)

    def _resign(self, slot: Slot) -> None:
        """Stop being the driver, and wake the slots whose rows still wait: one of them will be."""
        with self._lock.lock:
            if self._driver is slot:
                self._driver = None
                for each in self._submitted:
                    each._wakeup.put(None)

    def _retract(self, slot: Slot) -> None:
        """Take back rows that were not run, once no running forward can include them."""
        while True:
            with self._lock.lock:
                if slot._rows is None or self._driver is None or self._driver not in self._slots:
                    self._done(slot)
                    return
            _sleep(slot._wakeup, POLL_S)

    # One forward, as the driver runs it: gather, select, run, hand out the outputs.

    def _drive(self, driver: Slot) -> None:
        self._gather(driver)
        with self._lock.lock:
            selected = self._select()
        batch = [rows for _, rows in selected]
        try:
            outputs = self._engine.forward(batch)
        except Exception as error:
            if not self._run_alone(selected) and not isinstance(error, MemoryError):
                raise  # of no rows: a signal handler's, such as a time limit, which belongs to this thread
            return
        for (slot, _), output in zip(selected, outputs, strict=True):
            slot._outputs, slot._error = output, None
        self._learn(batch, outputs[0])
        for slot, _ in selected:
            self._done(slot)

    def _run_alone(self, selected: Sequence[tuple[Slot, Rows]]) -> bool:
        """Find the rows at fault for an error by running each sequence alone; whether there are any."""
        for slot, rows in selected:
            try:
                (slot._outputs,), slot._error = self._engine.forward([rows]), None
            except Exception as error:
                slot._error = error
        found = any(slot._error is not None for slot, _ in selected)
        for slot, _ in selected:
            self._done(slot)
        return found

    def _gather(self, driver: Slot) -> None:
        """Wait for slots whose rows are expected within a moment."""
        while True:
            with self._lock.lock:
                now = perf_counter()
                patience = max((slot._expected_in(now, self.times.decode_s) for slot in self._slots), default=0.0)
            if patience <= 0:
                return
            _sleep(driver._wakeup, patience)

    def _select(self) -> list[tuple[Slot, Rows]]:
        """The rows of the next forward: those of decoding slots, then prefill chunks, as far as they fit."""
        room, selected = self._engine.most_rows, list[tuple[Slot, Rows]]()
        for slot in self._submitted:
            rows = slot._rows
            if rows is not None and slot.decoding and len(rows.tree) <= room:
                selected.append((slot, rows))
                room -= len(rows.tree)
        if any(slot.decoding and not slot._is_abandoned() for slot in self._slots):
            room = min(room, self.times.prefill_chunk())
        prefills: list[tuple[Slot, Rows]] = []
        for slot in self._submitted:
            rows = slot._rows
            if rows is None or slot.decoding or room <= 0:
                continue
            if len(rows.tree) > room and prefills:
                continue  # not cut: it will have waited longest, and come first, in a later forward
            prefills.append((slot, _first_rows(rows, room)))
            room -= len(prefills[-1][1].tree)
            if room < 0 and sum(len(each.tree) for _, each in [*selected, *prefills]) > self._engine.most_rows:
                return prefills  # a block that fits only alone: decoding sequences wait for one forward
        return [*selected, *prefills]

    def _learn(self, batch: Sequence[Rows], outputs: Outputs) -> None:
        prefilling = sum(len(rows.wanted) < len(rows.tree) for rows in batch)
        self.times.observe(outputs.rows, outputs.wanted, prefilling, outputs.seconds)

    def _done(self, slot: Slot) -> None:
        """The rows of a slot were run, or never will be: wake its thread."""
        with self._lock.lock:
            # its next rows are expected from now on, although its thread may not be awake yet
            slot._since = perf_counter()
            slot._rows = None
            slot._wakeup.put(None)


Referent = TypeVar("Referent")


def _alive(references: Iterable[weakref.ref[Referent]]) -> list[Referent]:
    return [each for reference in references if (each := reference()) is not None]


def _sleep(wakeup: WakeupEvent, seconds: float) -> None:
    """Sleep until a wakeup, for so long at most. The caller must check its condition again in either case."""
    with suppress(Empty):
        wakeup.get(timeout=seconds)


def _first_rows(rows: Rows, count: int) -> Rows:
    """The first `count` rows of a prefill, or where a block would be cut, more or fewer; the last one's outputs are
    wanted.
    """
    for begin, end in rows.blocks:
        if begin < count < end:
            count = begin or end
    if len(rows.tree) <= count:
        return rows
    tokens, soft = rows.tree.tokens[:count], rows.soft
    if soft is not None:
        soft = soft[: int((tokens < 0).sum())]
    blocks = [block for block in rows.blocks if block[1] <= count]
    return Rows(rows.session, TokenTree.chain(tokens.tolist()), [count - 1], soft=soft, blocks=blocks)
