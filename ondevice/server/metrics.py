"""`/metrics`: sums over all replies, in Prometheus' text format, under llama.cpp's and vLLM's names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from ondevice.generate.stats import Stats

PREFIX = "ondevice:"


class Counter(NamedTuple):
    """A sum over all replies. value : what one reply adds."""

    name: str
    help: str
    value: Callable[[Stats], float]


def _computed(stats: Stats) -> int:
    """Prompt tokens without cached ones; 0 if the reply ended before its prompt was read."""
    return stats.prompt_tokens - stats.cached_tokens if stats.prompt_read else 0


def _cached(stats: Stats) -> int:
    return stats.cached_tokens if stats.prompt_read else 0


COUNTERS = (
    Counter("prompt_tokens_total", "Prompt tokens computed.", _computed),
    Counter("prompt_tokens_cached_total", "Prompt tokens taken from the prefix cache.", _cached),
    Counter("prompt_seconds_total", "Seconds spent on prompts and first tokens.", lambda stats: stats.prefill_s),
    Counter("tokens_predicted_total", "Tokens generated.", lambda stats: stats.new_tokens),
    Counter("tokens_predicted_seconds_total", "Seconds spent on tokens after the first.", lambda stats: stats.decode_s),
    Counter("n_decode_total", "Decoding rounds: forwards after the prompt.", lambda stats: stats.target_forwards),
    Counter("spec_decode_num_drafts_total", "Drafts verified.", lambda stats: stats.num_drafts),
    Counter("spec_decode_num_draft_tokens_total", "Tokens drafted.", lambda stats: stats.num_draft_tokens),
    Counter(
        "spec_decode_num_accepted_tokens_total", "Drafted tokens accepted.", lambda stats: stats.num_accepted_tokens
    ),
)


class Metrics:
    """Sums over all replies since the server started."""

    def __init__(self) -> None:
        self._sums: dict[Counter, float] = dict.fromkeys(COUNTERS, 0)
        self._accepted_at: dict[str, float] = {}
        """Accepted tokens by their position in the draft."""
        self._fallbacks: dict[str, float] = {}
        """Rounds without a draft by reason."""

    def count(self, stats: Stats) -> None:
        """Add a reply that has ended, complete or not."""
        for counter in COUNTERS:
            self._sums[counter] += counter.value(stats)
        for position, accepted in enumerate(stats.num_accepted_tokens_per_pos):
            self._accepted_at[str(position)] = self._accepted_at.get(str(position), 0) + accepted
        for reason, rounds in stats.fallbacks.items():
            self._fallbacks[reason] = self._fallbacks.get(reason, 0) + rounds

    def text(self, running: int, waiting: int) -> str:
        """All metrics in Prometheus' text format.

        Args:
            running, waiting: replies that are generated now, and requests that wait for a slot.
        """
        families = [
            *(_family(counter.name, "counter", counter.help, "", {"": total}) for counter, total in self._sums.items()),
            _family(
                "spec_decode_num_accepted_tokens_per_pos_total",
                "counter",
                "Drafted tokens accepted, by their position in the draft.",
                "position",
                self._accepted_at,
            ),
            _family("fallback_total", "counter", "Rounds without a draft, by reason.", "reason", self._fallbacks),
            _family("requests_processing", "gauge", "Replies that are generated now.", "", {"": running}),
            _family("requests_deferred", "gauge", "Requests that wait for a slot.", "", {"": waiting}),
        ]
        return "".join(line + "\n" for family in families for line in family)


def _family(name: str, kind: str, text: str, label: str, values: Mapping[str, float]) -> Iterator[str]:
    yield f"# HELP {PREFIX}{name} {text}"
    yield f"# TYPE {PREFIX}{name} {kind}"
    for each, value in values.items():
        labels = f'{{{label}="{each}"}}' if label else ""
        yield f"{PREFIX}{name}{labels} {value}"
