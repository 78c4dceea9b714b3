import subprocess
import sys

import pytest

from benchmarks.memory_watch import Memory, MemoryWatch
from benchmarks.start import Start, report, start

STATUS = "Name:\tpython\nVmHWM:\t  900 kB\nRssAnon:\t     500 kB\nRssFile:\t     300 kB\nRssShmem:\t      20 kB\n"
FACTS = {
    "bundle": "toy",
    "weights": "int4",
    "engine": "ort",
    "threads": 2,
    "processor": "CPU",
    "system": "OS",
    "versions": {"ondevice": "1"},
    "prompt_tokens": 16,
}
REPORT = """\
| caches | runs | first token s |   min to max | load s | prefill s | RSS MB | anonymous |     file |
| ------ | ---: | ------------: | -----------: | -----: | --------: | -----: | --------: | -------: |
| cold   |    1 |          9.00 | 9.00 to 9.00 |   5.00 |      0.50 |    100 |  not told | not told |
| warm   |    3 |          2.00 | 1.00 to 4.00 |   5.00 |      0.50 |    100 |        60 |       40 |

toy (int4), engine ort, 2 threads, CPU, OS
"""

CHILD = """
import json, os, sys
stats = dict(engine=os.environ["NUMBA_CACHE_DIR"], load_s=1.0, prefill_s=0.1, peak_rss_bytes=5, drafter="none")
print(json.dumps({"stats": stats}), flush=True)
sys.exit(int(sys.argv[1]))
"""


def test_memory_of_a_status_file():
    assert Memory.parse(STATUS) == Memory(500 * 1024, 320 * 1024)


def test_an_ended_process_has_no_memory():
    assert Memory.parse("Name:\tpython\nState:\tZ (zombie)\n") is None


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_watching_a_process():
    child = "import time; own = b'x' * 50_000_000; print(len(own), flush=True); time.sleep(0.2)"
    process = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE)
    with process, MemoryWatch(process.pid) as watch:
        process.wait()
    assert watch.peak is not None
    assert watch.peak.anonymous > 50_000_000
    assert watch.peak.total > watch.peak.anonymous


def test_a_start_has_caches_of_its_own(tmp_path):
    one = start([sys.executable, "-c", CHILD, "0"], tmp_path)
    assert one.engine == str(tmp_path / "compiled")
    assert 0 < one.first_token_s < 60
    assert (one.load_s, one.prefill_s, one.peak_rss_bytes) == (1.0, 0.1, 5)


def test_a_start_that_fails(tmp_path):
    with pytest.raises(SystemExit, match="exit code 3"):
        start([sys.executable, "-c", CHILD, "3"], tmp_path)


def test_the_report():
    def run(seconds, memory):
        return Start("ort", seconds, 5.0, 0.5, 100_000_000, memory)

    split = Memory(60_000_000, 40_000_000)
    starts = {"cold": [run(9.0, None)], "warm": [run(2.0, split), run(4.0, split), run(1.0, split)]}
    assert report(starts, FACTS).startswith(REPORT)
