"""What the runs of one configuration come to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from statistics import median

from ondevice.terminal.bench.configuration import PLAIN, Configuration
from ondevice.terminal.bench.runner import Run


@dataclass(frozen=True)
class Row:
    """Sums over prompts, so that long replies count as much as they take; the first token is a median.

    drafter, length : as the options name them
    name : what drafted: `auto` stands for more than one drafter
    acceptance : of the drafted tokens at position 1, 2, ... the share that was taken
    idle_rounds : the share of rounds that drafted nothing
    speed_up : decoding speed over plain decoding speed on the same prompts
    equal : prompts whose tokens are those of plain decoding, of `prompts`
    """

    drafter: str
    length: str
    name: str
    prompts: int
    new_tokens: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    first_token_ms: float
    tokens_per_round: float
    acceptance: tuple[float, ...]
    idle_rounds: float
    peak_rss_bytes: int
    speed_up: float
    equal: int

    @property
    def label(self) -> str:
        return "plain" if self.is_plain else f"{self.name} {self.length}"

    @property
    def is_plain(self) -> bool:
        return self.drafter == PLAIN.drafter

    @classmethod
    def of(cls, configuration: Configuration, runs: Sequence[Run], plain: Sequence[Run]) -> Row:
        """Sum up `runs`; `plain` are those of plain decoding on the same prompts, in the same order."""
        stats = [run.stats for run in runs]
        decoded = sum(one.new_tokens - 1 for one in stats)
        rounds = sum(one.target_forwards for one in stats)
        speed, plain_speed = _decode_speed(runs), _decode_speed(plain)
        return cls(
            drafter=configuration.drafter,
            length=configuration.length,
            name=stats[0].drafter,
            prompts=len(runs),
            new_tokens=sum(one.new_tokens for one in stats),
            prefill_tokens_per_s=_ratio(sum(one.prompt_tokens for one in stats), sum(one.prefill_s for one in stats)),
            decode_tokens_per_s=speed,
            first_token_ms=1000 * median(run.first_token_s for run in runs),
            tokens_per_round=_ratio(decoded, rounds),
            acceptance=acceptance_by_position(runs),
            idle_rounds=_ratio(sum(one.rounds_without_draft for one in stats), rounds),
            peak_rss_bytes=max(one.peak_rss_bytes for one in stats),
            speed_up=_ratio(speed, plain_speed),
            equal=sum(run.token_ids == other.token_ids for run, other in zip(runs, plain, strict=True)),
        )


def rows_of(results: Sequence[dict[Configuration, Run]]) -> list[Row]:
    """One row per configuration, plain decoding first."""
    plain = [runs[PLAIN] for runs in results]
    ordered = sorted(results[0], key=lambda configuration: configuration != PLAIN) if results else []
    return [Row.of(configuration, [runs[configuration] for runs in results], plain) for configuration in ordered]


def _decode_speed(runs: Sequence[Run]) -> float:
    return _ratio(sum(run.stats.new_tokens - 1 for run in runs), sum(run.stats.decode_s for run in runs))


def acceptance_by_position(runs: Sequence[Run]) -> tuple[float, ...]:
    """Of the drafted tokens at position 1, 2, ... the share that was taken."""
    drafted = map(sum, zip_longest(*(run.stats.num_drafts_per_pos for run in runs), fillvalue=0))
    accepted = map(sum, zip_longest(*(run.stats.num_accepted_tokens_per_pos for run in runs), fillvalue=0))
    return tuple(_ratio(taken, offered) for taken, offered in zip(accepted, drafted, strict=True))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
