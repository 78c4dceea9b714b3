"""The command as users and optimum meet it, and the comparison with the original."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from ondevice.bundle import Bundle
from ondevice.bundle_format.manifest import Quantization
from ondevice.cli.origins import is_made_of
from ondevice.errors import CheckpointError, MissingDependencyError, PromptError, UsageError
from ondevice.quality import Comparison
from ondevice_export import command, export, original
from ondevice_export.verify import Verification, tolerance_of, verify
from tests.conftest import REFERENCE
from tests.export.conftest import Pair
from tests.fixtures.tiny_models import VOCAB

ROOT = Path(__file__).parents[2]
PROMPTS = [[2, *np.random.default_rng(seed).integers(3, VOCAB, 30).tolist()] for seed in (1, 2)]


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(words)


@pytest.mark.usefixtures("kernels")  # the export says on stderr that it compiles some
def test_export(e2b: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run(parse(str(e2b.directory / "target"), "--out", str(tmp_path / "out"), "--head-bits", "4")) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith(str(tmp_path / "out"))
    assert printed.out.count("\n") == 2
    assert (tmp_path / "out" / "drafter.onnx").is_file()
    assert all(line.startswith("note: ") for line in printed.err.splitlines())  # no bar where there is no terminal


def test_the_context_is_that_of_the_bundle(e2b: Pair, tmp_path: Path) -> None:
    words = [str(e2b.directory / "target"), "--out", str(tmp_path / "out"), "--no-prepare", "--context", "48"]
    assert command.run(parse(*words)) == 0
    assert Bundle.open(tmp_path / "out").manifest.target.context_length == 48


def test_an_export_that_replaces_another_model_says_so(
    e2b: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And leaves a record of its source for `ondevice run`."""
    monkeypatch.setenv("ONDEVICE_CACHE", str(tmp_path / "cache"))
    out, other = tmp_path / "out", tmp_path / "other"
    shutil.copytree(e2b.directory / "target", other)
    noted = []
    for source in (other, other, e2b.directory / "target"):
        words = [str(source), "--out", str(out), "--drafter", "none", "--no-prepare"]
        assert command.run(parse(*words)) == 0
        noted.append([line for line in capsys.readouterr().err.splitlines() if "replacing" in line])
        assert is_made_of(Bundle.open(out), str(source))
    assert noted == [[], [], [f"note: replacing {out}, the bundle of other"]]
    assert not is_made_of(Bundle.open(out), str(other))


def test_a_target_that_cannot_be_opened_is_all_that_is_said(tmp_path: Path) -> None:
    path = tmp_path / "truncated.gguf"
    notes: list[str] = []
    path.write_bytes(b"GGUF")
    with pytest.raises(CheckpointError):
        export(path, tmp_path / "out", note=notes.append)
    assert not notes


def test_the_time_is_that_of_the_whole_command(
    e2b: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The preparation for this machine, which can take longer than the export itself, is in it."""
    clock = [0.0]
    monkeypatch.setattr("ondevice_export.command.time.perf_counter", lambda: clock[0])
    monkeypatch.setattr(command, "_prepare", lambda *arguments: clock.__setitem__(0, 25.0))
    command.run(parse(str(e2b.directory / "target"), "--out", str(tmp_path / "out")))
    assert " MB in 25.0 s\n" in capsys.readouterr().out


def test_the_last_line_is_the_next_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As short as the bundle can be named, and it works."""
    source = str(REFERENCE / "target")
    monkeypatch.setenv("ONDEVICE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    places = {"": "reference", "b/x": "b/x", "a b": "'a b'", str(tmp_path.parent / "y"): str(tmp_path.parent / "y")}
    for out, named in places.items():
        assert command.run(parse(source, *(["--out", out] if out else []))) == 0
        last = capsys.readouterr().out.splitlines()[-1]
        assert last == f"ondevice chat {named}"
        assert Bundle.open(shlex.split(last)[-1]).manifest.name == "reference"
    assert (tmp_path / "home" / "reference" / "bundle.json").is_file()
    shutil.rmtree(tmp_path.parent / "y")


def test_without_a_home_bundles_lie_here(e2b: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ONDEVICE_HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    made = export(e2b.directory / "target", drafter="none")
    assert made.parent == tmp_path.resolve() / "bundles"


def test_a_bundle_without_texts_runs_on_token_ids(
    e2b: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.run(parse(str(e2b.directory / "target"), "--out", str(tmp_path / "out"))) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"ondevice generate {tmp_path / 'out'} --ids 2"


@pytest.mark.parametrize("damaged", [False, True])
def test_verify_says_whether_the_bundle_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], damaged: bool
) -> None:
    """One that lacks the attention of a layer does not."""
    shutil.copytree(REFERENCE / "target", tmp_path / "target")
    if damaged:
        path = tmp_path / "target" / "model.safetensors"
        tensors = load_file(path)
        name = next(name for name in tensors if name.endswith("layers.3.self_attn.o_proj.weight"))
        tensors[name] = tensors[name] * 0
        save_file(tensors, path)
        monkeypatch.setattr("ondevice_export.original.Original.__init__", original_of(REFERENCE / "target"))
    words = parse(str(tmp_path / "target"), "--out", str(tmp_path / "out"), "--drafter", "none", "--verify")
    assert command.run(words) == (1 if damaged else 0)
    verdict = capsys.readouterr().out.splitlines()[-3]
    assert verdict.startswith("THE BUNDLE FAILS: " if damaged else "The bundle passes")
    assert ("fewer than 85.0% of" in verdict) == damaged


def original_of(target: Path) -> Any:
    """Compare with this one instead."""
    real = original.Original.__init__
    return lambda self, _, *rest: real(self, target, *rest)


@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_what_is_not_finite_does_not_pass(quantize: str) -> None:
    tolerance = tolerance_of(Quantization(quantize, 32, 32 if quantize == "none" else 8))
    nan = float("nan")
    comparison = Comparison()
    comparison.add(np.full((9, 5), np.nan, np.float32), np.zeros((9, 5), np.float32), [0] * 9)
    result = Verification(tolerance, 1, nan, comparison.quality(), 0, None)
    assert not result.passes
    assert "perplexity" in result.verdict()


def test_prompts_need_verify(e2b: Pair) -> None:
    with pytest.raises(UsageError, match="--verify"):
        command.run(parse(str(e2b.directory / "target"), "--verify-prompts", "prompts.txt"))


def test_a_drafter_of_a_gguf_file_is_not_verified(e2b: Pair) -> None:
    """It is said before the export: transformers would look for a checkpoint in the file's directory."""
    with pytest.raises(UsageError, match="leave it out for a GGUF file"):
        command.run(parse(str(e2b.directory / "target"), "--drafter", "drafter.gguf", "--verify"))


def test_float32_bundle_is_the_original(pair: Pair) -> None:
    result = verify(pair.bundle, pair.directory / "target", pair.directory / "drafter", PROMPTS)
    assert result.largest_logit_error < 1e-4
    assert result.quality.same_top.value == 1.0
    assert result.quality.kl.value < 1e-6
    assert result.drafter_agreement == 1.0
    assert (result.prompts, result.quality.tokens, result.drafts) == (2, 60, 2)
    assert result.quality.ratio.value == pytest.approx(1, rel=1e-4)
    assert "| same top token | 100.00% |" in result.table()
    assert "| KL divergence, mean | 0.00000 ± 0.00000 |" in result.table()


def test_wider_weights_are_closer(e2b: Pair, tmp_path: Path) -> None:
    errors = []
    for quantize in ("int4", "int8"):
        bundle = export(e2b.directory / "target", tmp_path / quantize, quantize=quantize, drafter="none")
        result = verify(bundle, e2b.directory / "target", None, PROMPTS)
        assert result.drafter_agreement is None
        errors.append(result.largest_logit_error)
    assert errors[1] < errors[0]


def test_nothing_to_verify_with(e2b: Pair) -> None:
    with pytest.raises(PromptError):
        verify(e2b.bundle, e2b.directory / "target", None, [[2]])


def test_verify_names_the_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(original, "find_spec", lambda name: None if name == "optimum" else object())
    with pytest.raises(MissingDependencyError, match=r"optimum.*ondevice-runtime\[verify\]"):
        original.check_installed()


def test_importing_the_package_is_light() -> None:
    code = (
        "import sys, ondevice_export.command; print({'torch', 'transformers', 'onnx_ir', 'numba'} & set(sys.modules))"
    )
    assert _python("-c", code).stdout.strip() == "set()"


def _python(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "export"), str(ROOT)])}
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, env=environment, check=False)
