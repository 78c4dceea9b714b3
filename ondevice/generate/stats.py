"""The report of one round of a generation (`Round`), and the sums over a generation's rounds (`Stats`)."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from time import perf_counter
from typing import Any, Literal, NamedTuple

EndReason = Literal["stop", "length", "context", "cancelled"]
"""stop: a stop token or stop string, or the end of a constraint; length: `max_new_tokens`; context: the context is
full."""

IdleReason = Literal["no_room", "measuring", "no_match", "unprofitable"]
"""Why a round drafted nothing.

no_room: the generation may emit only one more token.
measuring: the cost of a plain row is being measured.
no_match: the drafter had nothing to propose, or would have to read a text first, which would not pay.
unprofitable: no draft is expected to pay, or earlier ones have lost what drafting may lose.
"""


Origin = Literal["accepted", "corrected", "plain"]
"""Where an emitted token comes from.

accepted: a drafted token, which the target accepted.
corrected: the target's own token, where the draft had another one in its place.
plain: the target's own token, where nothing was drafted for its place.
"""


RoundPart = Literal["forward", "draft", "control", "search", "waiting"]
"""A part of a round's time. forward: running its rows, choosing and committing tokens. draft: making the draft.
control: deciding whether to draft, and reporting to drafters and controller. search: looking for a better way of
drafting (`Searcher`). waiting: for other sequences of the batch."""


class Stopwatch:
    """Attributes the time of a generation to the parts of its rounds. It is stopped while the caller has a round."""

    def __init__(self) -> None:
        self._part: RoundPart | None = None
        self._since = 0.0
        self._seconds = defaultdict[RoundPart, float](float)

    def start(self, part: RoundPart) -> None:
        """End the part that runs, if any, and start another one."""
        self.stop()
        self._part, self._since = part, perf_counter()

    def stop(self) -> None:
        """End the part that runs, if any."""
        if self._part is not None:
            self._seconds[self._part] += perf_counter() - self._since
        self._part = None

    def attribute(self, seconds: float, part: RoundPart) -> None:
        """Attribute this many seconds of the part that runs to another one."""
        assert self._part is not None
        self._seconds[self._part] -= seconds
        self._seconds[part] += seconds

    def lap(self) -> defaultdict[RoundPart, float]:
        """Stop. Returns the seconds by part since the last lap, 0.0 for parts that there were not."""
        self.stop()
        seconds, self._seconds = self._seconds, defaultdict(float)
        return seconds


@dataclass(frozen=True)
class Round:
    """One pass of the loop: the prefill with the first token, or draft, forward, verify, commit.

    token_ids : emitted tokens
    drafted : tokens proposed
    accepted : proposed tokens that the target accepted, which `token_ids` begins with
    corrected : whether the draft had other tokens in the place of the last one of `token_ids`
    depth : tokens on the longest path of the draft, the most that could be accepted
    source : name of the drafter
    rows : this sequence's rows in the round's forward, or in all forwards of a prefill; 0: cancelled before a forward
    forwards : the number of forwards, of `rows` rows each, that the round ran: several only without a draft, each
        for the token that the one before it brought
    seconds : wall time of the round, drafting included
    draft_seconds : part of `seconds` spent on making the draft, without work done once for later drafts too
    control_seconds : part of `seconds` spent on deciding whether to draft, and on reporting to drafters and controller
    target_seconds : part of `seconds` that the target's forwards took, over all sequences of its batch
    idle : why nothing was drafted; None where something was, or where there is no drafter
    forward : cost of the round without its draft; None for a prefill
    together : rounds with a draft that one call of the engine ran, this one included
    threads : threads that computed its forward
    logprobs : log probabilities of the emitted tokens, where they were asked for
    prompt_logprobs : those of the prompt's tokens after the first one, in the round of the prefill, where they were
        asked for
    finish_reason : why the generation ends with this round; None if it goes on
    """

    token_ids: tuple[int, ...]
    drafted: int = 0
    accepted: int = 0
    corrected: bool = False
    depth: int = 0
    source: str = "none"
    rows: int = 1
    forwards: int = 1
    seconds: float = 0.0
    draft_seconds: float = 0.0
    control_seconds: float = 0.0
    target_seconds: float = 0.0
    idle: IdleReason | None = None
    forward: ForwardCost | None = None
    together: int = 1
    threads: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: EndReason | None = None

    @property
    def is_alone(self) -> bool:
        """Whether its forward had a call of the engine of its own."""
        return self.forwards == self.together == 1

    @property
    def origins(self) -> tuple[Origin, ...]:
        """The origin of each token of `token_ids`."""
        own: Origin = "corrected" if self.corrected else "plain"
        return tuple("accepted" if at < self.accepted else own for at in range(len(self.token_ids)))


class ForwardCost(NamedTuple):
    """The part of a round's cost that depends on the number of rows: a forward over all sequences that took part.

    rows, wanted : rows of the forward, and those whose outputs were wanted: fewer where a sequence was prefilling
    seconds : wall time, including the sequence's own work before and after the forward, which every round pays once.
        Without the time spent on waiting for other sequences, drafting, and deciding whether to draft
    experts : distinct experts that a layer read, averaged over the layers; 0 for a model without experts
    """

    rows: int
    wanted: int
    seconds: float
    experts: float = 0.0


@dataclass(frozen=True)
class TokenLogprob:
    """The probability that the target gave to an emitted token, or to a token of the prompt.

    logprob : natural logarithm of the token's probability under the target's own logits, before biases, penalties,
        temperature and filters
    top : the likeliest tokens at this position with their log probabilities, likeliest first, lowest id first in a tie
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass
class DraftCounts:
    """Sums over the rounds that drafted something.

    The names are those of vLLM's metrics (`vllm:spec_decode_num_drafts` and so on) and of its per-request object.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_drafts_per_pos: list[int] = field(default_factory=list)
    """Number of drafts with a token at depth 1, 2, ...; for chains, a first, second, ... token."""
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    """Number of these drafts whose token at that depth was accepted."""

    def add_draft(self, drafted: int, depth: int, accepted: int) -> None:
        """Count one draft: its tokens, the length of its longest path, and the tokens that the target accepted."""
        self.num_drafts += 1
        self.num_draft_tokens += drafted
        self.num_accepted_tokens += accepted
        missing = depth - len(self.num_drafts_per_pos)
        self.num_drafts_per_pos += [0] * missing
        self.num_accepted_tokens_per_pos += [0] * missing
        for position in range(depth):
            self.num_drafts_per_pos[position] += 1
            self.num_accepted_tokens_per_pos[position] += position < accepted

    def include(self, other: DraftCounts) -> None:
        """Add the counts of another generation."""
        self.num_drafts += other.num_drafts
        self.num_draft_tokens += other.num_draft_tokens
        self.num_accepted_tokens += other.num_accepted_tokens
        sums = partial(zip_longest, fillvalue=0)
        self.num_drafts_per_pos = [*map(sum, sums(self.num_drafts_per_pos, other.num_drafts_per_pos))]
        self.num_accepted_tokens_per_pos = [
            *map(sum, sums(self.num_accepted_tokens_per_pos, other.num_accepted_tokens_per_pos))
        ]

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted tokens per drafted token."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens emitted per round with a draft, the target's own included."""
        return 1.0 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    def draft_figures(self) -> dict[str, Any]:
        """All counts and rates, for JSON."""
        return {
            "num_drafts": self.num_drafts,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "num_drafts_per_pos": self.num_drafts_per_pos,
            "num_accepted_tokens_per_pos": self.num_accepted_tokens_per_pos,
            "draft_acceptance_rate": self.draft_acceptance_rate,
            "mean_acceptance_length": self.mean_acceptance_length,
        }


@dataclass
class Stats(DraftCounts):
    """Sums over one generation. Times are in seconds; `decode_s` does not include the prefill and the first token."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens whose KV was cached."""
    prompt_read: bool = False
    """Whether the whole prompt was read, which a cancellation may prevent."""
    new_tokens: int = 0
    """Tokens of the reply, and of a stop string that ended it."""
    prefill_s: float = 0.0
    decode_s: float = 0.0
    target_s: float = 0.0
    """Part of `decode_s` in which the target's forwards ran. The rest, without `draft_s` and `control_s`, went into
    choosing tokens, waiting for other sequences, and what is done once for later drafts, as a draft model's reading."""
    draft_s: float = 0.0
    """Part of `decode_s` spent on making drafts."""
    control_s: float = 0.0
    """Part of `decode_s` spent on deciding what to draft, and on learning from the verdicts."""
    load_s: float = 0.0
    target_forwards: int = 0
    drafter: str = "none"
    engine: str = ""
    peak_rss_bytes: int = 0
    threads: int = 0
    """Threads that a forward may use at most."""
    threads_ran: list[int] = field(default_factory=list)
    """Number of decoding forwards that used 1, 2, ... threads: a forward uses as many as make it faster."""
    expert_reads: float = 0.0
    """Experts read by the forwards of decoding rounds, averaged over the layers. An expert that several rows chose is
    read once."""
    by_source: dict[str, DraftCounts] = field(default_factory=dict)
    """The draft counts by drafter."""
    rounds_without_draft: int = 0
    fallbacks: dict[IdleReason, int] = field(default_factory=dict)
    """Forwards without a draft by reason; empty for a generation without a drafter."""
    costs_age_s: float | None = None
    """Age of the cost measurements that the first round was planned with; None where there were none."""

    def count(self, this: Round) -> None:
        """Count the next round. The first is the prefill; one without rows ends a cancelled generation."""
        if not self.new_tokens:
            self.prefill_s, self.new_tokens = this.seconds, len(this.token_ids)
            self.prompt_read = this.rows > 0
        elif this.rows:
            self.add(this)

    def add(self, this: Round) -> None:
        """Count one decoding round."""
        self.new_tokens += len(this.token_ids)
        self.decode_s += this.seconds
        self.target_s += this.target_seconds
        self.draft_s += this.draft_seconds
        self.control_s += this.control_seconds
        self.target_forwards += this.forwards
        self.threads_ran += [0] * (this.threads - len(self.threads_ran))
        if this.threads:
            self.threads_ran[this.threads - 1] += this.forwards
        if this.forward is not None:
            self.expert_reads += this.forward.experts * this.forwards
        if this.drafted:
            self.add_draft(this.drafted, this.depth, this.accepted)
            self.by_source.setdefault(this.source, DraftCounts()).add_draft(this.drafted, this.depth, this.accepted)
        else:
            self.rounds_without_draft += this.forwards
        if this.idle is not None:
            self.fallbacks[this.idle] = self.fallbacks.get(this.idle, 0) + this.forwards

    @property
    def drafted(self) -> int:
        return self.num_draft_tokens

    @property
    def accepted(self) -> int:
        return self.num_accepted_tokens

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens after the first per second of decoding; 0.0 if there was only one."""
        return (self.new_tokens - 1) / self.decode_s if self.decode_s > 0 else 0.0

    @property
    def tokens_per_round(self) -> float:
        """Tokens after the first per target forward."""
        return (self.new_tokens - 1) / self.target_forwards if self.target_forwards else 0.0

    @property
    def experts_per_round(self) -> float:
        """Distinct experts of a layer that a forward read, on average; 0.0 for a model without experts."""
        return self.expert_reads / self.target_forwards if self.target_forwards else 0.0

    @property
    def usual_threads(self) -> int:
        """The number of threads that most decoding forwards used; before the first, `threads`."""
        ran = self.threads_ran
        return max(range(len(ran)), key=ran.__getitem__) + 1 if ran else self.threads

    def timings(self) -> dict[str, Any]:
        """The `timings` object of llama.cpp's server. Rates and times per token do not count the first token, which
        comes with the prefill.
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
