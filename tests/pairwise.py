"""Parametrisation by pairs: every two values of different parameters occur together in some test case."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet


def pairwise(
    *, ids: Callable[[Any], str] = str, unless: Callable[..., bool] | None = None, **values: Sequence[Any]
) -> pytest.MarkDecorator:
    """`pytest.mark.parametrize` with a few cases instead of the full product.

    A fault that depends on one or two parameters is found as surely as by the full product; a fault that depends on
    three at once may be missed. The cases depend on the arguments alone, so they are the same in every run.

    Args:
        ids: converts a value to its name in the test's id.
        unless: called with the parameters by name; cases for which it returns true are left out.
        values: the values of each parameter; the marks of a `pytest.param` apply to all cases with that value.
    """
    plain = {
        name: [each.values[0] if isinstance(each, ParameterSet) else each for each in some]
        for name, some in values.items()
    }
    marks = [[each.marks if isinstance(each, ParameterSet) else () for each in some] for some in values.values()]
    cases = [
        pytest.param(
            *(some[index] for some, index in zip(plain.values(), case, strict=True)),
            marks=[mark for some, index in zip(marks, case, strict=True) for mark in some[index]],
            id="-".join(ids(some[index]) for some, index in zip(plain.values(), case, strict=True)),
        )
        for case in pairwise_cases(plain, unless)
    ]
    return pytest.mark.parametrize(list(plain), cases)


def pairwise_cases(
    values: Mapping[str, Sequence[Any]], unless: Callable[..., bool] | None = None
) -> list[tuple[int, ...]]:
    """The cases of `pairwise` as tuples of value indices, one index per parameter.

    Greedy: each next case is the first of those that contain the most pairs not yet covered.
    """
    product = [
        case
        for case in itertools.product(*(range(len(some)) for some in values.values()))
        if unless is None
        or not unless(**{name: some[index] for (name, some), index in zip(values.items(), case, strict=True)})
    ]
    pairs = [frozenset(itertools.combinations(enumerate(case), 2)) for case in product]
    missing = set[Any]().union(*pairs)
    chosen = []
    while missing:
        best = max(range(len(product)), key=lambda number: len(pairs[number] & missing))
        missing -= pairs[best]
        chosen.append(product[best])
    return sorted(chosen)
