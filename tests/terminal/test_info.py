import json

import pytest

from ondevice.terminal.info import _size


def test_this_machine(run):
    code, out, _ = run("info", "--json")
    facts = json.loads(out)
    assert code == 0
    assert facts["threads"] >= 1
    assert facts["engines"] == ["simd", "ort"]
    assert facts["instruction_set"]
    assert set(facts["packages"]) == {"numpy", "numba", "onnxruntime", "tokenizers"}
    code, out, _ = run("info")
    assert "onnxruntime" in out
    assert len(out.splitlines()) == len(facts)


def test_a_bundle(run, bundle):
    code, out, _ = run("info", bundle, "--verify-hashes", "--json")
    facts = json.loads(out)
    assert code == 0
    assert facts["name"] == "toy-model"
    assert facts["layers"] == {"all": 1, "sliding": 0, "full": 1, "with_cache": 1}
    assert facts["drafter"] is None
    assert facts["sources"] == {"target": "someone/toy@abc123"}
    assert facts["bytes"] == sum(facts["files"].values())
    assert facts["hashes"] == "every file is as exported"
    _, out, _ = run("info", bundle)
    assert "weights int4, block size 32, head bits 8" in out
    assert "drafter" in out
    assert "hashes" not in out


def test_an_altered_bundle_is_found_by_its_hashes(run, bundle):
    file = bundle / "chat_template.jinja"
    file.write_bytes(file.read_bytes().replace(b"turn", b"burn"))
    assert run("info", bundle)[0] == 0
    code, _, err = run("info", bundle, "--verify-hashes")
    assert code == 2
    assert "was altered" in err


def test_hashes_of_nothing(run):
    code, _, err = run("info", "--verify-hashes")
    assert code == 2
    assert "name one" in err


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (2_580_000_000, "2.58 GB"), (10**13, "10000.00 GB")],
)
def test_sizes(count, text):
    assert _size(count) == text
