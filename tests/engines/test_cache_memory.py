"""Finished sequences take the memory of their budget, and give it back.

In a process of its own: pages that other tests have freed would serve these generations and hide what they take.
"""

import gc
import json
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import ondevice
from tests.conftest import ROOT

MB = 1 << 20
BUDGET, CALLERS, GENERATIONS = 256 * MB, 4, 150
CHARACTERS = "abcdefghij klmnop\n(){}=+"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs RssAnon of /proc/self/status"),
]


def stages(bundle: str) -> dict[str, int]:
    """Anonymous bytes of this process: loaded, after the generations, after `forget`, and after `close`."""
    found = {}
    with ondevice.load(bundle, engine="simd", threads=1, cache_bytes=BUDGET) as model:

        def generate(number: int) -> None:
            rng = random.Random(number)
            prompt = "".join(rng.choices(CHARACTERS, k=rng.randrange(100, 8_000)))  # keys and values of many lengths
            model.generate(prompt, max_new_tokens=6, temperature=0.0)

        generate(0)
        found["loaded"] = anonymous_bytes()
        with ThreadPoolExecutor(CALLERS) as pool:
            list(pool.map(generate, range(1, GENERATIONS + 1)))
        found["generated"] = anonymous_bytes()
        model.forget()
        found["forgot"] = anonymous_bytes()
    found["closed"] = anonymous_bytes()
    return found


def anonymous_bytes() -> int:
    gc.collect()
    lines = Path("/proc/self/status").read_text("ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


def test_memory_of_finished_sequences(reference_bundle: Path) -> None:
    code = (
        "import json, sys; from tests.engines.test_cache_memory import stages; print(json.dumps(stages(sys.argv[1])))"
    )
    command = [sys.executable, "-c", code, str(reference_bundle)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["generated"] - found["loaded"] > 0.5 * BUDGET, "the budget was never reached: nothing is tested"
    assert found["generated"] - found["loaded"] < 1.15 * BUDGET
    assert found["closed"] - found["loaded"] < 80 * MB
