"""Texts of the target's own, on which drafts with sub-layers left out are compared with it: many places at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import median
from time import perf_counter

from ondevice.drafters.skip_search import SkipCosts, survival_of
from ondevice.engines.layer_path import LayerPath
from ondevice.engines.path_memory import MOST_DRAFTED, Skips, Survival, path_of
from ondevice.engines.protocol import WHOLE, Engine, Rows, Session, TokenTree

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

    def timings(self, free: Skips, repeats: int) -> Iterator[Callable[[], float]]:
        """Work to be done one by one, of 2 * (repeats + 1) forwards each: what a whole forward of ROWS rows takes, and
        drafts of a token without any of `free`, without its attention, and without its feed-forward blocks, as shares
        of a plain forward of one row. `costs_of` takes their answers.
        """
        attention = frozenset(sub for sub in free if sub[0] == "attention")
        for rows, path in (
            (ROWS, WHOLE),
            (1, path_of(free)),
            (1, path_of(attention)),
            (1, path_of(free - attention)),
        ):
            yield lambda rows=rows, path=path: self._share(rows, path, repeats)  # type: ignore[misc]

    def close(self) -> None:
        self._session.close()

    def _share(self, rows: int, path: LayerPath, repeats: int) -> float:
        """The median of several, each compared with the plain forward just before it: machines have moods."""
        token = int(self._tree.tokens[0])
        other = TokenTree.chain([int(token == 0)])  # so that neither takes over what the other one has run
        tree = TokenTree.chain([token] * rows)
        shares = []
        for _ in range(repeats + 1):
            started = perf_counter()
            self._engine.forward([Rows(self._session, other, [0])])
            between = perf_counter()
            self._engine.forward([Rows(self._session, tree, range(rows), path)])
            shares.append((perf_counter() - between) / (between - started))
        return median(shares[1:])  # the first one plans the path

    def _likeliest(self, path: LayerPath) -> list[int]:
        rows = Rows(self._session, self._tree, range(len(self._tree)), path)
        (outputs,) = self._engine.forward([rows])
        found: list[int] = outputs.logits.argmax(axis=1).tolist()
        return found


def costs_of(timings: Sequence[float], free: Skips) -> SkipCosts:
    """What the answers of `SkipSample.timings` come to."""
    several, without_all, *without = timings
    row = max(several - 1.0, 0.0) / (ROWS - 1)
    saved = max(1.0 - without_all, 0.0)
    attention, mlp = (max(1.0 - share, 0.0) for share in without)
    each = saved / ((attention + mlp) or 1.0) / (len(free) / 2)  # in proportion to what each kind saves alone
    return SkipCosts([1.0 + row * extra for extra in range(MOST_DRAFTED + 1)], each * attention, each * mlp)


def survival_on(samples: Sequence[SkipSample], skips: Skips) -> Survival:
    return survival_of([sample.matches(skips) for sample in samples])
