"""The mutants that `python -m tests.project.mutation` makes, and the test files that it runs for a module."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.project import mutation
from tests.project.mutation import PATHS, Finder, chosen, distances, mutants, stages

SOURCE = '''
"""A docstring with 1 + 2."""
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from numpy import int8 as Eight

__all__ = ["work"] + []
Size = Literal[2, 4]


@cache(maxsize=1)
def work(count: int | None = 3, *, other: "1 + 2") -> "3 < 4":
    """Not 5 < 6."""
    total: int | float = -count
    for é, each in zip("é", count, strict=True):
        if (each) < total <= 2.5 and not other:
            continue
        total += max(each * 2, 0)
    if other is not None or "é" in other:
        return [f"{total + 1}", "a" + total]
    return None
'''
MUTANTS = {
    "3": "2",
    "-": "+",
    "<": ">=",
    "<=": ">",
    "2.5": "0.0",
    "and": "or",
    "not": "",
    "continue": "break",
    "+=": "-=",
    "max": "min",
    "*": "//",
    "2": "1",
    "0": "1",
    "is not": "is",
    "or": "and",
    "in": "not in",
    '[f"{total + 1}", "a" + total]': "None",
}


def test_sites_are_tokens_that_the_program_runs() -> None:
    sites = Finder(SOURCE).sites
    assert {SOURCE[site.start : site.end]: site.options[-1] for site in sites} == MUTANTS
    assert len(sites) == len(MUTANTS)
    for site in sites:
        for option in site.options:
            assert ast.dump(ast.parse(SOURCE[: site.start] + option + SOURCE[site.end :])) != ast.dump(
                ast.parse(SOURCE)
            )


def test_a_choice_depends_on_the_seed_and_survives_edits_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutation, "ROOT", tmp_path)
    path = tmp_path / "ondevice" / "work.py"
    path.parent.mkdir()
    path.write_text(SOURCE)
    first = {mutant.key for mutant in chosen(["*.py"], 8, 1)}
    assert len(first) == 8
    assert first != {mutant.key for mutant in chosen(["*.py"], 8, 2)}
    path.write_text("EARLIER = 9\n" + SOURCE)
    assert len(first & {mutant.key for mutant in chosen(["*.py"], 8, 1)}) >= 7
    keys = [mutant.key for mutant in mutants(path, 1)]
    assert len(set(keys)) == len(keys)


def test_the_nearest_test_files_run_first() -> None:
    far = distances("ondevice.generate.verify")
    assert far["tests/generate/test_verify.py"] == 1
    assert far["tests/cli/test_generate.py"] > 1
    (first, seconds), *others = stages("ondevice.generate.verify", dict.fromkeys(far, 10.0))
    assert first[0] == "tests/generate/test_verify.py"
    assert seconds >= mutation.STAGE_S
    assert seconds + sum(spent for _, spent in others) <= mutation.TESTS_S


def test_there_are_mutants_of_every_part() -> None:
    assert {Path(mutant.path).parts[1] for mutant in chosen(PATHS, 200, 1)} == {
        "generate",
        "engines",
        "bundle_format",
        "text",
        "server",
    }
