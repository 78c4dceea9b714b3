from typing import Any

import pytest

from benchmarks.rows import CONTEXT, PREFILL, TIMES, VERIFY, Work, compare, report
from ondevice.engines.simd.roofline import Roofline

REPORT = """\
| rows | simd ms | ort ms | llama.cpp ms | fastest other / simd | simd / its 1 row | of roofline |
| ---: | ------: | -----: | -----------: | -------------------: | ---------------: | ----------: |
|    1 |    20.0 |   30.0 |         25.0 |                 1.25 |             1.00 |        0.50 |
|    8 |    40.0 |   60.0 |        160.0 |                 1.50 |             2.00 |        0.50 |
|   64 |   160.0 |  200.0 |        400.0 |                 1.25 |             8.00 |        0.80 |"""

WORK = Work(all_rows=1_000_000, wanted_rows=250_000, all_bytes=8_000_000, wanted_bytes=2_000_000)
MACHINE = Roofline(bandwidth=1e9, peak=1e9)


class Recorder:
    """An engine that computes nothing and takes at most 48 rows, and its one session."""

    name = "simd"

    def __init__(self):
        self.length = 0
        self.forwards = []

    def open_session(self):
        return self

    def max_rows(self):
        return 48

    def forward(self, batch):
        [rows] = batch
        assert rows.session is self
        assert rows.tree.is_chain
        self.forwards.append((self.length, len(rows.tree), list(rows.wanted)))

    def commit(self, path):
        self.length += len(path)

    def rewind(self, length):
        self.length = length
        return length


class StandIn:
    """llama-bench, without the program."""

    name = "llama.cpp"

    def __init__(self):
        self.asked = []

    def seconds(self, rows, context, times, *, every_logit):
        self.asked.append((rows, context, times, every_logit))
        return {count: times * [count / 1000] for count in rows}


class Readings:
    def __init__(self):
        self.count = 0

    def read(self):
        self.count += 1


def test_who_is_asked_for_what():
    engine = Recorder()
    llama: Any = StandIn()
    measurement: Any = Readings()
    found = compare([engine], llama, 2, measurement)
    assert llama.asked == 2 * [(VERIFY, CONTEXT, TIMES, True), (PREFILL, CONTEXT, 1, False)]
    assert measurement.count == 3
    assert list(found) == ["simd", "llama.cpp"]
    for by in found.values():
        assert {rows: len(taken) for rows, taken in by.items()} == {
            **dict.fromkeys(VERIFY, 2 * TIMES),
            **dict.fromkeys(PREFILL, 2),
        }
    assert found["llama.cpp"][8] == 6 * [0.008]


def test_a_verification_wants_every_row_and_a_prefill_the_last():
    engine = Recorder()
    measurement: Any = Readings()
    compare([engine], None, 0, measurement)
    context, *timed = engine.forwards
    assert context == (0, CONTEXT, [0])
    wake = (CONTEXT, 1, [0])
    verifications = [forward for rows in VERIFY for forward in (wake, (CONTEXT, rows, list(range(rows))))]
    assert timed[: len(verifications) * TIMES] == verifications * TIMES
    prefill = timed[len(verifications) * TIMES :]
    assert prefill[:4] == [wake, (CONTEXT, 48, [47]), (CONTEXT + 48, 16, [15]), wake]
    assert sum(rows for _, rows, _ in prefill[4:]) == PREFILL[-1]


def test_the_report():
    found = {
        "simd": {1: [0.02], 8: [0.04, 0.01, 0.07], 64: [0.16]},
        "ort": {1: [0.03], 8: [0.06], 64: [0.2]},
        "llama.cpp": {1: [0.025], 8: [0.16], 64: [0.4]},
    }
    assert report(found, WORK, MACHINE) == REPORT


def test_simd_alone_is_compared_with_nobody():
    lines = report({"simd": {1: [0.02]}}, WORK, MACHINE).splitlines()
    assert lines[0] == "| rows | simd ms | simd / its 1 row | of roofline |"


@pytest.mark.parametrize(("rows", "wanted", "seconds"), [(1, 1, 0.01), (8, 8, 0.02), (64, 1, 0.1285)])
def test_the_least_that_a_forward_can_take(rows, wanted, seconds):
    assert WORK.least_seconds(MACHINE, rows, wanted) == pytest.approx(seconds)
