"""Commands on a machine without onnxruntime, which has no wheels for it. `test_main` tests `--engine ort` there."""

import json
import os
import subprocess
import sys

import pytest

from ondevice_export import export
from tests.conftest import REFERENCE

ABSENT = """
import importlib.metadata, sys

sys.modules["onnxruntime"] = None  # an import of it raises ModuleNotFoundError

def version(name, real=importlib.metadata.version):
    if name == "onnxruntime":
        raise importlib.metadata.PackageNotFoundError(name)
    return real(name)

importlib.metadata.version = version
"""
"""A `sitecustomize.py`, which every interpreter with its directory on the path imports at the start."""


@pytest.fixture
def run(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(ABSENT)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])

    def run(*words):
        command = [sys.executable, "-m", "ondevice", *map(str, words)]
        environment = {**os.environ, "PYTHONPATH": path}
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        return ended.returncode, ended.stdout, ended.stderr

    return run


@pytest.fixture(scope="module")
def float_bundle(tmp_path_factory):
    """A bundle that `simd` does not support."""
    return export(REFERENCE / "target", tmp_path_factory.mktemp("float") / "bundle", quantize="none", drafter="none")


def test_generate(run, reference_bundle):
    code, out, err = run("generate", reference_bundle, "def f(", "--max-new-tokens", 4, "--json")
    assert code == 0, err
    assert json.loads(out)["stats"]["engine"] == "simd"


def test_a_bundle_that_needs_ort_is_refused_in_one_line(run, float_bundle):
    code, out, err = run("generate", float_bundle, "x")
    assert (code, out) == (2, "")
    assert err.startswith(
        "ondevice: this bundle (the weights of embed_tokens.weight are not quantised) needs onnxruntime: pip install "
    )
    assert err.count("\n") == 1


def test_bench_prints_its_table(run, reference_bundle):
    code, out, err = run("bench", reference_bundle, "--drafts", "--limit", 1, "--max-new-tokens", 4, "--lengths", 1)
    assert code == 0, err
    assert "| mtp" in out
    assert "onnxruntime missing" in out


def test_info_names_the_missing_package(run):
    code, out, _ = run("info", "--json")
    facts = json.loads(out)
    assert code == 0
    assert facts["engines"] == ["simd"]
    assert facts["unavailable"] == {"ort": "onnxruntime is missing: pip install onnxruntime"}
    assert facts["packages"]["onnxruntime"] == "missing"


def test_info_of_a_bundle_that_needs_ort(run, float_bundle):
    code, out, _ = run("info", float_bundle, "--json")
    assert code == 0
    engine = json.loads(out)["engine"]
    assert engine["name"] is None
    assert "needs onnxruntime" in engine["reason"]
