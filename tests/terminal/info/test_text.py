import pytest

from ondevice.terminal.info.text import lines, size


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (2_580_000_000, "2.58 GB"), (10**13, "10000.00 GB")],
)
def test_sizes(count, text):
    assert size(count) == text


def test_values_are_aligned_and_wrapped_between_items():
    facts = {"name": "toy", "sliding_window": 512, "packages": {"first_one": "1.0", "second": "2.0"}, "engines": []}
    assert lines(facts, 80) == [
        "name            toy",
        "sliding window  512",
        "packages        first one 1.0, second 2.0",
        "engines         none",
    ]
    assert lines(facts, 37)[2:4] == ["packages        first one 1.0,", "                second 2.0"]
    assert lines(facts, 1) == lines(facts, 36)


def test_a_path_stays_whole():
    cache = {"directory": "/home/a user/some-long-place", "packs": 1, "bytes": 5}
    assert lines({"cache": cache}, 20) == ["cache  1 pack, 5 B in", "       /home/a user/some-long-place"]


def test_every_file_has_a_line():
    facts = {"files": {"target.onnx": 1000, "drafter.onnx": 5}, "unavailable": {}, "bytes": 1005}
    assert lines(facts, 80) == [
        "files        target.onnx 1.0 kB",
        "             drafter.onnx 5 B",
        "bytes        1.0 kB",
    ]
