"""Texts of the target's own, on which drafts with sub-layers left out are compared with it: many places at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import median
from time import perf_counter

from ondevice.drafters.skip_search import SkipCosts, survival_of
from ondevice.engines.layer_path import LayerPath
from ondevice.engines.path_memory import MOST_DRAFTED, Skips, Survival, path_of
from ondevice.engines.protocol import WHOLE, Engine, Rows, Session, TokenTree

REPEATS = 3
"""Timings of which the median counts."""

ROWS = 5
"""Rows of the second forward that is timed: a line through both tells of the others."""


class SkipSample:
    """Some tokens behind a session's committed ones, and which token the whole target finds likeliest after each.

    Every path is run over all of them in one forward. Where layers share caches that is what a draft would say at each
    place, exactly. Elsewhere, a draft sees keys and values of the drafted tokens that a path has made; here of all.
    """

    def __init__(self, engine: Engine, session: Session, tokens: Sequence[int]) -> None:
        """
        Args:
            engine: the session's.
            session: of the sample alone; nothing is committed to it.
            tokens: at least one, at most `session.max_rows()`.
        """
        self._engine, self._session = engine, session
        self._tree = TokenTree.chain(list(tokens))
        self._expected = self._likeliest(WHOLE)

    def matches(self, skips: Skips) -> list[bool]:
        """For each place, whether a draft without these would be right."""
        found = self._likeliest(path_of(skips))
        return [one == other for one, other in zip(found, self._expected, strict=True)]

    def timings(self, free: Skips) -> Iterator[Callable[[], float]]:
        """Work to be done one by one: seconds of forwards of 1 and ROWS rows, and of drafts of a token without any of
        `free`, without its attention, and without its feed-forward blocks. `costs_of` takes their answers.
        """
        attention = frozenset(sub for sub in free if sub[0] == "attention")
        for rows, skips in ((1, None), (ROWS, None), (1, free), (1, attention), (1, free - attention)):
            path = WHOLE if skips is None else path_of(skips)
            yield lambda rows=rows, path=path: self._seconds(rows, path)  # type: ignore[misc]

    def close(self) -> None:
        self._session.close()

    def _seconds(self, rows: int, path: LayerPath) -> float:
        tree = TokenTree.chain([int(self._tree.tokens[0])] * rows)
        taken = []
        for _ in range(REPEATS + 1):
            self._engine.forward(
                [Rows(self._session, TokenTree.chain([0]), [0])]
            )  # whose rows none of these begin like
            started = perf_counter()
            self._engine.forward([Rows(self._session, tree, range(rows), path)])
            taken.append(perf_counter() - started)
        return median(taken[1:])  # the first one plans the path

    def _likeliest(self, path: LayerPath) -> list[int]:
        rows = Rows(self._session, self._tree, range(len(self._tree)), path)
        (outputs,) = self._engine.forward([rows])
        found: list[int] = outputs.logits.argmax(axis=1).tolist()
        return found


def costs_of(timings: Sequence[float], free: Skips) -> SkipCosts:
    """What the answers of `SkipSample.timings` come to."""
    one, several, least, without_attention, without_mlp = timings
    row = max(several - one, 0.0) / (ROWS - 1)
    blocks = len(free) / 2
    return SkipCosts(
        [one + row * extra for extra in range(MOST_DRAFTED + 1)],
        least,
        attention=max(without_mlp - least, 0.0) / blocks,
        mlp=max(without_attention - least, 0.0) / blocks,
    )


def survival_on(samples: Sequence[SkipSample], skips: Skips) -> Survival:
    return survival_of([sample.matches(skips) for sample in samples])
