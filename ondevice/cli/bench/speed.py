"""The tests of `ondevice bench`, which are those of llama-bench: a prompt of N tokens, N new tokens, or both.

`pp512` reads a prompt of 512 tokens, `tg128` generates 128 tokens, `pp512+tg128` does both, and `@ d4096` says that
4,096 tokens were in the cache before. Speeds are tokens per second, mean and standard deviation over the repetitions.

Three things differ from llama-bench. The tokens are text, not random numbers, because drafts of random tokens would all
be wrong: so `tg128` at depth 0 continues 32 tokens. The next token is chosen, by argmax, and that is part of the time.
And generating tests run with every drafter, in turns, and are compared with plain decoding token by token.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from statistics import mean, stdev
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

from ondevice import machine
from ondevice.cli.bench.energy import energy_counters, joules_between, read_counters
from ondevice.cli.bench.measure import PLAIN, Configuration, acceptance_by_position
from ondevice.errors import UsageError
from ondevice.generate.drafters.simulated import SimulatedDrafter, make_luck
from ondevice.generate.stats import Stats
from ondevice.progress import Progress, silent

if TYPE_CHECKING:
    from ondevice.model import Model
    from ondevice.options import GenerationKeywords

BEGINNING = 32
"""Tokens that a `tg` test at depth 0 continues."""


class SpeedTest(NamedTuple):
    """A test: tokens of the prompt, new tokens, and tokens in the cache before. One of the first two may be 0."""

    prompt: int
    new: int
    depth: int = 0

    @property
    def name(self) -> str:
        """llama-bench's name, such as `pp512+tg128 @ d4096`."""
        parts = [f"pp{self.prompt}"] * bool(self.prompt) + [f"tg{self.new}"] * bool(self.new)
        return "+".join(parts) + f" @ d{self.depth}" * bool(self.depth)

    @property
    def cached(self) -> int:
        """Tokens that the test begins after."""
        return self.depth if self.prompt else max(self.depth, BEGINNING)


class SpeedCase(NamedTuple):
    """A test with a drafter. `accept` is the share of right tokens of a simulated one, None for a real one."""

    test: SpeedTest
    configuration: Configuration
    accept: float | None = None

    @property
    def name(self) -> str:
        """The test's name, and what drafts: `tg128 + mtp`, `tg128 + mtp k=4`, `tg128 + accept 0.6`."""
        if self.configuration == PLAIN:
            return self.test.name
        drafter = self.configuration.drafter if self.accept is None else f"accept {self.accept:g}"
        length = self.configuration.length
        return f"{self.test.name} + {drafter}" + ("" if length == "auto" else f" k={length}")


class SpeedSample(NamedTuple):
    """One repetition: tokens that count and their seconds, time to the first token, energy if known, statistics."""

    tokens: int
    seconds: float
    first_token_s: float
    joules: float | None
    token_ids: tuple[int, ...]
    stats: Stats


@dataclass
class SpeedRow:
    """A case's repetitions. `plain_ids` are the tokens of plain decoding."""

    case: SpeedCase
    plain_ids: tuple[int, ...] = ()
    samples: list[SpeedSample] = field(default_factory=list)

    @property
    def speeds(self) -> list[float]:
        """Tokens per second, by repetition."""
        return [sample.tokens / sample.seconds if sample.seconds > 0 else 0.0 for sample in self.samples]

    @property
    def speed(self) -> float:
        return mean(self.speeds)

    @property
    def deviation(self) -> float:
        """Standard deviation of the speeds; 0 for one repetition, as in llama-bench."""
        return stdev(self.speeds) if len(self.samples) > 1 else 0.0

    @property
    def first_token_ms(self) -> float | None:
        """Mean time until the prompt is read and the first token chosen; None for a test without a prompt."""
        return 1000 * mean(sample.first_token_s for sample in self.samples) if self.case.test.prompt else None

    @property
    def tokens_per_round(self) -> float | None:
        rounds = sum(sample.stats.target_forwards for sample in self.samples)
        tokens = sum(sample.stats.new_tokens - 1 for sample in self.samples)
        return tokens / rounds if rounds else None

    @property
    def acceptance(self) -> float | None:
        """Share of the drafted tokens that was accepted; None if there were none."""
        drafted = sum(sample.stats.num_draft_tokens for sample in self.samples)
        return sum(sample.stats.num_accepted_tokens for sample in self.samples) / drafted if drafted else None

    @property
    def acceptance_by_position(self) -> tuple[float, ...]:
        return acceptance_by_position([sample.stats for sample in self.samples])

    @property
    def peak_rss_bytes(self) -> int:
        return max(sample.stats.peak_rss_bytes for sample in self.samples)

    @property
    def joules_per_token(self) -> float | None:
        """Energy of the package per token; None where it cannot be read."""
        used = [sample.joules for sample in self.samples]
        tokens = sum(sample.tokens for sample in self.samples)
        return None if None in used or not tokens else sum(each or 0.0 for each in used) / tokens

    @property
    def equal(self) -> bool:
        """Whether every repetition has the tokens of plain decoding."""
        return all(sample.token_ids == self.plain_ids for sample in self.samples) or not self.case.test.new


def cases_of(
    tests: Iterable[SpeedTest], drafters: Sequence[str], lengths: Sequence[str], accepts: Sequence[float]
) -> list[SpeedCase]:
    """Every test, with every drafter and draft length if it generates."""
    cases = []
    for test in tests:
        if not test.new or PLAIN.drafter in drafters:
            cases.append(SpeedCase(test, PLAIN))
        if test.new:
            named = [name for name in drafters if name != PLAIN.drafter]
            cases += [SpeedCase(test, Configuration(name, length)) for name in named for length in lengths]
            cases += [
                SpeedCase(test, Configuration("simulated", length), accept) for accept in accepts for length in lengths
            ]
    return cases


def run_cases(
    model: Model, cases: Sequence[SpeedCase], repetitions: int, progress: Progress = silent
) -> tuple[list[SpeedRow], bool]:
    """Run every case once as a warm-up and then several times, the cases of one depth in turns.

    Each repetition begins with another case, so that a machine that gets warm or busy slows all of them equally.

    Returns:
        The rows with at least one repetition; whether Ctrl-C ended it.

    Raises:
        UsageError: the context is too short for a test.
    """
    longest = max(test.cached + test.prompt + test.new + 1 for test, *_ in cases)
    if longest > model.context_length:
        raise UsageError(
            f"the tests need a context of {longest} tokens, this model has {model.context_length}: "
            "choose smaller -p, -n, -pg and -d"
        )
    rows: list[SpeedRow] = []
    done = 0
    try:
        for depth, group in groupby(sorted(cases, key=lambda case: case.test.depth), lambda case: case.test.depth):
            with tempfile.TemporaryDirectory() as directory:
                bench = _Bench(model, depth, [*group], Path(directory, "prefix"), repetitions)
                for _ in bench.run(rows):
                    done += 1
                    progress(done, len(cases) * (repetitions + 1))
    except KeyboardInterrupt:
        return [row for row in rows if row.samples], True
    return rows, False


class _Bench:
    """The cases of one depth. The cache up to there is computed once, saved in a file, and loaded for every run."""

    def __init__(self, model: Model, depth: int, cases: Sequence[SpeedCase], prefix: Path, repetitions: int) -> None:
        self._model, self._cases, self._repetitions = model, cases, repetitions
        self._ids = text_ids(model, max(case.test.cached + case.test.prompt for case in cases))
        self._prefix = prefix if depth else None
        if self._prefix is not None:
            model.forget()
            model.save_prefix(self._ids[:depth], self._prefix)
        self._counters = energy_counters()
        self._plain: dict[SpeedTest, tuple[int, ...]] = {}
        self._options: GenerationKeywords = {"temperature": 0.0, "ignore_eos": True}
        self._simulated: dict[SpeedCase, SimulatedDrafter] = {}

    def run(self, rows: list[SpeedRow]) -> Iterable[None]:
        """Append a row per case, and fill them; yields after every run."""
        for case in self._cases:
            if case.test not in self._plain:
                self._plain[case.test] = self._sample(SpeedCase(case.test, PLAIN), 0).token_ids
            if case.configuration != PLAIN:
                self._sample(case, 0)
            yield
        made = [SpeedRow(case, self._plain[case.test]) for case in self._cases]
        rows += made
        for repetition in range(self._repetitions):
            start = repetition % len(made)
            for row in [*made[start:], *made[:start]]:
                row.samples.append(self._sample(row.case, repetition))
                yield

    def _sample(self, case: SpeedCase, repetition: int) -> SpeedSample:
        test, model = case.test, self._model
        options: GenerationKeywords = {**self._options, **case.configuration.options(), "max_new_tokens": test.new + 1}
        if case.accept is not None:
            options["drafter"] = self._simulate(case, repetition)
        model.forget()
        if self._prefix is not None:
            model.load_prefix(self._prefix)
        machine.reset_peak_rss()
        token_ids: list[int] = []
        readings = [read_counters(self._counters)]
        first_token_s, started = 0.0, perf_counter()
        with model.stream(self._ids[: test.cached + test.prompt], **options) as generation:
            for step in generation:
                if not token_ids:
                    first_token_s = perf_counter() - started
                    readings.append(read_counters(self._counters))
                token_ids += step.token_ids
        readings.append(read_counters(self._counters))
        stats = generation.stats
        counted = readings[0 if test.prompt else 1], readings[-1 if test.new else 1]
        return SpeedSample(
            test.prompt + (stats.new_tokens - 1) * bool(test.new),
            stats.prefill_s * bool(test.prompt) + stats.decode_s,
            first_token_s,
            joules_between(self._counters, *counted),
            tuple(token_ids),
            stats,
        )

    def _simulate(self, case: SpeedCase, repetition: int) -> SimulatedDrafter:
        """A drafter that is right at a share of the positions, others in each repetition."""
        assert case.accept is not None
        plain = self._plain[case.test]
        drafter = self._simulated.setdefault(case, SimulatedDrafter(self._model.engine, plain))
        drafter.luck = make_luck(len(plain), case.accept, repetition, self._repetitions)
        return drafter


def text_ids(model: Model, count: int) -> list[int]:
    """Token ids of a text, pages of this project; where it is too short, some of its tokens in random order before."""
    if model.tokenizer is None:
        raise UsageError("this bundle has no tokenizer, and the tests need a text: name one with a tokenizer")
    from ondevice.quality import TEXT  # the help of `bench` needs no tokenizer

    begin = [] if model.manifest.first_token_id is None else [model.manifest.first_token_id]
    ids = model.tokenizer.encode(TEXT.read_text("utf-8"), add_special_tokens=False, parse_special=False)
    missing = max(0, count - len(begin) - len(ids))
    return [*begin, *random.Random(0).choices(ids, k=missing), *ids][:count]
