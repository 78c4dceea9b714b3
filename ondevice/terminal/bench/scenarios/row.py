"""What the repeats of one way of decoding come to in one scenario."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from ondevice.terminal.bench.configuration import PLAIN
from ondevice.terminal.bench.row import acceptance_by_position
from ondevice.terminal.bench.scenarios.measurement import Case, Repeat, Setup, Way


@dataclass(frozen=True)
class ScenarioRow:
    """Medians over repeats, each the sum over its prompts.

    speed_ups : of every repeat, its decoding speed over that of plain decoding in the same repeat, on the same setup
    acceptance : of the drafted tokens at position 1, 2, ... the share that was taken
    idle_rounds : the share of rounds that drafted nothing
    equal : prompts whose tokens are those of plain decoding in every repeat, of `prompts`
    """

    scenario: str
    temperature: float
    engine: str
    threads: int
    drafter: str
    prompts: int
    new_tokens: int
    first_token_ms: float
    ms_per_token: float
    tokens_per_round: float
    acceptance: tuple[float, ...]
    idle_rounds: float
    speed_ups: tuple[float, ...]
    equal: int

    @property
    def setup(self) -> Setup:
        return Setup(self.engine, self.threads)

    @property
    def speed_up(self) -> float:
        return median(self.speed_ups)

    @property
    def spread(self) -> float:
        """Half the distance between the fastest repeat and the slowest."""
        return (max(self.speed_ups) - min(self.speed_ups)) / 2

    @classmethod
    def of(cls, case: Case, way: Way, repeats: Sequence[Repeat], plain: Sequence[Repeat]) -> ScenarioRow:
        runs = [run for repeat in repeats for run in repeat]
        forwards = sum(run.stats.target_forwards for run in runs)
        decoded = sum(run.stats.new_tokens - 1 for run in runs)
        pairs = [list(zip(repeat, other, strict=True)) for repeat, other in zip(repeats, plain, strict=True)]
        different = {
            number for pair in pairs for number, (run, other) in enumerate(pair) if run.token_ids != other.token_ids
        }
        return cls(
            scenario=case.scenario.name,
            temperature=case.temperature,
            engine=way.setup.engine,
            threads=way.setup.threads,
            drafter=way.configuration.drafter,
            prompts=len(case.scenario.prompts),
            new_tokens=sum(run.stats.new_tokens for run in repeats[0]),
            first_token_ms=1e3 * median(run.first_token_s for run in runs),
            ms_per_token=1e3 * median(map(_seconds_per_token, repeats)),
            tokens_per_round=decoded / forwards if forwards else 0.0,
            acceptance=acceptance_by_position(runs),
            idle_rounds=sum(run.stats.rounds_without_draft for run in runs) / forwards if forwards else 0.0,
            speed_ups=tuple(
                _seconds_per_token(other) / _seconds_per_token(repeat)
                for repeat, other in zip(repeats, plain, strict=True)
            ),
            equal=len(case.scenario.prompts) - len(different),
        )


def rows_of(case: Case, results: Mapping[Way, Sequence[Repeat]]) -> list[ScenarioRow]:
    """One row per way of decoding."""
    return [ScenarioRow.of(case, way, repeats, results[Way(way.setup, PLAIN)]) for way, repeats in results.items()]


def _seconds_per_token(repeat: Repeat) -> float:
    tokens = sum(run.stats.new_tokens - 1 for run in repeat)
    return sum(run.stats.decode_s for run in repeat) / tokens if tokens else 1.0
