"""`ondevice info`: facts of this machine and of bundles, as JSON and as text."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ondevice.bundle import Bundle
from ondevice.cli import info
from ondevice.cli.info import lines
from ondevice.cli.terminal.style import size
from ondevice.engines.simd import pack_file
from ondevice.engines.simd.program import Program
from ondevice.native import library
from ondevice_export import export
from tests.conftest import REFERENCE


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ONDEVICE_CACHE", str(tmp_path / "the cache"))
    monkeypatch.setenv("COLUMNS", "300")
    return tmp_path / "the cache"


def facts_of(run, *words):
    code, out, err = run("info", *words, "--json")
    assert (code, err) == (0, "")
    assert out.count("\n") == 1
    return json.loads(out)


@pytest.mark.needs("onnxruntime")
def test_this_machine(run, cache):
    facts = facts_of(run)
    assert facts["threads"] >= 1
    assert facts["engines"] == ["simd", "ort"]
    assert facts["unavailable"] == {}
    assert facts["instruction_set"]
    assert facts["memory_bytes_per_s"] > 0
    assert facts["dot_product_ops_per_s"] > 0
    assert facts["cache"] == {"directory": str(cache), "packs": 0, "bytes": 0, "obstacle": None}
    assert set(facts["packages"]) == {"numpy", "numba", "onnxruntime", "tokenizers"}
    code, out, _ = run("info")
    assert code == 0
    assert len(out.splitlines()) == len(facts) - 1
    assert "unavailable" not in out
    assert " GB/s\n" in out
    assert " GOPS\n" in out
    assert f"no packs in {cache}\n" in out
    assert not list(cache.glob("*.pack"))


def test_every_line_fits_a_terminal_of_80_columns(run, reference_bundle, monkeypatch, tmp_path):
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    monkeypatch.setenv("ONDEVICE_CACHE", str(tmp_path / "home/.cache/ondevice"))
    monkeypatch.setattr(pack_file, "SMALL", 0)
    monkeypatch.setenv("COLUMNS", "80")
    for words, path in ((["info"], " ~/.cache/ondevice"), (["info", reference_bundle], " ~/.cache/ondevice/")):
        _, out, _ = run(*words)
        assert max(map(len, out.splitlines())) <= 80
        assert path in out


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_it_says_why_the_cache_is_not_used(run, cache):
    cache.mkdir()
    cache.chmod(0o777)
    words = " ".join(run("info")[1].split())  # a long line is broken
    assert words.endswith(f"no packs in {cache}, not used: other users may write to {cache} (chmod go-w {cache})")


def test_a_cache_behind_a_closed_directory_leaves_the_other_facts(run, cache, monkeypatch):
    """Access is denied by a patch, as below another user's directory: root, who may run tests, can look anywhere."""
    real = Path.exists

    def exists(path):
        if path == cache:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path)

    monkeypatch.setattr(Path, "exists", exists)
    monkeypatch.setattr(info, "_measured", lambda threads: {})
    obstacle = f"{cache} cannot be written to ({os.strerror(errno.EACCES)})"
    assert facts_of(run)["cache"]["obstacle"] == obstacle


def test_packs_are_counted(run, cache):
    cache.mkdir()
    for letter in "ab":
        (cache / f"{letter * 40}.pack").write_bytes(bytes(1500))
    (cache / "compiled-0123").touch()
    assert facts_of(run)["cache"] == {"directory": str(cache), "packs": 2, "bytes": 3000, "obstacle": None}
    assert f"2 packs, 3.0 kB in {cache}\n" in run("info")[1]


def test_without_kernels_and_numba_the_other_facts_are_printed(reference_bundle, tmp_path):
    code = "import sys; sys.modules['numba'] = None; from ondevice.cli.main import main; sys.exit(main())"
    environment = {**os.environ, "ONDEVICE_CACHE": str(tmp_path), "ONDEVICE_KERNELS": "generic"}
    if library.choice().file is not None:
        pytest.skip("a library is shipped here")
    facts: dict[str, Any] = {}
    for words in ((), (reference_bundle,)):
        ended = subprocess.run(
            [sys.executable, "-c", code, "info", *words, "--json"],
            capture_output=True,
            text=True,
            check=False,
            env=environment,
        )
        assert (ended.returncode, ended.stderr) == (0, "")
        facts |= json.loads(ended.stdout)
    missing = "no kernels for this CPU, and numba, which builds them, is missing: pip install numba"
    assert facts["engines"] == []
    assert set(facts["unavailable"]) == {"simd", "ort"}
    assert facts["unavailable"]["simd"] == missing  # `ort` may lack onnxruntime too
    assert facts["instruction_set"] is facts["memory_bytes_per_s"] is facts["dot_product_ops_per_s"] is None
    assert facts["threads"] >= 1
    assert facts["engine"] == {"name": None, "reason": missing}
    assert facts["pack"] is None
    assert facts["family"] == "gemma4"


@pytest.mark.needs("onnxruntime")
def test_a_failing_compiler_leaves_the_other_engine(run, monkeypatch):
    def fail(threads):
        raise RuntimeError("cannot select: intrinsic\nwith a dump")

    monkeypatch.setattr(info, "_measured", fail)
    facts = facts_of(run)
    assert facts["engines"] == ["ort"]
    assert facts["unavailable"] == {"simd": "RuntimeError: cannot select: intrinsic"}
    _, out, _ = run("info")
    assert "unavailable       simd RuntimeError: cannot select: intrinsic\n" in out
    assert "memory bandwidth  none\n" in out


def test_a_bundle(run, bundle):
    facts = facts_of(run, bundle, "--verify-hashes")
    assert facts["name"] == "toy-model"
    assert facts["layers"] == {"all": 2, "sliding": 1, "full": 1, "convolutions": 0, "with_states": 0, "with_cache": 2}
    assert facts["drafter"] is None
    assert facts["sources"] == {"target": "someone/toy@abc123"}
    assert facts["bytes"] == sum(facts["files"].values())
    assert facts["hashes"] == "every file is as exported"
    _, out, _ = run("info", bundle)
    assert "weights int4, block size 32, head bits 8" in out
    assert "drafter" in out
    assert "hashes" not in out


def test_a_bundle_that_no_engine_supports(run, bundle):
    """The toy has no graph; the other facts are printed."""
    engine = facts_of(run, bundle)["engine"]
    assert engine["name"] is None
    assert "tensors of 'none' are missing" in engine["reason"]
    assert f"none: {engine['reason']}\n" in run("info", bundle)[1]


def test_a_small_bundle_keeps_no_pack(run, reference_bundle, cache):
    facts = facts_of(run, reference_bundle)
    assert facts["engine"] == {"name": "simd", "reason": None}
    assert facts["pack"]["status"] == "small"
    assert facts["pack"]["path"] is None
    assert set(facts["weights"]["mlp"]) == {"int4"}
    assert set(facts["weights"]["head"]) == set(facts["weights"]["drafter"]) == {"int8"}
    assert "pack            in memory: " in run("info", reference_bundle)[1]
    assert list(cache.glob("*.pack")) == []


def test_states_of_a_pack(run, reference_bundle, cache, monkeypatch):
    monkeypatch.setattr(pack_file, "SMALL", 0)
    before = facts_of(run, reference_bundle)["pack"]
    assert (before["status"], before["obstacle"]) == ("missing", None)
    assert before["path"].startswith(str(cache))
    assert f"will be written to {before['path']} at the first load\n" in run("info", reference_bundle)[1]
    assert not cache.exists()

    cache.mkdir()
    path = Path(before["path"])
    path.write_bytes(b"damaged")
    assert facts_of(run, reference_bundle)["pack"] == {**before, "status": "damaged"}
    assert "damaged: " in run("info", reference_bundle)[1]

    Program(Bundle.open(reference_bundle), most_rows=8, threads=1)
    assert facts_of(run, reference_bundle)["pack"] == {**before, "status": "packed"}
    assert f" at {before['path']}\n" in run("info", reference_bundle)[1]
    assert path.stat().st_size == before["bytes"]

    shutil.rmtree(cache)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    full = facts_of(run, reference_bundle)["pack"]
    assert full == {**before, "status": "unwritable", "obstacle": f"{cache} has room for 0.0 GB only"}
    assert f"packed at every start, because {full['obstacle']}\n" in run("info", reference_bundle)[1]


@pytest.mark.needs("onnxruntime")
def test_a_bundle_without_kernels_says_why(run, tmp_path):
    bundle = export(REFERENCE / "target", tmp_path / "bundle", quantize="none")
    facts = facts_of(run, bundle)
    assert facts["engine"] == {"name": "ort", "reason": "the weights of embed_tokens.weight are not quantised"}
    assert facts["pack"] is None
    assert "ort: the weights of embed_tokens.weight are not quantised\n" in run("info", bundle)[1]


def test_verify_hashes_finds_an_altered_file(run, bundle):
    file = bundle / "chat_template.jinja"
    file.write_bytes(file.read_bytes().replace(b"turn", b"burn"))
    assert run("info", bundle)[0] == 0
    code, _, err = run("info", bundle, "--verify-hashes")
    assert code == 2
    assert "was altered" in err


def test_verify_hashes_needs_a_bundle(run):
    code, _, err = run("info", "--verify-hashes")
    assert code == 2
    assert "needs a bundle" in err


def test_a_narrow_terminal(run, reference_bundle, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    for words in ([], [reference_bundle]):
        _, out, _ = run("info", *words)
        shown = out.splitlines()
        assert all(len(line) <= 60 for line in shown if "/" not in line)  # a path is not broken
        start = min(len(line) - len(line.lstrip()) for line in shown if line.startswith(" "))
        assert all(line[start - 1] == " " != line[start] for line in shown)


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


def test_a_path_is_not_broken():
    cache = {"directory": "/home/a user/some-long-place", "packs": 1, "bytes": 5, "obstacle": None}
    assert lines({"cache": cache}, 20) == ["cache  1 pack, 5 B in", "       /home/a user/some-long-place"]


def test_every_file_has_a_line():
    facts = {"files": {"target.onnx": 1000, "drafter.onnx": 5}, "unavailable": {}, "bytes": 1005}
    assert lines(facts, 80) == [
        "files        target.onnx 1.0 kB",
        "             drafter.onnx 5 B",
        "bytes        1.0 kB",
    ]
