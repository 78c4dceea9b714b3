"""What one round of generation yields, and what the rounds of a generation sum up to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from ondevice.decoding.draft_counts import DraftCounts

FinishReason = Literal["stop", "length", "context", "cancelled"]
"""stop: a stop token or stop string, or a constraint's end; length: `max_new_tokens`; context: the context is full."""

IdleReason = Literal["no_room", "measuring", "no_match", "unprofitable", "drift"]
"""Why a round drafted nothing.

no_room: for one more token only. measuring: what a plain row costs. no_match: the drafter had nothing to propose,
or has yet to read a text, and that would not pay.
unprofitable: no draft is expected to pay. drift: the drafter's last ones came to far less than it had said.
"""


class ForwardCost(NamedTuple):
    """What a draft of another length would have changed of a round: a forward over all sequences that took part.

    rows, wanted : its rows, and those whose outputs were wanted: fewer where one of the sequences was prefilling
    seconds : wall time, with the sequence's own work before and after it, which every round pays once; waiting for
        other sequences, drafting and deciding on it are left out
    experts : that a layer read on average; 0 where there are none
    """

    rows: int
    wanted: int
    seconds: float
    experts: float = 0.0


@dataclass(frozen=True)
class TokenLogprob:
    """How likely the target found a token.

    logprob : natural logarithm of the token's probability, by the target's own logits: before biases, penalties,
        temperature and filters
    top : the likeliest tokens at this place and theirs, the likeliest first, the lowest id in a tie
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Round:
    """One pass of the loop: the prefill with the first token, or draft, verify, accept.

    drafted, depth : tokens proposed, and of these as many as could have been accepted: those of the longest path
    rows : those of this sequence in the round's forwards
    seconds : wall time of the round, drafting included
    draft_seconds : its share spent on making the draft, less what was spent once for this and later ones
    asking_seconds : its share spent on deciding whether to draft, and on telling the drafter and the schedule
    idle : why nothing was drafted; None where something was, or nobody could
    forward : what the round cost but for its draft; None for a prefill
    threads : that computed its last forward
    logprobs : of the tokens, where they were asked for
    """

    token_ids: tuple[int, ...]
    drafted: int = 0
    accepted: int = 0
    depth: int = 0
    source: str = "none"
    rows: int = 1
    seconds: float = 0.0
    draft_seconds: float = 0.0
    asking_seconds: float = 0.0
    idle: IdleReason | None = None
    forward: ForwardCost | None = None
    threads: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None


@dataclass
class Stats(DraftCounts):
    """Sums over one generation, those of its drafts included. Times in seconds; `decode_s` leaves the prefill and the
    first token out.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompt, those whose KV was there already."""
    new_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    load_s: float = 0.0
    target_forwards: int = 0
    drafter: str = "none"
    engine: str = ""
    peak_rss_bytes: int = 0
    threads: int = 0
    """The most that a forward may take."""
    threads_ran: list[int] = field(default_factory=list)
    """Decoding rounds whose forward took 1, 2, ... threads: as many as made it faster."""
    expert_reads: float = 0.0
    """Experts whose weights the forwards of decoding rounds read, on average of the layers: of rows that chose the same
    one it is read once."""
    by_source: dict[str, DraftCounts] = field(default_factory=dict)
    """The same counts by who drafted."""
    rounds_without_draft: int = 0
    fallbacks: dict[IdleReason, int] = field(default_factory=dict)
    """Of these, those of a generation that has a drafter, by their reason."""
    costs_age_s: float | None = None
    """How long ago the costs that the first round went by were measured; None where nothing was known yet."""

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
        self.threads_ran += [0] * (this.threads - len(self.threads_ran))
        if this.threads:
            self.threads_ran[this.threads - 1] += 1
        if this.forward is not None:
            self.expert_reads += this.forward.experts
        if this.drafted:
            self.add_draft(this.drafted, this.depth, this.accepted)
            self.by_source.setdefault(this.source, DraftCounts()).add_draft(this.drafted, this.depth, this.accepted)
        else:
            self.rounds_without_draft += 1
        if this.idle is not None:
            self.fallbacks[this.idle] = self.fallbacks.get(this.idle, 0) + 1

    @property
    def drafted(self) -> int:
        return self.num_draft_tokens

    @property
    def accepted(self) -> int:
        return self.num_accepted_tokens

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens after the first per second of decoding; 0.0 where there was only the first."""
        return (self.new_tokens - 1) / self.decode_s if self.decode_s > 0 else 0.0

    @property
    def tokens_per_round(self) -> float:
        """Tokens after the first per target forward."""
        return (self.new_tokens - 1) / self.target_forwards if self.target_forwards else 0.0

    @property
    def experts_per_round(self) -> float:
        """Experts of a layer that a round's forward read; 0.0 where there are none."""
        return self.expert_reads / self.target_forwards if self.target_forwards else 0.0

    @property
    def usual_threads(self) -> int:
        """The threads of most decoding rounds, or before the first the most that there are."""
        ran = self.threads_ran
        return max(range(len(ran)), key=ran.__getitem__) + 1 if ran else self.threads

    def timings(self) -> dict[str, Any]:
        """The object that llama.cpp's server adds to a reply, by its names; times per token and rates leave the first
        token out, which the prefill gives.
        """
        read, decode_ms = self.prompt_tokens - self.cached_tokens, 1e3 * self.decode_s
        return {
            "cache_n": self.cached_tokens,
            "prompt_n": read,
            "prompt_ms": 1e3 * self.prefill_s,
            "prompt_per_token_ms": 1e3 * self.prefill_s / read if read else 0.0,
            "prompt_per_second": read / self.prefill_s if self.prefill_s > 0 else 0.0,
            "predicted_n": self.new_tokens,
            "predicted_ms": decode_ms,
            "predicted_per_token_ms": decode_ms / (self.new_tokens - 1) if self.new_tokens > 1 else 0.0,
            "predicted_per_second": self.decode_tokens_per_s,
            "draft_n": self.num_draft_tokens,
            "draft_n_accepted": self.num_accepted_tokens,
        }
