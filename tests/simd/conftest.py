"""Quantised bundles of tiny random pairs, one per family, exported once per run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from benchmarks.speed.busy import AllThreads
from ondevice.bundle import Bundle
from ondevice.engines.protocol import KVCacheType
from ondevice.engines.simd import threads as thread_pool
from ondevice.engines.simd.caches import LookupSettings
from ondevice.engines.simd.engine import SimdEngine, SimdSession
from ondevice_export import export
from tests.conftest import MakePair, Once
from tests.fixtures.mxfp4 import save_in_mxfp4
from tests.fixtures.pairwise import pairwise_cases
from tests.fixtures.tiny_models import QUANTISED, save_heads
from tests.fixtures.trained_models import TRAINED
from tests.simd.hostile_forwards import write_all

AFFINE, TABLE, MXFP4 = "affine", "table", "mxfp4"
"""The pair of E2B's kind with one of these formats in all quantised matrices and tables of the target: int4 with
minimums, or looked up in a table, that of IQ4_NL or that of MXFP4."""
CONVOLUTIONS = "lfm2"
"""A target with convolutions, and a drafter that reads the cache of its attention."""
FAMILIES = (*QUANTISED, *TRAINED, AFFINE, TABLE, MXFP4, CONVOLUTIONS)
SINKS, SIGMOIDS, STATES, SHARED = "gpt-oss", "lfm2-moe", "qwen3.5", "qwen3.5-moe"
"""Targets without a drafter: sinks, a bias of every product, and experts with a function of gate and up together;
experts that are chosen by sigmoids and biases, and convolutions; states, and gates of attention; and the same with
experts, of which all tokens use one.
"""


@pytest.fixture(scope="module", autouse=True)
def every_thread_runs() -> Iterator[None]:
    """Keep all threads in use: tiny models soon run on one thread, and thread counts could not be compared."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(thread_pool, "ThreadChoice", AllThreads)
        yield


@pytest.fixture(scope="session")
def bundles(make_pair: MakePair, once: Once, kernels: None) -> dict[str, Bundle]:
    """Bundles by family with the default formats (int4 weights, int8 head), those that were trained quantised, and
    those of AFFINE, TABLE, MXFP4, CONVOLUTIONS, SINKS, SIGMOIDS, STATES and SHARED.
    """

    def export_all(directory: Path) -> None:
        for family in (*QUANTISED, *TRAINED):
            export(make_pair(family) / "target", directory / family)
        for form in (AFFINE, TABLE):
            export(make_pair("e2b") / "target", directory / form, quantize=f"int4-{form}", head_bits=4)
        target = save_in_mxfp4(make_pair("e2b") / "target", directory / "rounded" / "target")
        save_heads(target.parent / "heads", target, "e2b")
        export(target, directory / MXFP4, drafter=str(make_pair("e2b") / "drafter"))
        pair = make_pair(CONVOLUTIONS)
        export(pair / "target", directory / CONVOLUTIONS, drafter=str(pair / "mtp"))
        for family in (SINKS, SIGMOIDS, STATES, SHARED):
            export(make_pair(family) / "target", directory / family)

    directory = once("tiny", export_all)
    return {family: Bundle.open(directory / family) for family in (*FAMILIES, SINKS, SIGMOIDS, STATES, SHARED)}


@pytest.fixture(scope="session")
def hostile(once: Once, bundles: dict[str, Bundle]) -> Callable[[str], Path]:
    """A function that returns the directory of a family's bundles and session files with hostile numbers."""
    return lambda family: once(f"hostile-{family}", lambda directory: write_all(bundles[family].path, directory))


@pytest.fixture(scope="session", params=FAMILIES)
def bundle(request: pytest.FixtureRequest, bundles: dict[str, Bundle]) -> Bundle:
    return bundles[request.param]


@pytest.fixture(scope="session")
def tiny(bundles: dict[str, Bundle]) -> Path:
    """The directory of the E2B-like pair's bundle."""
    return bundles["e2b"].path


@pytest.fixture(scope="session")
def trained(bundles: dict[str, Bundle]) -> Path:
    """The directory of a bundle that was trained quantised, with every number of bits and float32 activations."""
    return bundles["half"].path


LOOKUP = LookupSettings(keys=32, window=64, learn=64)
"""With 256 tokens and these settings, rows from position 129 on choose one of up to five units of keys."""
NOMAD = replace(LOOKUP, mode="nomad")
LOOKUPS = (None, LOOKUP, NOMAD)
SETTINGS = [
    (FAMILIES[family], get_args(KVCacheType)[kind], LOOKUPS[lookup])
    for family, kind, lookup in pairwise_cases(
        {"family": FAMILIES, "kind": get_args(KVCacheType), "lookup": LOOKUPS},
    )
]
"""Combinations in which every pair of family, cache type and attention occurs."""


@pytest.fixture(
    scope="module",
    params=SETTINGS,
    ids=[f"{family}-{kind}-{lookup.mode if lookup else 'exact'}" for family, kind, lookup in SETTINGS],
)
def pair(bundles: dict[str, Bundle], request: pytest.FixtureRequest) -> Iterator[tuple[SimdEngine, SimdEngine]]:
    """Two engines of one bundle: one with one thread, one with two."""
    family, kind, lookup = request.param
    engines = tuple(SimdEngine(bundles[family], threads, kv_cache=kind, lookup=lookup) for threads in (1, 2))
    yield engines[0], engines[1]
    for engine in engines:
        engine.close()


@pytest.fixture
def engine(bundle: Bundle) -> Iterator[SimdEngine]:
    made = SimdEngine(bundle, threads=1)
    yield made
    made.close()


@pytest.fixture
def session(engine: SimdEngine) -> SimdSession:
    return engine.open_session()
