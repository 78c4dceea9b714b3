"""The drafter and the schedule of one generation: when they are asked and told, and what that takes."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from ondevice.decoding.pruning import pruned
from ondevice.decoding.record import IdleReason, Round
from ondevice.decoding.sampling import Sampler
from ondevice.decoding.schedule import NO_ROOM, Plan, Schedule
from ondevice.drafters.protocol import Constrained, Draft, Drafter, DraftRequest, Searcher
from ondevice.engines.protocol import Outputs, Session
from ondevice.errors import UsageError

NO_DRAFT = Draft.empty()


class Speculation:
    """Without a drafter it proposes nothing, and nothing is told.

    Rounds of rest (`Schedule.rests`) cost next to nothing: what they emit is told when the drafter is asked again.

    Attributes:
        idle: why nothing was proposed in this round; None where something was, or nobody could.
        draft_seconds: that making the draft took.
        asking_seconds: that deciding on it took, and telling of what became of it.
        search_seconds: that a drafter spent on looking for a better way of drafting, beside all that.
        concluding_seconds: of asking, what comes after the round, and counts for the next one.
    """

    def __init__(self, drafter: Drafter | None, schedule: Schedule | None, session: Session, sampler: Sampler) -> None:
        self._drafter, self._schedule = drafter, schedule
        self._session, self._sampler = session, sampler
        self._knows_constraint = isinstance(drafter, Constrained)
        self._searcher = drafter if isinstance(drafter, Searcher) else None
        self._untold: list[int] = []
        self._resting = True
        self.idle: IdleReason | None = None
        self.draft_seconds = self.asking_seconds = self.concluding_seconds = self.search_seconds = 0.0

    def begin(self, tokens: Sequence[int], first: int, outputs: Outputs) -> None:
        """The prompt is committed, and its first token is chosen."""
        if self._drafter is not None:
            if isinstance(self._drafter, Constrained):
                self._drafter.constrain(self._sampler.constraint)
            self._drafter.begin(tokens, self._session)
            self._drafter.observe([first], outputs, [0])

    def propose(self, tokens: Sequence[int], room: int, outputs: Outputs, path: Sequence[int]) -> Draft:
        """The draft of a round, perhaps none.

        Args:
            tokens: all, the newest one included.
            room: for tokens in this round.
            outputs, path: of the round before.
        """
        started = perf_counter()
        draft, self.draft_seconds, self.search_seconds = NO_DRAFT, 0.0, 0.0
        if self._drafter is not None and self._schedule is not None:
            self.idle = "unprofitable"
            self._resting = self._schedule.rests() and not self._is_forced()
            if not self._resting:
                self._tell(outputs, path)
                beside = outputs.wanted - len(outputs.logits)  # as many as last time
                plan = self._schedule.plan(self._drafter, room - 1, beside) if room > 1 else NO_ROOM
                if plan.k:
                    draft = self._draft(self._drafter, plan, tokens)
                self.idle = None if len(draft) else "no_match" if plan.k else plan.reason
        asking = perf_counter() - started - self.draft_seconds - self.search_seconds
        self.asking_seconds = self.concluding_seconds + asking
        self.concluding_seconds = 0.0
        return draft

    def tell(self, emitted: Sequence[int], outputs: Outputs, path: Sequence[int], *, last: bool) -> None:
        """What the target made of it, and whether that was the last round."""
        self._untold += emitted
        if last or not self._resting:
            started, searched = perf_counter(), self.search_seconds
            self._tell(outputs, path)
            self.asking_seconds += perf_counter() - started - (self.search_seconds - searched)

    def conclude(self, this: Round) -> None:
        """The round is over."""
        if self._schedule is not None and not self._resting:
            started = perf_counter()
            self._schedule.observe(this)
            self.concluding_seconds = perf_counter() - started

    def _tell(self, outputs: Outputs, path: Sequence[int]) -> None:
        if self._untold and self._drafter is not None:
            before = 0.0 if self._searcher is None else self._searcher.searched_s
            self._drafter.observe(self._untold, outputs, path)
            self._untold = []
            if self._searcher is not None:
                self.search_seconds += self._searcher.searched_s - before

    def _is_forced(self) -> bool:
        """Whether a drafter that knows the constraint has something certain to draft, and is worth waking."""
        constraint = self._sampler.constraint
        return constraint is not None and self._knows_constraint and constraint.forced(()) is not None

    def _draft(self, drafter: Drafter, plan: Plan, tokens: Sequence[int]) -> Draft:
        started = perf_counter()
        request = DraftRequest(plan.k, plan.floor, self._sampler, tokens, self._session.exact_trees)
        draft = drafter.draft(request)
        if len(draft) > request.nodes:
            raise UsageError(
                f"the drafter {drafter.name} proposed {len(draft)} tokens where {request.nodes} were asked for"
            )
        if not request.trees and draft.depth < len(draft):
            raise UsageError(
                f"the drafter {drafter.name} proposed a tree, and this engine verifies chains: "
                "use the simd engine, or a drafter that looks at request.trees"
            )
        if self._sampler.constraint is not None:
            draft = pruned(draft, self._sampler.constraint)
        self.draft_seconds = perf_counter() - started
        return draft
