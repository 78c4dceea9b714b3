"""What the report on KV caches adds up."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.kv_cache import bytes_per_token, quality, speed
from ondevice.bundle import Bundle
from ondevice.engines.simd.engine import SimdEngine


def test_bytes_are_those_of_the_caches(reference_bundle: Path) -> None:
    bundle = Bundle.open(reference_bundle)
    engine = SimdEngine(bundle, 1, kv_cache="int8")
    held = {
        kind: sum(part.nbytes // cache.capacity for layer in cache.layers for part in cache.parts(layer))
        for kind, cache in engine.make_caches().items()
    }
    engine.close()
    assert bytes_per_token(bundle.manifest.target, "int8") == (held["full"], held["sliding"])


def test_a_row_per_cache(reference_bundle: Path) -> None:
    bundle = Bundle.open(reference_bundle)
    for table in (speed(bundle, 1, 40, 1), quality(bundle, 1, ["def add(a, b):\n    return a + b\n"])):
        lines = table.splitlines()
        kinds, *columns = zip(*(line.strip("| ").split(" | ") for line in lines[2:4]), strict=True)
        assert [kind.strip() for kind in kinds] == ["fp16", "int8"]
        numbers = np.array(columns, float)
        assert np.isfinite(numbers).all()
