"""`/metrics`: what Prometheus scrapes, by llama.cpp's names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ondevice.decoding.record import Stats

PREFIX = "ondevice:"


class Metrics:
    """Sums over all replies since the server began."""

    def __init__(self) -> None:
        self._read = 0
        self._cached = 0
        self._prefill_s = 0.0
        self._new = 0
        self._decode_s = 0.0
        self._forwards = 0
        self._drafts = 0
        self._drafted = 0
        self._accepted = 0
        self._accepted_at: list[int] = []
        self._fallbacks: dict[str, int] = {}

    def count(self, stats: Stats) -> None:
        """Take in a generation that has ended, complete or not."""
        if stats.new_tokens:
            self._read += stats.prompt_tokens - stats.cached_tokens
            self._cached += stats.cached_tokens
        self._prefill_s += stats.prefill_s
        self._new += stats.new_tokens
        self._decode_s += stats.decode_s
        self._forwards += stats.target_forwards
        self._drafts += stats.num_drafts
        self._drafted += stats.num_draft_tokens
        self._accepted += stats.num_accepted_tokens
        for depth, accepted in enumerate(stats.num_accepted_tokens_per_pos):
            self._accepted_at += [0] * (depth + 1 - len(self._accepted_at))
            self._accepted_at[depth] += accepted
        for reason, rounds in stats.fallbacks.items():
            self._fallbacks[reason] = self._fallbacks.get(reason, 0) + rounds

    def text(self, processing: int, deferred: int) -> str:
        """In Prometheus' text format.

        Args:
            processing, deferred: replies that are generated now, and requests that wait.
        """
        by_position: dict[str, float] = {str(at): count for at, count in enumerate(self._accepted_at)}
        families = [
            _counter("prompt_tokens_total", "Prompt tokens computed.", self._read),
            _counter("prompt_tokens_cached_total", "Prompt tokens that were known already.", self._cached),
            _counter("prompt_seconds_total", "Seconds spent on prompts and first tokens.", self._prefill_s),
            _counter("tokens_predicted_total", "Tokens generated.", self._new),
            _counter("tokens_predicted_seconds_total", "Seconds spent on tokens after the first.", self._decode_s),
            _counter("n_decode_total", "Decoding rounds: forwards after the prompt.", self._forwards),
            _counter("spec_decode_num_drafts_total", "Drafts verified.", self._drafts),
            _counter("spec_decode_num_draft_tokens_total", "Tokens drafted.", self._drafted),
            _counter("spec_decode_num_accepted_tokens_total", "Drafted tokens accepted.", self._accepted),
            _family(
                "spec_decode_num_accepted_tokens_per_pos_total",
                "counter",
                "Drafted tokens accepted, by their position in the draft.",
                "position",
                by_position,
            ),
            _family("fallback_total", "counter", "Rounds without a draft, by reason.", "reason", self._fallbacks),
            _gauge("requests_processing", "Replies that are generated now.", processing),
            _gauge("requests_deferred", "Requests that wait for their turn.", deferred),
        ]
        return "".join(line + "\n" for family in families for line in family)


def _counter(name: str, text: str, value: float) -> Iterator[str]:
    return _family(name, "counter", text, "", {"": value})


def _gauge(name: str, text: str, value: float) -> Iterator[str]:
    return _family(name, "gauge", text, "", {"": value})


def _family(name: str, kind: str, text: str, label: str, values: Mapping[str, float]) -> Iterator[str]:
    yield f"# HELP {PREFIX}{name} {text}"
    yield f"# TYPE {PREFIX}{name} {kind}"
    for each, value in values.items():
        labels = f'{{{label}="{each}"}}' if label else ""
        yield f"{PREFIX}{name}{labels} {value}"
