"""Helpers that run forwards of one session, and random trees for forwards of several."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from ondevice.engines import kv_cache
from ondevice.engines.protocol import ROOT, Outputs, Rows, TokenTree
from ondevice.engines.simd.engine import SimdSession
from tests.fixtures.tiny_models import VOCAB


def run(session: SimdSession, tokens: TokenTree | Sequence[int], wanted: Sequence[int]) -> Outputs:
    """Run a forward of this session alone; a sequence of tokens is run as a chain."""
    tree = tokens if isinstance(tokens, TokenTree) else TokenTree.chain(tokens)
    return session.engine.forward([Rows(session, tree, wanted)])[0]


def extend(session: SimdSession, ids: Sequence[int], rng: np.random.Generator | None = None) -> None:
    """Commit `ids` in one chunk, or in random chunks if `rng` is given."""
    start = 0
    while start < len(ids):
        part = ids[start : start + (session.max_rows() if rng is None else int(rng.integers(1, 60)))]
        run(session, part, [len(part) - 1])
        session.commit(range(len(part)))
        start += len(part)


def random_tree(rng: np.random.Generator, count: int) -> TokenTree:
    """A random tree of `count` tokens: mostly chains with branches, sometimes with many branches."""
    branch = rng.choice([0.0, 0.3, 1.0])
    parents = [int(rng.integers(ROOT, row)) if rng.random() < branch else row - 1 for row in range(count)]
    return TokenTree(rng.integers(0, VOCAB, count), np.array(parents, np.int64))


def path_to(tree: TokenTree, row: int) -> list[int]:
    path: list[int] = []
    while row != ROOT:
        path.insert(0, row)
        row = int(tree.parents[row])
    return path


def assert_row_alone(session: SimdSession, tree: TokenTree, row: int, outputs: Outputs, index: int) -> None:
    """Assert that row `index` of `outputs` equals, bit for bit, decoding `row` after its ancestors one at a time."""
    length = session.length
    for ancestor in path_to(tree, row):
        plain = run(session, [int(tree.tokens[ancestor])], [0])
        session.commit([0])
    np.testing.assert_array_equal(outputs.logits[index], plain.logits[0])
    np.testing.assert_array_equal(outputs.hidden[index], plain.hidden[0])
    assert session.rewind(length) == length


def drafted(session: SimdSession, steps: int = 3) -> list[bytes]:
    """The bytes of all outputs of `steps` draft steps after the committed tokens."""
    found = []
    token, hidden = 9, np.linspace(-1, 1, session.engine.target.hidden_size, dtype=np.float32)
    for _ in range(steps):
        step = session.draft_step(token, hidden)
        found += [step.candidates.tobytes(), step.logits.tobytes(), step.hidden.tobytes()]
        token, hidden = int(step.candidates[step.logits.argmax()]), step.hidden
    return found


@contextmanager
def interrupted_allocations(monkeypatch: pytest.MonkeyPatch, place: int) -> Iterator[None]:
    """Raise KeyboardInterrupt at the allocation number `place` of arrays and of caches, and at all later ones."""
    made = list[object]()

    def interrupting(allocate: Callable[..., Any]) -> Callable[..., Any]:
        def allocation(*arguments: Any, **options: Any) -> Any:
            made.append(arguments)
            if len(made) > place:
                raise KeyboardInterrupt
            return allocate(*arguments, **options)

        return allocation

    with monkeypatch.context() as patch:
        patch.setattr(kv_cache, "mapped", interrupting(kv_cache.mapped))
        patch.setattr(np, "zeros", interrupting(np.zeros))
        yield
