"""The cache that is filled with numbers holds what a prompt of that length would make it hold."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.kv_cache import forward
from benchmarks.long_context import SEED, TYPES, fill, report
from ondevice.bundle import Bundle
from ondevice.engines.protocol import KVCacheType
from ondevice.engines.simd.engine import SimdEngine


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("tokens", [40, 700])
def test_a_filled_session_goes_on(reference_bundle: Path, kind: KVCacheType, tokens: int) -> None:
    engine = SimdEngine(Bundle.open(reference_bundle), 1, kv_cache=kind)
    session = engine.open_session()
    fill(session, tokens)
    assert session.length == max(tokens, SEED)
    for _ in range(3):
        assert np.isfinite(forward(session, range(5), range(5)).logits).all()
        session.commit(range(5))
    engine.close()


def test_a_row_of_the_table_per_cache_and_length(reference_bundle: Path) -> None:
    lines = report(Bundle.open(reference_bundle), 1, [64, 300], 1, ["fp16", "int8 lookup"]).splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["fp16", "fp16", "int8 lookup", "int8 lookup"]
    assert "(1.00)" in lines[2]
    assert "(1.00)" in lines[4]
