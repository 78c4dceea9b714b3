"""What drafts came to, under the names that vLLM has for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class DraftCounts:
    """Sums over rounds that drafted something.

    The names are those of vLLM's metrics (`vllm:spec_decode_num_drafts` and so on) and of its per-request object.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_drafts_per_pos: list[int] = field(default_factory=list)
    """Rounds whose draft reached depth 1, 2, ...: of a chain, its first, second, ... token."""
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    """Of these, rounds in which a token at that depth was taken."""

    def add_draft(self, drafted: int, depth: int, accepted: int) -> None:
        """Count one draft: its tokens, those of its longest path, and those that the target took."""
        self.num_drafts += 1
        self.num_draft_tokens += drafted
        self.num_accepted_tokens += accepted
        missing = depth - len(self.num_drafts_per_pos)
        self.num_drafts_per_pos += [0] * missing
        self.num_accepted_tokens_per_pos += [0] * missing
        for position in range(depth):
            self.num_drafts_per_pos[position] += 1
            self.num_accepted_tokens_per_pos[position] += position < accepted

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted per drafted token."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens that a draft brings, the target's own included."""
        return 1.0 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    def draft_figures(self) -> dict[str, Any]:
        """All of this, for JSON."""
        return {
            "num_drafts": self.num_drafts,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "num_drafts_per_pos": self.num_drafts_per_pos,
            "num_accepted_tokens_per_pos": self.num_accepted_tokens_per_pos,
            "draft_acceptance_rate": self.draft_acceptance_rate,
            "mean_acceptance_length": self.mean_acceptance_length,
        }
