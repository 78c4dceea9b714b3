"""What the loop and its controller take of a round, in Python: drafting decisions, verification, bookkeeping.

    python -m benchmarks.controller [--rounds N]

The engine and the MTP steps answer at once from arrays made beforehand, and drafting is left out, which every draft
pays for by itself: what is left is the loop's own.
The text repeats itself in part, so that every drafter has something to say.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from time import perf_counter

import numpy as np

from ondevice.decoding import loop
from ondevice.decoding.costs import Costs
from ondevice.decoding.limits import Limits
from ondevice.decoding.record import Round
from ondevice.decoding.sampling import Sampler
from ondevice.decoding.sampling_options import SamplingOptions
from ondevice.decoding.schedule import AutoSchedule
from ondevice.drafters.mtp import MtpDrafter
from ondevice.drafters.ngram import NgramDrafter
from ondevice.drafters.portfolio import Portfolio
from ondevice.drafters.protocol import Drafter
from ondevice.engines.protocol import DraftStep, Floats, Outputs, Rows
from ondevice.terminal.bench.table import table

VOCAB, HIDDEN = 256, 192
FORWARD_S, ROW_S, STEP_S = 0.05, 0.001, 0.001
"""What a forward, one more row and a draft step claim to take: what E2B's take."""

MAKERS: dict[str, Callable[[Costs], Drafter | None]] = {
    "none": lambda costs: None,
    "ngram": lambda costs: NgramDrafter(),
    "mtp": lambda costs: MtpDrafter(HIDDEN, VOCAB),
    "auto": lambda costs: Portfolio([MtpDrafter(HIDDEN, VOCAB), NgramDrafter()], costs),
}


class Text:
    """Phrases that come again, with new words between them; a step of a drafter gets a share of it right."""

    def __init__(self, length: int, right: float) -> None:
        random = np.random.default_rng(0)
        phrases = [random.integers(VOCAB, size=12) for _ in range(8)]
        parts = [
            phrases[random.integers(8)] if index % 2 else random.integers(VOCAB, size=6) for index in range(length)
        ]
        self.tokens = np.concatenate(parts)[:length]
        self.guesses = np.where(random.random(length) < right, self.tokens, (self.tokens + 1) % VOCAB)


class InstantSession:
    """Says the text, whatever it is asked."""

    exact_trees = True

    pending = 0
    nbytes = 0

    def __init__(self, text: Text) -> None:
        self.text = text
        self.length = 0
        self.tokens: Sequence[int] = ()
        self._logits = np.full((len(text.tokens), VOCAB), -9.0, np.float32)
        self._logits[np.arange(len(text.tokens) - 1), text.tokens[1:]] = 9.0
        self._hidden = np.zeros((64, HIDDEN), np.float32)
        self._steps = np.full((len(text.tokens), VOCAB), -9.0, np.float32)
        self._steps[np.arange(len(text.tokens)), text.guesses] = 9.0
        self._candidates = np.arange(VOCAB)
        self._step = 0

    def max_rows(self) -> int:
        return 32

    def commit(self, path: Sequence[int]) -> None:
        self.length += len(path)
        self._step = 0

    def rewind(self, length: int) -> int:
        self.length = min(self.length, length)
        return self.length

    def snapshot(self) -> None: ...

    def draft_step(self, token: int, hidden: Floats) -> DraftStep:
        self._step += 1
        place = min(self.length + self._step, len(self._steps) - 1)
        return DraftStep(self._candidates, self._steps[place], self._hidden[0])

    def forward(self, rows: Rows) -> Outputs:
        count, wanted = len(rows.tree), len(rows.wanted)
        place = self.length + count - wanted
        self.pending = count
        logits = self._logits[place : place + wanted]
        return Outputs(logits, self._hidden[:wanted], count, wanted, FORWARD_S + ROW_S * count)


class ClaimedTimes(AutoSchedule):
    """Learns the times that the engine claims, not the few microseconds that it took.

    claiming_s : seconds spent on that
    """

    claiming_s = 0.0

    def observe(self, this: Round) -> None:
        started = perf_counter()
        if this.forward is not None:
            forward = this.forward._replace(seconds=FORWARD_S + ROW_S * this.rows)
            drafting = STEP_S * this.drafted if this.source == "mtp" else this.draft_seconds
            this = replace(this, forward=forward, draft_seconds=drafting)
        self.claiming_s += perf_counter() - started
        super().observe(this)


def microseconds_per_round(drafter: Drafter | None, schedule: ClaimedTimes | None, right: float, rounds: int) -> float:
    """Median over rounds, less what the drafts themselves took: a block of rounds would be interrupted by others."""
    text = Text(17 * rounds + 64, right)
    session = InstantSession(text)
    prompt = text.tokens[:64].tolist()
    run = loop.generate(
        session,  # type: ignore[arg-type]
        prompt,
        Sampler(SamplingOptions(temperature=0.0)),
        Limits(len(text.tokens)),
        drafter=drafter,
        schedule=schedule,
    )
    times, started = [], perf_counter()
    for index, this in enumerate(loop.run(run, session.forward)):
        claiming_s = 0.0 if schedule is None else schedule.claiming_s
        times.append(perf_counter() - started - this.draft_seconds - claiming_s)
        if index >= rounds:
            break
        if schedule is not None:
            schedule.claiming_s = 0.0
        started = perf_counter()
    return 1e6 * median(times[100:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=600, metavar="N", help="per cell (default: 600)")
    rounds = parser.parse_args().rounds
    cells = []
    for name, make in MAKERS.items():
        line = [name]
        for right in (0.0, 0.6, 0.9):
            costs = Costs()
            made = make(costs)
            schedule = None if made is None else ClaimedTimes(costs)
            line.append(f"{microseconds_per_round(made, schedule, right, rounds):.0f}")
        cells.append(line)
    titles = ["drafter", "MTP right 0", "0.6", "0.9"]
    print("Microseconds of Python per round:\n")
    print(table(titles, cells, left={"drafter"}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
