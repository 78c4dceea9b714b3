"""10,000 requests leave a server as small as the first thousand, and every reply is the expected one."""

import json
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc"),
]

CACHE_MB = 537
"""The default of `cache_bytes`."""


def test_10000_requests(reference_bundle):
    command = [sys.executable, "-m", "benchmarks.soak", str(reference_bundle), "--json", "--requests", "10000"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    report = json.loads(run.stdout)
    assert report["failures"] == {}
    first, *_, last = report["stages"]
    assert last["anonymous_mb"] < 100 + 1.15 * CACHE_MB
    assert last["descriptors"] <= first["descriptors"] + 16  # as many clients may be connected in one and not the other
    assert last["threads"] <= first["threads"] + 4
