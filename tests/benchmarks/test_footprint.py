import pytest

from benchmarks.footprint import TARGETS, footprint, report


def test_e2b():
    """Beside the bundle that `benchmarks.e2b_shape` writes, 3.04 GB, and its pack, 1.49 GB according to `info`."""
    found = footprint("E2B")
    assert found.bundle_bytes == pytest.approx(3.04e9, rel=0.06)
    assert found.bundle_bytes > 3.04e9
    assert found.pack_bytes == pytest.approx(1.49e9, rel=0.01)
    assert found.cache_bytes_per_token == 3 * 2 * 512 * 2
    assert found.window_bytes == 12 * 2 * 256 * 2 * 512


@pytest.mark.parametrize(("small", "large"), [("E2B", "E4B"), ("E4B", "12B"), ("12B", "26B-A4B"), ("26B-A4B", "31B")])
def test_a_larger_model_takes_more(small, large):
    one, other = footprint(small), footprint(large)
    assert one.weights < other.weights
    assert one.bundle_bytes < other.bundle_bytes < other.checkpoint_bytes


def test_the_table_has_a_line_per_model():
    lines = report().splitlines()
    assert [line.split()[1] for line in lines[2:]] == list(TARGETS)
    assert len({len(line) for line in lines}) == 1
