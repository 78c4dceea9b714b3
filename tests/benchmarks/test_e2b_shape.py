import sys

import numpy as np
import pytest

from benchmarks.e2b_shape import RandomCheckpoint, target_model


def test_a_row_is_the_same_in_whatever_part_it_is_read():
    weights = RandomCheckpoint({"matrix": (3000, 4096)})  # more than the noise, so that it begins again
    whole = weights.read("matrix")
    parts = [weights.rows("matrix", *ends) for ends in [(0, 7), (7, 1500), (1500, 3000)]]
    assert np.array_equal(np.concatenate(parts), whole)
    assert not np.array_equal(whole[0], whole[7])


def test_the_shape_is_e2bs(tmp_path):
    model = target_model(tmp_path)
    assert sum(int(np.prod(shape, dtype=np.int64)) for shape in model.shapes.values()) == 4_628_569_379
    assert (len(model.config.layers), model.config.first_shared_layer) == (35, 15)


def test_a_gguf_file_needs_the_gguf_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.delitem(sys.modules, "benchmarks.e2b_gguf", raising=False)
    with pytest.raises(SystemExit, match="pip install gguf"):
        import benchmarks.e2b_gguf  # noqa: F401
