"""The sequences of a model that generate at the same time, and the forwards that they share.

Rows are nearly free, so four sequences in one forward take little longer than one. Every sequence is driven by the
thread that reads it; whoever finds nobody at it runs the next forward, for all whose rows are there. So a sequence that
is alone costs no second thread: waking one takes 50 us, a fifth of a small model's token.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import Literal

from ondevice.engines.protocol import MOST_SESSIONS, Engine, Outputs, Rows, TokenTree
from ondevice.errors import UsageError

HOLD_S = 0.15
"""Seconds that a prefill may add to the forwards of sequences that are decoding."""

FIRST_SHARE = 32
"""Rows of a prefill beside decoding sequences until it is known how long a row takes."""

PATIENCE = 0.1
"""Share of a forward's time for which a reader that is usually quick is waited for: one who comes later takes part in
the next forward only."""

POLL_S = 0.05
"""Seconds between looks of a thread that nobody wakes: whoever should have may have been interrupted."""


Bell = SimpleQueue[None]
"""What a thread sleeps on. Not a condition variable: those are written in Python, and Ctrl-C inside one of them can
leave its lock held for ever."""


class Seat:
    """A sequence's place in a batch, from its first forward to its end. Used by one thread at a time."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._state: Literal["busy", "waiting", "away"] = "busy"
        self._since = perf_counter()
        self._away_s = 0.0
        self._rows: Rows | None = None
        self._outputs: Outputs | None = None
        self._error: Exception | None = None
        self._bell: Bell = SimpleQueue()
        self.decoding = False
        self.thread = threading.get_ident()

    def forward(self, rows: Rows) -> Outputs:
        """Run these rows, with those of others who are there; of a prefill perhaps only the first ones."""
        self.decoding = len(rows.wanted) == len(rows.tree)
        return self._batch._forward(self, rows)

    def pause(self) -> None:
        """A round goes to the reader: nobody knows when this sequence will go on."""
        self._state, self._since = "away", perf_counter()

    def resume(self) -> None:
        now = perf_counter()
        self._state, self._since, self._away_s = "busy", now, now - self._since
        self.thread = threading.get_ident()

    @property
    def paused(self) -> bool:
        return self._state == "away"

    def leave(self) -> None:
        """The sequence has ended; whoever waits for a place may have this one."""
        self._batch._leave(self)

    def _is_idle(self) -> bool:
        """Whether nobody is waiting for its next round."""
        return self._state == "away" and perf_counter() - self._since > HOLD_S

    def _expected(self, now: float, forward_s: float) -> float:
        """Seconds for which a forward that would take `forward_s` should wait for this sequence's rows."""
        if self._state == "waiting":
            return 0.0
        patience = PATIENCE * forward_s if self._state == "away" else forward_s
        if self._state == "away" and self._away_s > patience:
            return 0.0
        return self._since + patience - now


@dataclass
class Pace:
    """What forwards take here, as far as it is known: 0.0 before the first.

    decode_s : seconds of one in which every row was wanted
    prefill_row_s : seconds that a row of a prefill adds
    """

    decode_s: float = 0.0
    prefill_row_s: float = 0.0

    def observe(self, rows: int, wanted: int, prefilling: int, seconds: float) -> None:
        """A forward of so many rows, of sequences of which `prefilling` had rows that were not wanted."""
        if not prefilling:
            self.decode_s = seconds
            return
        beside = self.decode_s if wanted > prefilling else 0.0
        row_s = max(seconds - beside, 0.1 * seconds) / (rows - wanted + prefilling)
        self.prefill_row_s = row_s if not self.prefill_row_s else (self.prefill_row_s + row_s) / 2

    def share(self) -> int:
        """Rows of a prefill that hold up others for no longer than HOLD_S."""
        return max(1, int(HOLD_S / self.prefill_row_s)) if self.prefill_row_s else FIRST_SHARE


class Batch:
    """Places for sequences, and one forward at a time for all that are ready.

    Fair: who decodes takes part in every forward; of those who prefill, the one that has waited longest goes first.
    """

    def __init__(self, engine: Engine, places: int) -> None:
        """
        Args:
            engine: what runs the forwards.
            places: sequences at the same time, up to MOST_SESSIONS; more wait for their turn.
        """
        if not 0 < places <= MOST_SESSIONS:
            raise UsageError(f"max_sequences must be within 1 to {MOST_SESSIONS}, not {places}")
        self._engine = engine
        self._places = places
        self._lock = threading.RLock()  # a signal handler may call `wake` while its own thread is in here
        self._leader: Seat | None = None
        """Whose thread runs the next forward."""
        self._references: list[weakref.ref[Seat]] = []  # weak: a seat that an interrupt has lost frees its place
        self._queue: deque[Bell] = deque()
        self._waiting: list[Seat] = []
        self.pace = Pace()

    def __len__(self) -> int:
        """Sequences that have a place."""
        return len(self._seats)

    @property
    def _seats(self) -> list[Seat]:
        return [seat for reference in self._references if (seat := reference()) is not None]

    def join(self, cancelled: Callable[[], bool] = lambda: False) -> Seat | None:
        """A place, when there is one: first come, first served. None where that was cancelled before.

        Raises:
            UsageError: every place is held by sequences that this very thread has begun and not ended: it would wait
                for itself.
        """
        turn: Bell = SimpleQueue()
        try:
            with self._lock:
                self._queue.append(turn)
            while not cancelled():
                with self._lock:
                    if self._queue[0] is turn and len(self._seats) < self._places:
                        seat = Seat(self)
                        self._references = [weakref.ref(each) for each in (*self._seats, seat)]
                        return seat
                    self._check_others()
                _wait(turn, POLL_S)
            return None
        finally:
            with self._lock:
                self._queue.remove(turn)
            self.wake()

    def wake(self) -> None:
        """Let those who wait for a place look whether there is one, or whether they were cancelled."""
        with self._lock:
            for turn in self._queue:
                turn.put(None)

    def _check_others(self) -> None:
        own = threading.get_ident()
        seats = self._seats
        if len(seats) >= self._places and all(seat.paused and seat.thread == own for seat in seats):
            raise UsageError(
                f"this thread has {len(seats)} generations that are not finished, and there are {self._places} places: "
                "finish or close one of them, or load the model with a larger max_sequences"
            )

    def _leave(self, seat: Seat) -> None:
        with self._lock:
            self._references = [weakref.ref(each) for each in self._seats if each is not seat]
            if self._leader is not None:
                self._leader._bell.put(None)
        self._resign(seat)
        self.wake()

    def _forward(self, seat: Seat, rows: Rows) -> Outputs:
        if len(self._seats) == 1:
            (outputs,) = self._engine.forward([rows])
            self._learn([rows], outputs)
            return outputs
        try:
            with self._lock:
                seat._rows, seat._outputs, seat._error, seat._state = rows, None, None, "waiting"
                self._waiting.append(seat)
                if self._leader is not None:
                    self._leader._bell.put(None)
            while self._leads(seat):
                self._lead(seat)
                self._resign(seat)
        except BaseException:
            self._resign(seat)
            self._retract(seat)
            raise
        if seat._error is not None:
            raise seat._error
        assert seat._outputs is not None
        return seat._outputs

    def _leads(self, seat: Seat) -> bool:
        """Wait until this seat's rows were run, False, or until somebody must run them: this thread."""
        while True:
            with self._lock:
                if seat._rows is None:
                    return False
                if self._leader is None or self._leader not in self._seats:
                    self._leader = seat
                    return True
            _wait(seat._bell, POLL_S)

    def _resign(self, seat: Seat) -> None:
        """Leave the next forward to others."""
        with self._lock:
            if self._leader is seat:
                self._leader = None
                for each in self._waiting:
                    each._bell.put(None)

    def _retract(self, seat: Seat) -> None:
        """Take back rows that were not run, when no forward can have them in it."""
        while True:
            with self._lock:
                if seat._rows is None or self._leader is None or self._leader not in self._seats:
                    self._take_out([seat])
                    return
            _wait(seat._bell, POLL_S)

    def _lead(self, leader: Seat) -> None:
        """Run one forward."""
        self._gather(leader)
        with self._lock:
            chosen = self._chosen()
        batch = [rows for _, rows in chosen]
        try:
            outputs = self._engine.forward(batch)
        except Exception:
            for seat, rows in chosen:  # one of them is at fault: each for itself
                try:
                    (seat._outputs,) = self._engine.forward([rows])
                except Exception as error:
                    seat._error = error
        else:
            for (seat, _), output in zip(chosen, outputs, strict=True):
                seat._outputs = output
            self._learn(batch, outputs[0])
        self._take_out(seat for seat, _ in chosen)

    def _learn(self, batch: Sequence[Rows], outputs: Outputs) -> None:
        prefilling = sum(len(rows.wanted) < len(rows.tree) for rows in batch)
        self.pace.observe(outputs.rows, outputs.wanted, prefilling, outputs.seconds)

    def _gather(self, leader: Seat) -> None:
        """Wait for sequences whose rows will be here in a moment."""
        while True:
            with self._lock:
                now = perf_counter()
                patience = max((seat._expected(now, self.pace.decode_s) for seat in self._seats), default=0.0)
            if patience <= 0:
                return
            _wait(leader._bell, patience)

    def _chosen(self) -> list[tuple[Seat, Rows]]:
        """Whose rows make up the next forward: all that decode, and of prefills as many rows as are not in the way."""
        decoding = [seat for seat in self._waiting if seat.decoding]
        chosen = [(seat, seat._rows) for seat in decoding if seat._rows is not None]
        room = self._engine.most_rows - sum(len(rows.tree) for _, rows in chosen)
        if any(seat.decoding and not seat._is_idle() for seat in self._seats):
            room = min(room, self.pace.share())
        found: list[tuple[Seat, Rows]] = []
        for seat in self._waiting:
            rows = seat._rows
            if rows is None or seat.decoding or room <= 0:
                continue
            if len(rows.tree) > room and found:
                continue  # the next one's turn comes: it has waited longest then
            found.append((seat, _first(rows, room)))
            room -= len(found[-1][1].tree)
        return [*chosen, *found]

    def _take_out(self, seats: Iterable[Seat]) -> None:
        """These rows were run, or never will be."""
        done = set(map(id, seats))
        with self._lock:
            for seat in self._waiting:
                if id(seat) in done:
                    # from now on its next rows are expected, although its thread may not be awake yet
                    seat._rows, seat._state, seat._since = None, "busy", perf_counter()
                    seat._bell.put(None)
            self._waiting = [seat for seat in self._waiting if id(seat) not in done]


def _wait(bell: Bell, seconds: float) -> None:
    """Sleep until the bell rings. A ring may be about something else: look again."""
    with suppress(Empty):
        bell.get(timeout=seconds)


def _first(rows: Rows, count: int) -> Rows:
    """The first rows of a prefill; the outputs of the last one are wanted."""
    if len(rows.tree) <= count:
        return rows
    return Rows(rows.session, TokenTree.chain(rows.tree.tokens[:count].tolist()), [count - 1])
