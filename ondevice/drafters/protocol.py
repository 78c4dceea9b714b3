"""One protocol for every way of guessing what the target will say next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ondevice.decoding.sampling import Sampler
from ondevice.decoding.sampling_options import SamplingOptions
from ondevice.engines.protocol import Outputs, Session
from ondevice.engines.token_tree import ROOT

if TYPE_CHECKING:
    from ondevice.decoding.constraint import Constraint
    from ondevice.decoding.limits import Limits
    from ondevice.decoding.trust import Trust

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]

GREEDY = Sampler(SamplingOptions(temperature=0.0))


def _no_floats() -> Floats:
    return np.zeros(0, np.float32)


@dataclass(frozen=True)
class Draft:
    """Proposed tokens, a chain or a tree. May be empty.

    tokens : int64[n]
    parents : int64[n], the index of each token's parent in this draft, ROOT for those that follow the newest token
    confidence : float32[n], the drafter's own estimate that the target takes the token given that it took the parent
    probs : float32[n, V] for a stochastic drafter: the distribution each token was drawn from, after the same
        temperature, top-k, top-p and penalties as the target's; None for a deterministic drafter
    source : who drafted it
    reading_s : seconds that were spent on it once, as a draft model does that reads the text before its first draft
    """

    tokens: Ids
    parents: Ids
    confidence: Floats = field(default_factory=_no_floats)
    probs: Floats | None = None
    source: str = "none"
    reading_s: float = 0.0

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def depth(self) -> int:
        """Tokens on the longest path: as many as could be accepted."""
        depths: list[int] = []
        for parent in self.parents.tolist():  # a handful of numbers, in every round: arrays take four times as long
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return max(depths, default=0)

    @classmethod
    def chain(cls, tokens: Sequence[int], confidence: Sequence[float] = (), source: str = "none") -> Draft:
        parents = np.arange(-1, len(tokens) - 1, dtype=np.int64)
        return cls(np.asarray(tokens, np.int64), parents, np.asarray(confidence, np.float32), None, source)

    @classmethod
    def empty(cls) -> Draft:
        return cls.chain([])


@dataclass(frozen=True)
class Forecast:
    """What a drafter expects of its next draft, before it is paid for.

    survival : float32[<=nodes], the chance that the target takes node i with all before it on its path, in the order in
        which the drafter would propose them; never rising, so the first k nodes are the best draft of k. Their sum is
        the number of tokens expected, for a chain and for a tree. Shorter where the drafter has no more to say.
    source : who would draft it
    steady : whether it stays about as it is until something is drafted, because it depends on no text; where that does
        not pay, it is asked for again when a draft is to be tried, and not in every round
    trust : how far such forecasts came true, where somebody keeps count already; None: whoever plans by it does
    """

    survival: Floats
    source: str
    steady: bool = False
    trust: Trust | None = None


@dataclass(frozen=True)
class DraftRequest:
    """What a round asks of a drafter.

    nodes : tokens to propose at most
    floor : a deterministic drafter stops before a node whose chance of being taken, with all before it, is under this
    sampler : how the target will choose its tokens; `Sampler.guess` draws as it will
    context : every token up to the newest one
    trees : whether tokens may have siblings; chains only where the engine is not exact in trees
    """

    nodes: int
    floor: float = 0.0
    sampler: Sampler = GREEDY
    context: Sequence[int] = ()
    trees: bool = True


class Drafter(Protocol):
    """Proposes tokens for one generation at a time. What it learnt about acceptance stays from one to the next."""

    name: str

    def begin(self, prompt_ids: Sequence[int], session: Session) -> None:
        """A generation starts; the prompt is committed.

        Args:
            prompt_ids: all tokens so far, but for the first new one: `observe` tells that next.
            session: the target's sequence. Only committed tokens may be read, and nothing changed; what draft forwards
                (`Rows.path`) leave behind them is nobody's.
        """
        ...

    def forget(self) -> None:
        """Draft from nothing that was said so far. What was learnt about acceptance stays."""
        ...

    def forecast(self, nodes: int) -> Forecast:
        """The chances of a draft of up to `nodes` tokens; costs next to nothing."""
        ...

    def draft(self, request: DraftRequest) -> Draft:
        """Propose tokens that follow everything observed so far: at most `request.nodes`, or none."""
        ...

    def observe(self, emitted: Sequence[int], outputs: Outputs, path: Sequence[int]) -> None:
        """The target's verdict, whether or not this drafter drafted; first called after the prefill.

        It is told after every round, or, of rounds in which it was not asked, of some together when it will be.

        Args:
            emitted: tokens that now follow: the accepted drafts and then the target's own token. The last one has no
                KV in the session yet.
            outputs: the target's of the last round; they hold until the session's next forward.
            path: the rows of these outputs that the last tokens of `emitted` were chosen from.
        """
        ...


@runtime_checkable
class Reader(Protocol):
    """A drafter that reads the text itself, which may take long, and keeps what it has read."""

    def expect(self, limits: Limits) -> None:
        """A generation comes with these limits, which hold for reading too. Told before `begin`."""
        ...

    def rest(self) -> None:
        """The generation has ended."""
        ...


@runtime_checkable
class Searcher(Protocol):
    """A drafter that now and then looks for a better way of drafting while it is told of rounds. It limits itself what
    that takes, and it counts for no round.
    """

    @property
    def searched_s(self) -> float:
        """Seconds of it so far."""
        ...


@runtime_checkable
class Constrained(Protocol):
    """A drafter that wants to know what limits the tokens of a reply. What it drafts is cut in any case."""

    def constrain(self, constraint: Constraint | None) -> None:
        """Of the generation that begins; None where nothing does. Told before `begin`."""
        ...


__all__ = ["ROOT", "Constrained", "Draft", "DraftRequest", "Drafter", "Forecast", "Reader", "Searcher"]
