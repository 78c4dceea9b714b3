"""Quantised bundles of tiny random pairs, one per family, exported once per run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from benchmarks.busy import AllThreads
from ondevice.bundle import Bundle
from ondevice.engines.protocol import KVCacheType
from ondevice.engines.simd import thread_pool
from ondevice.engines.simd.engine import SimdEngine
from ondevice.engines.simd.lookup_settings import LookupSettings
from ondevice.engines.simd.session import SimdSession
from ondevice_export import export
from tests.conftest import MakePair
from tests.tiny_models import QUANTISED
from tests.trained_models import TRAINED

FAMILIES = (*QUANTISED, *TRAINED)


@pytest.fixture(scope="session", autouse=True)
def every_thread_runs() -> Iterator[None]:
    """Models as small as these are soon left to one thread, and comparisons would be between one thread and one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(thread_pool, "ThreadChoice", AllThreads)
        yield


@pytest.fixture(scope="session")
def bundles(make_pair: MakePair) -> dict[str, Bundle]:
    """int4 weights and an int8 head, as users get them; and those of checkpoints that were trained quantised."""
    made = {}
    for family in FAMILIES:
        directory = make_pair(family)
        made[family] = Bundle.open(export(directory / "target", directory / "bundle"))
    return made


@pytest.fixture(scope="session", params=FAMILIES)
def bundle(request: pytest.FixtureRequest, bundles: dict[str, Bundle]) -> Bundle:
    return bundles[request.param]


@pytest.fixture(scope="session")
def tiny(bundles: dict[str, Bundle]) -> Path:
    """The directory of the E2B-like pair."""
    return bundles["e2b"].path


@pytest.fixture(scope="session")
def trained(bundles: dict[str, Bundle]) -> Path:
    """The directory of a pair whose target was trained quantised: every width, and float32 activations, are in it."""
    return bundles["half"].path


LOOKUP = LookupSettings(keys=32, window=64, learn=64)
"""Of 256 tokens, those from 129 on choose one of up to five units."""
NOMAD = replace(LOOKUP, mode="nomad")
ATTENTIONS = [(kind, lookup) for lookup in (None, LOOKUP, NOMAD) for kind in get_args(KVCacheType)]


@pytest.fixture(
    scope="module", params=ATTENTIONS, ids=[f"{kind}-{lookup and lookup.mode}" for kind, lookup in ATTENTIONS]
)
def pair(bundle: Bundle, request: pytest.FixtureRequest) -> Iterator[tuple[SimdEngine, SimdEngine]]:
    """One engine with a thread, one with two."""
    kind, lookup = request.param
    engines = SimdEngine(bundle, 1, kv_cache=kind, lookup=lookup), SimdEngine(bundle, 2, kv_cache=kind, lookup=lookup)
    yield engines
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
