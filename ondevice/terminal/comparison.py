"""A drafted reply beside the plain one: the same tokens, sooner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from ondevice.drafters import registry
from ondevice.reply import Reply

if TYPE_CHECKING:
    from ondevice.options import GenerationKeywords

DRAFTING = ("drafter", "draft_sampling", "num_assistant_tokens", "num_assistant_tokens_schedule")


def plain_options(options: GenerationKeywords) -> GenerationKeywords:
    """The same generation without drafts."""
    rest = {name: value for name, value in options.items() if name not in DRAFTING}
    return cast("GenerationKeywords", {**rest, "drafter": registry.NONE})


def first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    """The first index at which they differ, or where the shorter one ends."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))


@dataclass(frozen=True)
class Comparison:
    drafted: Reply
    plain: Reply

    @property
    def equal(self) -> bool:
        return self.drafted.token_ids == self.plain.token_ids

    @property
    def speed_up(self) -> float:
        """Decoding speed over plain decoding speed; 0.0 where one of them decoded nothing."""
        plain = self.plain.stats.decode_tokens_per_s
        return self.drafted.stats.decode_tokens_per_s / plain if plain else 0.0

    def line(self) -> str:
        plain = f"plain decoding: {self.plain.stats.decode_tokens_per_s:.1f} tokens/s"
        return f"{plain}, with drafts {self.speed_up:.2f}x as fast; {self._verdict()}"

    def as_json(self) -> dict[str, Any]:
        return {
            "equal": self.equal,
            "speed_up": self.speed_up,
            "plain_tokens_per_s": self.plain.stats.decode_tokens_per_s,
            "drafted_tokens_per_s": self.drafted.stats.decode_tokens_per_s,
        }

    def _verdict(self) -> str:
        if self.equal:
            return f"all {len(self.plain.token_ids)} tokens equal"
        at = first_difference(self.drafted.token_ids, self.plain.token_ids)
        return f"THE TOKENS DIFFER from number {at + 1} on"
