from pathlib import Path

from benchmarks.projections import by_shape
from benchmarks.rows import work_of
from ondevice.bundle import Bundle
from ondevice.engines.simd.engine import SimdEngine
from ondevice.engines.simd.program import read_models


def test_every_matrix_of_the_lower_layers_is_counted_once(reference_bundle: Path):
    bundle = Bundle.open(reference_bundle)
    engine = SimdEngine(bundle, threads=1)
    steps = by_shape(engine._program.target.whole.planned)
    engine.close()
    counted = sum(inputs * outputs * len(plan) for (inputs, outputs, _, _), plan in steps.items())
    assert counted == work_of(read_models(bundle)[0]).all_rows
