import sys
from pathlib import Path

import pytest

from benchmarks.llama_bench import LlamaBench

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the stand-in is a script with a #! line")

PROGRAM = """\
#!{python}
import json, sys
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if options["--model"] == "broken.gguf":
    sys.exit("main: error: failed to load model 'broken.gguf'")
assert (options["--n-gen"], options["--output"]) == ("0", "json"), options
count, context = int(options["--threads"]), int(options["--n-depth"])
tests = [
    {{
        "build_commit": "0c1e570",
        "model_type": "gemma4 E2B Q4_0",
        "model_size": 2_604_554_380,
        "n_prompt": int(rows),
        "samples_ns": [
            1_000_000 * (int(rows) + count) + 1000 * context + 10 * time + int(options["--embeddings"])
            for time in range(int(options["--repetitions"]))
        ],
    }}
    for rows in options["--n-prompt"].split(",")
]
print(json.dumps(tests))
"""


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "llama-bench"
    path.write_text(PROGRAM.format(python=sys.executable))
    path.chmod(0o755)
    return path


def test_what_is_asked_and_what_comes_back(program):
    llama = LlamaBench(program, Path("model.gguf"), threads=2)
    assert (llama.version, llama.model) == ("0c1e570", "gemma4 E2B Q4_0, 2.60 GB")
    assert llama.seconds([64, 512], 64, 1, every_logit=False) == {64: [0.066064], 512: [0.514064]}
    assert llama.seconds([1, 2], 0, 2, every_logit=True) == {
        1: [0.003000001, 0.003000011],
        2: [0.004000001, 0.004000011],
    }


def test_a_file_that_cannot_be_read(program):
    with pytest.raises(SystemExit, match=r"exit code 1: main: error: failed to load model 'broken\.gguf'"):
        LlamaBench(program, Path("broken.gguf"), threads=2)


def test_a_program_that_is_not_there(tmp_path):
    with pytest.raises(SystemExit, match="No such file or directory: give the path of llama-bench"):
        LlamaBench(tmp_path / "absent", Path("model.gguf"), threads=2)
