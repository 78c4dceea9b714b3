"""How much time per round do the loop and its controller take in Python?

    python -m benchmarks.drafts.controller [--rounds N]

The engine and the MTP steps return prepared arrays at once, and the time of drafting is subtracted, because it belongs
to the cost of a draft. The text repeats itself in part, so that every drafter has something to propose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from time import perf_counter

import numpy as np

from benchmarks.command import command_line, run_command, whole
from ondevice.arrays import Float32Array
from ondevice.cli.bench.tables import table
from ondevice.engines.protocol import DraftStep, Outputs, Rows
from ondevice.generate import loop
from ondevice.generate.controller import Controller
from ondevice.generate.costs import Costs
from ondevice.generate.drafters.mtp import MtpDrafter
from ondevice.generate.drafters.ngram import NgramDrafter
from ondevice.generate.drafters.protocol import Drafter
from ondevice.generate.request import Limits, SamplingOptions
from ondevice.generate.sampling.sampler import Sampler
from ondevice.generate.stats import Round

WARM_UP = 100  # rounds at first that are not counted
VOCAB, HIDDEN = 256, 192
FORWARD_S, ROW_S, STEP_S = 0.05, 0.001, 0.001
"""Seconds that the fake forward, one more row and a draft step report: those of E2B."""

MAKERS: dict[str, Callable[[], list[Drafter]]] = {
    "none": list,
    "ngram": lambda: [NgramDrafter()],
    "mtp": lambda: [MtpDrafter(VOCAB)],
    "auto": lambda: [MtpDrafter(VOCAB), NgramDrafter()],
}


class Text:
    """A text of repeated phrases with new words between them; a drafter's step predicts a share of it correctly."""

    def __init__(self, length: int, right: float) -> None:
        random = np.random.default_rng(0)
        phrases = [random.integers(VOCAB, size=12) for _ in range(8)]
        parts = [
            phrases[random.integers(8)] if index % 2 else random.integers(VOCAB, size=6) for index in range(length)
        ]
        self.tokens = np.concatenate(parts)[:length]
        self.guesses = np.where(random.random(length) < right, self.tokens, (self.tokens + 1) % VOCAB)


class InstantSession:
    """Returns the text for any rows."""

    exact_trees = True

    pending = 0
    nbytes = 0
    drafts = None

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

    def max_rows(self, block: int = 1) -> int:
        return 32

    def commit(self, path: Sequence[int]) -> None:
        self.length += len(path)
        self._step = 0

    def rewind(self, length: int) -> int:
        self.length = min(self.length, length)
        return self.length

    def snapshot(self) -> None: ...

    def draft_step(self, token: int, hidden: Float32Array, depth: int = 0) -> DraftStep:
        self._step += 1
        place = min(self.length + self._step, len(self._steps) - 1)
        return DraftStep(self._candidates, self._steps[place], self._hidden[0])

    def forward(self, rows: Rows) -> Outputs:
        count, wanted = len(rows.tree), len(rows.wanted)
        place = self.length + count - wanted
        self.pending = count
        logits = self._logits[place : place + wanted]
        return Outputs(logits, self._hidden[:wanted], count, wanted, FORWARD_S + ROW_S * count)


class ClaimedTimes(Controller):
    """Learns the times that the engine reports, not the few microseconds that it really took.

    claiming_s : seconds spent in this class itself
    """

    claiming_s = 0.0

    def observe(self, this: Round, *others: Round) -> None:
        started = perf_counter()
        if this.forward is not None:
            forward = this.forward._replace(seconds=FORWARD_S + ROW_S * this.rows)
            drafting = STEP_S * this.drafted if this.source == "mtp" else this.draft_seconds
            this = replace(this, forward=forward, draft_seconds=drafting)
        self.claiming_s += perf_counter() - started
        super().observe(this, *others)


def microseconds_per_round(drafters: Sequence[Drafter], right: float, rounds: int) -> float:
    """Median over single rounds, minus the time of the drafts. Single rounds, because other processes would interrupt a
    block of them.
    """
    text = Text(17 * rounds + 64, right)
    session, controller = InstantSession(text), ClaimedTimes(Costs())
    prompt = text.tokens[:64].tolist()
    run = loop.generate(
        session,  # type: ignore[arg-type]
        prompt,
        Sampler(SamplingOptions(temperature=0.0)),
        Limits(len(text.tokens)),
        drafters=drafters,
        controller=controller if drafters else None,
    )
    times, started = [], perf_counter()
    for index, this in enumerate(loop.run(run, session.forward)):
        times.append(perf_counter() - started - this.draft_seconds - controller.claiming_s)
        if index >= rounds:
            break
        controller.claiming_s = 0.0
        started = perf_counter()
    return 1e6 * median(times[WARM_UP:])


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=whole(1), default=600, metavar="N", help="per cell (default: 600)")
    rounds: int = parser.parse_args().rounds
    if rounds < WARM_UP:
        parser.error(f"--rounds must be at least {WARM_UP}: the first ones are not counted")
    cells = []
    for name, make in MAKERS.items():
        line = [name]
        for right in (0.0, 0.6, 0.9):
            line.append(f"{microseconds_per_round(make(), right, rounds):.0f}")
        cells.append(line)
    titles = ["drafter", "MTP right 0", "0.6", "0.9"]
    print("Microseconds of Python per round:\n")
    print(table(titles, cells, left={"drafter"}))
    return 0


if __name__ == "__main__":
    run_command(main)
