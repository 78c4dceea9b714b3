import sys

import pytest

from ondevice.errors import MissingDependencyError, UsageError
from ondevice.terminal.bench import plot
from ondevice.terminal.bench.configuration import PLAIN
from ondevice.terminal.bench.row import rows_of
from tests.terminal.bench.test_table import MTP, mtp_run, plain_run


def test_matplotlib_is_optional(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(MissingDependencyError, match=r"ondevice-runtime\[bench\]"):
        plot.check(tmp_path / "speed.png")


def test_a_picture_of_the_rows(tmp_path):
    path = tmp_path / "speed.png"
    plot.check(path)
    plot.draw(rows_of([{PLAIN: plain_run(), MTP: mtp_run()}]), "toy", path)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["speed.doc", "speed", "missing/speed.png"])
def test_a_bad_place_is_found_before_measuring(tmp_path, name):
    with pytest.raises(UsageError, match="--plot"):
        plot.check(tmp_path / name)
