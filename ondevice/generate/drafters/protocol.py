"""The drafter protocol: how a drafter reads the committed text, forecasts, and proposes tokens.

`Drafter` is the protocol; `Forecast`, `DraftRequest` and `Draft` are what goes in and out. A drafter may also implement
`Reader`, `Searcher`, `Constrained` or `EngineDrafter`, which the loop and the scheduler look for. CONTRIBUTING.md shows
a complete drafter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np

from ondevice.arrays import Float32Array, Int64Array
from ondevice.engines.protocol import ROOT, DraftVerdict, Outputs, Session
from ondevice.generate.request import Constraint, Limits, SamplingOptions
from ondevice.generate.sampling.sampler import Sampler

__all__ = [
    "GREEDY",
    "ROOT",
    "Constrained",
    "Draft",
    "DraftRequest",
    "Drafter",
    "EngineDrafter",
    "Forecast",
    "Reader",
    "Searcher",
]

GREEDY = Sampler(SamplingOptions(temperature=0.0))


class Drafter(Protocol):
    """Proposes tokens for one generation at a time. What it learnt about acceptance is kept from one generation to the
    next.

    The order of calls: `begin`, `observe` with the first token, then in each round in which the controller asks this
    drafter `observe` with the tokens since the last call, `forecast` (see there), and `draft` if it decides to.
    """

    name: str

    def begin(self, prompt_ids: Sequence[int], session: Session) -> None:
        """Start a generation, whose prompt is committed.

        Args:
            prompt_ids: all tokens before the first new one, which `observe` reports next. Those of pictures are
                negative: no target chooses them, and they are dropped from drafts.
            session: the target's sequence. The drafter may read committed tokens and must not change them. Rows left
                pending by its own draft forwards (`Rows.path`) may be overwritten at any time.
        """
        ...

    def forget(self) -> None:
        """Drop all text seen so far, so that no draft is made from it. What was learnt about acceptance stays."""
        ...

    def forecast(self, nodes: int) -> Forecast:
        """The chances of the next draft, of up to `nodes` tokens. `auto` calls it in every round in which it asks this
        drafter, so it must cost next to nothing. Other schedules do so only to choose among several drafters.
        """
        ...

    def draft(self, request: DraftRequest) -> Draft:
        """Propose tokens that follow everything observed so far: at most `request.nodes`, or none."""
        ...

    def observe(self, emitted: Sequence[int], outputs: Outputs, path: Sequence[int]) -> None:
        """Report the target's verdict, whether or not this drafter drafted. Called first after the prefill, then before
        the drafter is asked again, and at the end of the generation. Rounds in which it was not asked are reported
        together.

        Args:
            emitted: tokens that now follow: the accepted drafts and then the target's own token. The last one has no
                KV in the session yet.
            outputs: the target's outputs of the last round; they hold until the session's next forward.
            path: the rows of these outputs that the last tokens of `emitted` were chosen from.
        """
        ...


@dataclass(frozen=True)
class Forecast:
    """A drafter's expectation of its next draft, before the draft is made.

    survival : float32[<=nodes], the probability that the target accepts node i and all nodes before it on its path. The
        nodes are in the order in which the drafter would propose them; the values never rise, so the first k nodes are
        the best draft of k. Their sum is the expected number of accepted tokens, for a chain and for a tree. Shorter
        than `nodes` where the drafter has no more to propose.
    source : name of the drafter that would make the draft
    depths : by number of nodes, from 1 on, the depth of such a draft, which its cost depends on; empty for a chain
    """

    survival: Float32Array
    source: str
    depths: Sequence[int] = ()

    def by_nodes(self, by_depth: Sequence[float]) -> Sequence[float]:
        """Values by depth, from 1 on, as values by number of nodes."""
        return [by_depth[depth - 1] for depth in self.depths] if self.depths else by_depth


@dataclass(frozen=True)
class DraftRequest:
    """A round's request to a drafter.

    nodes : tokens to propose at most
    row_floors, step_floors : see `pays_row` and `pays_step`; where they end, every row and step pays
    sampler : how the target will choose its tokens; `Sampler.guess` draws as it will
    context : every token up to the newest one
    trees : whether tokens may have siblings; False where the engine's results for a tree differ from those of chains
    """

    nodes: int
    row_floors: Sequence[float] = ()
    step_floors: Sequence[float] = ()
    sampler: Sampler = GREEDY
    context: Sequence[int] = ()
    trees: bool = True

    def row_floor(self, node: int) -> float:
        """The survival below which node number `node`, from 0 on, is not worth its row in the verification."""
        return self.row_floors[node] if node < len(self.row_floors) else 0.0

    def pays_row(self, node: int, survival: float) -> bool:
        """Whether a deterministic drafter should propose a token of this survival (see `Forecast`) as its node number
        `node`, or rather end the draft.
        """
        return survival >= self.row_floor(node)

    def pays_step(self, node: int, survival: float, step: int | None = None) -> bool:
        """Whether to run draft step number `step`, from 0 on, that computes a token, where the token has this expected
        survival and would be node number `node`: it must be worth the step and the row. In a chain, where each token
        takes a step, `step` may be left out.
        """
        step = node if step is None else step
        step_floor = self.step_floors[step] if step < len(self.step_floors) else 0.0
        return survival >= self.row_floor(node) + step_floor


def _no_floats() -> Float32Array:
    return np.zeros(0, np.float32)


@dataclass(frozen=True)
class Draft:
    """Proposed tokens, a chain or a tree. May be empty.

    tokens : int64[n]
    parents : int64[n], the index of each token's parent in this draft, ROOT for those that follow the newest token
    confidence : float32[n], the drafter's estimate that the target accepts the token given that it accepted its parent
    probs : float32[n, V] for a stochastic drafter: the distribution each token was drawn from, after the same
        temperature, top-k, top-p and penalties as the target's; None for a deterministic drafter
    source : name of the drafter that made it
    reading_s : seconds that this draft spent on work that later drafts need too and that is done once, such as a draft
        model reading the text before its first draft
    """

    tokens: Int64Array
    parents: Int64Array
    confidence: Float32Array = field(default_factory=_no_floats)
    probs: Float32Array | None = None
    source: str = "none"
    reading_s: float = 0.0

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def depth(self) -> int:
        """Number of tokens on the longest path: the most that could be accepted."""
        depths: list[int] = []
        for parent in self.parents.tolist():  # a few numbers in every round: arrays take four times as long
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return max(depths, default=0)

    def has_children(self, node: int) -> bool:
        """Whether a token was proposed after this node, or, for ROOT, after the newest token."""
        return node in self.parents.tolist()

    @classmethod
    def chain(cls, tokens: Sequence[int], confidence: Sequence[float] = (), source: str = "none") -> Draft:
        """A draft in which each token follows the one before."""
        parents = np.arange(-1, len(tokens) - 1, dtype=np.int64)
        return cls(np.asarray(tokens, np.int64), parents, np.asarray(confidence, np.float32), None, source)

    @classmethod
    def empty(cls) -> Draft:
        return cls.chain([])


# Optional protocols of a drafter.


@runtime_checkable
class Reader(Protocol):
    """A drafter that runs over the text itself, which may take long, and keeps the result for later generations."""

    def expect(self, limits: Limits) -> None:
        """Announce a generation, before `begin`. Reading must respect its limits: `limits.cancelled` ends it, and
        `limits.on_prefill` is called with its progress.
        """
        ...

    def rest(self) -> None:
        """The generation has ended."""
        ...


@runtime_checkable
class EngineDrafter(Protocol):
    """A drafter whose steps an engine can run by itself, for several rounds: see `engines.protocol.EngineDrafts`."""

    def widths(self, request: DraftRequest) -> tuple[Sequence[int], Float32Array]:
        """The number of guesses of each step that pay on average, at most GUESSES; and float32[H], which the first step
        reads.
        """
        ...

    def verified(self, verdicts: Sequence[DraftVerdict]) -> None:
        """Report drafts that the engine made. `observe` follows, with all their tokens together."""
        ...


@runtime_checkable
class Searcher(Protocol):
    """A drafter that looks for a better way of drafting during `observe`. It limits the time of that by itself, and the
    loop subtracts it from the rounds.
    """

    @property
    def searched_s(self) -> float:
        """Seconds spent on searching so far."""
        ...


@runtime_checkable
class Constrained(Protocol):
    """A drafter that uses the constraint of a reply. Forbidden tokens are removed from every draft in any case."""

    def constrain(self, constraint: Constraint | None) -> None:
        """Set the constraint of the next generation, before `begin`; None where it has none."""
        ...
