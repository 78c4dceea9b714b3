"""Calls every method, filter and test that a template can reach with operands whose product would take hours.

    python -m tests.text.template_costs [--all]

writes each name before it is called, so that the last line says which one did not end.
"""

from __future__ import annotations

import sys
from typing import Any

from ondevice.text import template_sandbox
from ondevice.text.marked_text import METHODS, MarkedText
from ondevice.text.template_sandbox import FILTERS, FUNCTIONS, TESTS, LimitedEnvironment

SIZE = 1 << 22
"""Characters of a text: reading it takes milliseconds, and its square an hour."""

ITEMS = 1 << 16
"""Items of a list, and numbers with the same hash: their square takes minutes."""

NESTED: list[Any] = ["a"]
for _ in range(14):
    NESTED = [NESTED, NESTED]

VALUES: dict[str, Any] = {
    "alike": "a" * SIZE,
    "almost": "b" * (SIZE // 2) + "a",
    "almost backwards": "ab" + "a" * (SIZE // 2),
    "lines": "a\n" * (SIZE // 2),
    "periodic": "ab" * (SIZE // 4) + "b",
    "digits": "9" * SIZE,
    "braces": "{}" * (SIZE // 4),
    "fields": "%s" * (SIZE // 4),
    "marked": MarkedText("a" * SIZE),
    "checkered": MarkedText("ab" * (SIZE // 64), range(SIZE // 32)),
    "long path": "a." * (SIZE // 2),
    "path": "a." * 99 + "a",
    "collisions": [number * ((1 << 61) - 1) for number in range(ITEMS)],
    "pairs": [(number * ((1 << 61) - 1), 0) for number in range(ITEMS)],
    "texts": ["a" * (SIZE // 64)] * 64,
    "nested": NESTED,
    "number": 10**9,
    "long number": 10**4000,
}
GIVEN = ("almost", "almost backwards", "periodic", "marked", "collisions", "path", "long path", "number")

SOME = [("alike", "almost"), ("alike", "almost backwards"), ("marked", "marked"), ("texts", "path")]
"""The operands that are tried without `--all`."""


def calls() -> list[str]:
    """Every method, filter, test, function and operator of x, with and without y."""
    made = [f"x.{name}({y})" for name in sorted(METHODS) for y in ("", "y")]
    made += [f"x|{name}{y}" for name in sorted(FILTERS) for y in ("", "(y)", "(attribute=y)")]
    made += [f"x is {name}{y}" for name in sorted(TESTS) if name.isalpha() for y in ("", "(y)")]
    made += [f"{name}(x)" for name in sorted(FUNCTIONS | {"strftime_now"})]
    return made + [f"x {sign} y" for sign in ("+", "-", "*", "/", "//", "%", "**", "~", "in", "<", "==")]


def main() -> None:
    template_sandbox.MOST_SECONDS = 0.02
    environment = LimitedEnvironment()
    operands = [(x, y) for x in VALUES for y in GIVEN] if sys.argv[1:] == ["--all"] else SOME
    for call in calls():
        try:
            template, _ = environment.compiled("{{ (" + call + ")|string|length }}")
        except Exception:  # it takes no such argument
            continue
        sys.stdout.write(f"{call}\n")
        sys.stdout.flush()
        for x, y in operands:
            try:
                environment.rendered(template, {"x": VALUES[x], "y": VALUES[y]})
            except Exception:  # a limit, or whatever Python raises
                continue


if __name__ == "__main__":
    main()
