"""Finished sequences take the memory of their budget, and give it back.

In a process of its own: pages that other tests have freed would serve these generations and hide what they take.
"""

import json
import subprocess
import sys

import pytest

MB = 1 << 20

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs RssAnon of /proc/self/status"),
]


def test_memory_of_finished_sequences(reference_bundle):
    budget = 256
    command = [sys.executable, "-m", "benchmarks.cache_memory", str(reference_bundle), "--json"]
    run = subprocess.run(
        [*command, "--generations", "150", "--cache-mb", str(budget)], capture_output=True, text=True, check=True
    )
    stages = json.loads(run.stdout)
    assert stages["generated"] - stages["loaded"] > 0.5 * budget * MB, "the budget was never reached: nothing is tested"
    assert stages["generated"] - stages["loaded"] < 1.15 * budget * MB
    assert stages["closed"] - stages["loaded"] < 80 * MB
