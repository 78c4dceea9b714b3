"""The measurements of `python -m benchmarks.drafts.speculate`: plain and drafted generations, alternately."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from time import perf_counter

from benchmarks.forwards import forward, read, timed
from ondevice.engines.protocol import Engine, Session
from ondevice.generate.controller import MAX_DRAFT, Controller, FixedLength
from ondevice.generate.costs import Costs
from ondevice.generate.drafters.self_speculative import PartialDrafter
from ondevice.generate.drafters.simulated import SimulatedDrafter, make_luck
from ondevice.generate.loop import generate
from ondevice.generate.loop import run as driven
from ondevice.generate.request import Limits, SamplingOptions
from ondevice.generate.sampling.sampler import Sampler
from ondevice.generate.stats import Stats

PLAIN, AUTO, TREES, FIRST_AUTO = "plain", "auto", "auto, trees", "auto, first"

NOISE = 0.05
"""Error of ratios on a quiet machine."""


@dataclass(frozen=True)
class Run:
    """One generation. `seconds` : wall time from the first token to the last, without the prefill."""

    token_ids: tuple[int, ...]
    seconds: float
    stats: Stats

    @property
    def decoded(self) -> int:
        """Tokens after the first."""
        return len(self.token_ids) - 1


@dataclass
class Cell:
    """A way of decoding and its generations so far. Its drafter and costs are kept from one to the next, as in a
    `Model`.
    """

    length: str
    drafter: SimulatedDrafter | None = None
    controller: Controller | None = None
    runs: list[Run] = field(default_factory=list)

    @property
    def seconds_per_token(self) -> float:
        return sum(run.seconds for run in self.runs) / sum(run.decoded for run in self.runs)

    @property
    def tokens_per_round(self) -> float:
        return sum(run.decoded for run in self.runs) / sum(run.stats.target_forwards for run in self.runs)

    @property
    def drafted_per_round(self) -> float:
        return sum(run.stats.drafted for run in self.runs) / sum(run.stats.target_forwards for run in self.runs)


@dataclass(frozen=True)
class Block:
    """All measurements at one acceptance, plain decoding included; ratios are computed within a block."""

    acceptance: float
    plain: Cell
    cells: tuple[Cell, ...]

    def speed_up(self, cell: Cell) -> float:
        """Median over the repeats, each compared with the plain run of the same turn, so that a burst of other load
        spoils only one.
        """
        return median(plain.seconds / run.seconds for plain, run in zip(self.plain.runs, cell.runs, strict=False))

    @property
    def impossible(self) -> list[Cell]:
        """Cells with a speed-up above their tokens per round, as if a forward of more rows took less time: then other
        load slowed down the plain runs.
        """
        return [cell for cell in self.cells if self.speed_up(cell) > (1.0 + NOISE) * cell.tokens_per_round]


@dataclass(frozen=True)
class Bench:
    """An engine with a sequence, a prompt and its continuation by plain greedy decoding."""

    engine: Engine
    session: Session
    prompt_ids: tuple[int, ...]
    continuation: tuple[int, ...]
    partial: PartialDrafter | None = None
    """The drafter with the target's own layers whose cost the simulated drafter has; None for that of MTP."""

    @classmethod
    def prepare(
        cls, engine: Engine, prompt_ids: Sequence[int], tokens: int, partial: PartialDrafter | None = None
    ) -> Bench:
        """Find the continuation: the first token, which the prefill gives, and `tokens` more.

        Forwards of every number of rows are run once before, so that no measurement includes the cost of a first one.
        """
        session = engine.open_session()
        run = _run(engine, session, prompt_ids, tokens + 1, Cell(PLAIN))
        for rows in range(2, MAX_DRAFT + 2):
            forward(engine, session, run.token_ids[:1] * rows, range(rows))
        return cls(engine, session, tuple(prompt_ids), run.token_ids, partial)

    def run(self, cell: Cell) -> Run:
        return _run(self.engine, self.session, self.prompt_ids, len(self.continuation), cell)

    def measure(
        self,
        acceptances: Sequence[float],
        lengths: Sequence[str],
        repeats: int,
        progress: Callable[[], None] = lambda: None,
        second: float = 0.0,
    ) -> Iterator[Block]:
        """Yield a block per acceptance.

        Second children of trees are right at a share `second` of the positions at which first ones are wrong.

        Within a block all ways of decoding run alternately, beginning with another one each time, so that other load
        affects all of them. `auto` has one more generation before, in which it has learnt nothing yet.
        """
        for acceptance in acceptances:
            cells = tuple(self._cell(length) for length in lengths)
            first = [self._first(cell, acceptance, repeats, second) for cell in cells if cell.length == AUTO]
            block = Block(acceptance, Cell(PLAIN), (*cells, *first))
            ways = [block.plain, *cells]
            for repeat in range(repeats):
                start = repeat * len(ways) // repeats
                for cell in [*ways[start:], *ways[:start]]:
                    self._add(cell, acceptance, repeat, repeats, second)
                    progress()
            yield block

    def _cell(self, length: str) -> Cell:
        controller = Controller(Costs()) if length in (AUTO, TREES) else FixedLength(Costs(), int(length))
        drafter = SimulatedDrafter(self.engine, self.continuation, trees=length == TREES, partial=self.partial)
        return Cell(length, drafter, controller)

    def _first(self, auto: Cell, acceptance: float, repeats: int, second: float) -> Cell:
        cell = Cell(FIRST_AUTO, auto.drafter, auto.controller)
        self._add(cell, acceptance, 0, repeats, second)
        return cell

    def _add(self, cell: Cell, acceptance: float, repeat: int, repeats: int, second: float) -> None:
        if cell.drafter is not None:
            siblings = second * (1.0 - acceptance)
            cell.drafter.luck = make_luck(len(self.continuation), acceptance, repeat, repeats, siblings)
        cell.runs.append(self.run(cell))


def _run(engine: Engine, session: Session, prompt_ids: Sequence[int], tokens: int, cell: Cell) -> Run:
    """Generate greedily, without stop tokens. The prompt stays in the cache for the next run."""
    session.rewind(min(session.length, len(prompt_ids) - 1))
    sampler = Sampler(SamplingOptions(temperature=0.0))
    drafters = [] if cell.drafter is None else [cell.drafter]
    loop = generate(session, prompt_ids, sampler, Limits(tokens), drafters=drafters, controller=cell.controller)
    rounds = driven(loop, lambda rows: engine.forward([rows])[0])
    stats, token_ids = Stats(), list(next(rounds).token_ids)
    started = perf_counter()
    for this in rounds:
        token_ids += this.token_ids
        stats.add(this)
    return Run(tuple(token_ids), perf_counter() - started, stats)


@dataclass(frozen=True)
class DraftStepCost:
    """Median seconds of one step of the bundle's MTP drafter, and of a forward of one row."""

    step_s: float
    row_s: float


def measure_draft_step(engine: Engine, prompt_ids: Sequence[int]) -> DraftStepCost | None:
    """Measure the two alternately; None if the bundle has no drafter."""
    if engine.drafter is None:
        return None
    session = engine.open_session()
    outputs = read(engine, session, prompt_ids)
    hidden, token = outputs.hidden[0].copy(), int(outputs.logits[0].argmax())
    rows, steps = [], []
    for _ in range(40):
        rows.append(timed(partial(forward, engine, session, [token], [0])))
        steps.append(timed(partial(session.draft_step, token, hidden)))
    session.close()
    return DraftStepCost(median(steps), median(rows))
