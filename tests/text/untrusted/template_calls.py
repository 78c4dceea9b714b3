"""Times every single call that a template can reach, with operands whose product would take minutes.

    python -m tests.text.untrusted.template_calls [--all]

writes a line for each call before it begins, and its seconds of processor time after it. What there is to call is read
from the environment and from the values themselves, so what a later version of Python or jinja2 adds is called too.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from itertools import product
from time import thread_time
from typing import Any

from markupsafe import Markup

from ondevice.text import template_sandbox
from ondevice.text.template_sandbox import LimitedEnvironment

SIZE = 1 << 19
"""Characters of a text: reading it takes a millisecond, and its square a minute."""

ITEMS = 1 << 15
"""Items of a list, and numbers with the same hash: their square takes half a minute."""

COLLIDING = [number * ((1 << 61) - 1) for number in range(ITEMS)]
VALUES: dict[str, Any] = {
    "alike": "a" * SIZE,
    "alike, wide": "世" * SIZE,
    "almost": "b" * SIZE + "a",
    "almost, wide": "b" * SIZE + "世",
    "almost alike": "ab" + "a" * (SIZE // 2),
    "periodic": "ab" * (SIZE // 2) + "b",
    "separators": "a, " * (SIZE // 3),
    "lines": "a\n" * (SIZE // 2),
    "digits": "9" * SIZE,
    "fields": "{}%s" * (SIZE // 4),
    "path": "a." * (SIZE // 2),
    "short": "ab",
    "markup": Markup("<!--a-->&amp;" * (SIZE // 12)),
    "items": ["a"] * ITEMS,
    "long items": ["a" * 1000 + "b"] * 1000,
    "colliding": COLLIDING,
    "pairs": [(number, number) for number in COLLIDING],
    "tuple": tuple(COLLIDING),
    "mapping": {"a": {"a": 1}, **dict.fromkeys(map(str, range(ITEMS)), "b")},
    "keys": dict.fromkeys(range(ITEMS)).keys(),
    "range": range(99_999),
    "number": 10**4000,
    "fraction": 1e308,
    "true": True,
}
PAIRS = [
    ("alike", "almost"), ("alike", "almost alike"), ("alike, wide", "almost, wide"), ("separators", "periodic"),
    ("lines", "short"), ("digits", "number"), ("fields", "path"), ("markup", "alike"), ("items", "path"),
    ("long items", "almost"), ("colliding", "colliding"), ("pairs", "range"), ("tuple", "short"), ("mapping", "path"),
    ("keys", "range"), ("range", "number"), ("number", "number"), ("fraction", "alike"), ("true", "short"),
]  # fmt: skip
"""Names of the operands `x` and `y`; with `--all`, each value with each."""


def expressions(environment: LimitedEnvironment, value: Any) -> Iterator[str]:
    """A call of each method, filter, test, function and operator with `x`, which is the value, and `y`."""
    for name in dir(value):
        if environment.is_safe_attribute(value, name, getattr(value, name)):
            yield from (f"x.{name}{given}" for given in ("()", "(y)", "(y, y)"))
    for given in ("", "(y)", "(attribute=y)", "('in', y)", "('trim', y)"):
        yield from (f"x|{name}{given}" for name in environment.filters)
    yield from (f"x is {name} y" for name in environment.tests if name.isalpha())
    yield from (f"x {sign} y" for sign in ("+", "-", "*", "/", "//", "%", "**", "~", "in", "<", "=="))
    yield from (f"{name}(x)" for name in environment.globals)
    yield "x[1:]"


def main() -> None:
    template_sandbox.MAX_SECONDS = 0.01  # so that what consists of many steps ends soon
    environment = LimitedEnvironment()
    compiled = cache(
        lambda expression: environment.compiled(
            "{% set z = " + expression + " %}{{ z|length if z is string else z|list|length }}"
        )
    )
    for x, y in product(VALUES, VALUES) if sys.argv[1:] == ["--all"] else PAIRS:
        for expression in expressions(environment, VALUES[x]):
            sys.stdout.write(f"{expression} of {x} and {y}\t")
            sys.stdout.flush()
            begun = thread_time()
            try:
                template = compiled(expression)
                environment.restart()
                template.render(x=VALUES[x], y=VALUES[y])
            except Exception:  # a limit, or whatever Python raises
                pass
            sys.stdout.write(f"{thread_time() - begun:.3f}\n")


if __name__ == "__main__":
    main()
