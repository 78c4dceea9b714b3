"""What one round of generation yields, and what a whole generation sums up to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

FinishReason = Literal["stop", "length", "context", "cancelled"]
"""stop: a stop token or stop string; length: `max_new_tokens`; context: the context is full."""


class ForwardCost(NamedTuple):
    """What a draft of another length would have changed of a round: a forward over all sequences that took part.

    rows, wanted : its rows, and those whose outputs were wanted: fewer where one of the sequences was prefilling
    seconds : wall time, with the sequence's own work before and after it, which every round pays once; waiting for
        other sequences and drafting are left out
    """

    rows: int
    wanted: int
    seconds: float


@dataclass(frozen=True)
class Round:
    """One pass of the loop: the prefill with the first token, or draft, verify, accept.

    drafted, depth : tokens proposed, and of these as many as could have been accepted: those of the longest path
    rows : those of this sequence in the round's forwards
    seconds : wall time of the round, drafting included
    draft_seconds : its share spent on making the draft
    forward : what the round cost but for its draft; None for a prefill
    threads : that computed its last forward
    """

    token_ids: tuple[int, ...]
    drafted: int = 0
    accepted: int = 0
    depth: int = 0
    source: str = "none"
    rows: int = 1
    seconds: float = 0.0
    draft_seconds: float = 0.0
    forward: ForwardCost | None = None
    threads: int = 0
    finish_reason: FinishReason | None = None


@dataclass(frozen=True)
class Step:
    """What a caller of `Model.stream` sees: a round, as text. `text` may be empty while half a character waits."""

    text: str
    token_ids: tuple[int, ...]
    drafted: int
    accepted: int
    source: str
    seconds: float
    finish_reason: FinishReason | None


@dataclass
class Stats:
    """Sums over one generation. Times in seconds; `decode_s` leaves the prefill and the first token out."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompt, those whose KV was there already."""
    new_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    load_s: float = 0.0
    target_forwards: int = 0
    drafted: int = 0
    accepted: int = 0
    drafter: str = "none"
    engine: str = ""
    peak_rss_bytes: int = 0
    threads: int = 0
    """The most that a forward may take."""
    threads_ran: list[int] = field(default_factory=list)
    """Decoding rounds whose forward took 1, 2, ... threads: as many as made it faster."""
    rounds_without_draft: int = 0
    drafted_at: list[int] = field(default_factory=list)
    """Rounds whose draft reached depth 1, 2, ...: of a chain, its first, second, ... token."""
    accepted_at: list[int] = field(default_factory=list)
    """Of these, rounds in which a token at that depth was taken."""

    def count(self, this: Round) -> None:
        """Take in the next round: the first is the prefill, one without rows a cancelled generation's last."""
        if not self.new_tokens:
            self.prefill_s, self.new_tokens = this.seconds, len(this.token_ids)
        elif this.rows:
            self.add(this)

    def add(self, this: Round) -> None:
        """Count one decoding round."""
        self.new_tokens += len(this.token_ids)
        self.decode_s += this.seconds
        self.target_forwards += 1
        self.drafted += this.drafted
        self.accepted += this.accepted
        self.rounds_without_draft += this.drafted == 0
        self.threads_ran += [0] * (this.threads - len(self.threads_ran))
        if this.threads:
            self.threads_ran[this.threads - 1] += 1
        missing = this.depth - len(self.drafted_at)
        self.drafted_at += [0] * missing
        self.accepted_at += [0] * missing
        for depth in range(this.depth):
            self.drafted_at[depth] += 1
            self.accepted_at[depth] += depth < this.accepted

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens after the first per second of decoding; 0.0 where there was only the first."""
        return (self.new_tokens - 1) / self.decode_s if self.decode_s > 0 else 0.0

    @property
    def tokens_per_round(self) -> float:
        """Tokens after the first per target forward."""
        return (self.new_tokens - 1) / self.target_forwards if self.target_forwards else 0.0

    @property
    def usual_threads(self) -> int:
        """The threads of most decoding rounds, or before the first the most that there are."""
        ran = self.threads_ran
        return max(range(len(ran)), key=ran.__getitem__) + 1 if ran else self.threads

    @property
    def acceptance(self) -> float:
        """Accepted per drafted token."""
        return self.accepted / self.drafted if self.drafted else 0.0


@dataclass(frozen=True)
class Reply:
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stats: Stats
