"""Kinds of work: those of a bundle are those of its plans, and a library with no others computes the same bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from ondevice.bundle import Bundle
from ondevice.engines.simd.caches import LookupSettings
from ondevice.engines.simd.kernels.kinds import OF_PRODUCTS, OF_STEPS, kinds_of
from ondevice.engines.simd.program import Models, Program
from ondevice.native import library
from ondevice.native.functions import ENTRIES
from ondevice.native.sets import KINDS, Part
from tests.simd.outputs import digest

ROOT = Path(__file__).parents[2]


def test_the_kinds_of_a_bundle_are_those_of_its_plans(bundle: Bundle) -> None:
    for lookup, added in (None, set()), (LookupSettings(), {"lookup"}):
        program = Program(bundle, most_rows=8, threads=1, lookup=lookup, kv_cache="int8")
        plans = [program.plan(), *(heads.plan for heads in program.heads.values())]
        plans += [program.drafter.plan] if program.drafter is not None else []
        planned = frozenset[str]().union(*(kinds_of(plan.steps) for plan in plans))
        assert planned >= added
        assert program.kinds == planned | {"int8"}
        assert Models(bundle).kinds() == planned - added


def test_every_kind_is_some_step_s_or_product_s() -> None:
    assert {*OF_PRODUCTS.values(), *OF_STEPS.values(), "int8"} == KINDS


def test_every_kind_has_kernels() -> None:
    functions = pytest.importorskip("ondevice.native.functions")
    modules = {name: import_module(name) for name in library.sources() if ".kernels." in name}
    kernels = [each for module in modules.values() for each in vars(module).values()]
    marked = {each.kind for each in kernels if isinstance(each, functions.Kernel)}
    assert marked == {"", *KINDS}
    assert {kind for entry in ENTRIES.values() for kind in entry.part.kinds} == {"int8", "lookup"}


@pytest.mark.slow
def test_what_a_bundle_needs_is_built_and_later_what_options_need(bundles: dict[str, Bundle], tmp_path: Path) -> None:
    """Each cache and attention asks for more; the outputs are those of the whole library."""
    if library.choice().file is not None:
        pytest.skip("a shared library is used")
    bundle = bundles["e2b"]
    environment = {**os.environ, "ONDEVICE_CACHE": str(tmp_path)}
    command = [sys.executable, "-m", "tests.simd.outputs", str(bundle.path)]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert json.loads(ended.stdout)["digests"] == [digest(bundle)]
    built = [Part.of_stem(file.stem) for file in tmp_path.rglob("forward*.block")]
    own = Models(bundle).kinds()
    assert {part.kinds for part in built} == {own, own | {"lookup"}, own | {"int8"}, own | {"int8", "lookup"}}
