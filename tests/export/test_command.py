"""The command as users and optimum meet it, and the comparison with the original."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ondevice.errors import MissingDependencyError, PromptError, UsageError
from ondevice_export import command, export, original
from ondevice_export.verify import verify
from tests.export.conftest import Pair
from tests.tiny_models import VOCAB

ROOT = Path(__file__).parents[2]
PROMPTS = [[2, *np.random.default_rng(seed).integers(3, VOCAB, 30).tolist()] for seed in (1, 2)]


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(words)


def test_export(e2b: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run(parse(str(e2b.directory / "target"), "--out", str(tmp_path / "out"), "--head-bits", "4")) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith(str(tmp_path / "out"))
    assert printed.out.count("\n") == 1
    assert (tmp_path / "out" / "drafter.onnx").is_file()
    assert all(line.startswith("note: ") for line in printed.err.splitlines())  # no bar where there is no terminal


def test_prompts_need_verify(e2b: Pair) -> None:
    with pytest.raises(UsageError, match="--verify"):
        command.run(parse(str(e2b.directory / "target"), "--verify-prompts", "prompts.txt"))


def test_float32_bundle_is_the_original(pair: Pair) -> None:
    result = verify(pair.bundle, pair.directory / "target", pair.directory / "drafter", PROMPTS)
    assert result.largest_logit_error < 1e-4
    assert result.top1_agreement == 1.0
    assert result.drafter_agreement == 1.0
    assert (result.prompts, result.tokens, result.drafts) == (2, 62, 2)
    assert result.perplexity_after == pytest.approx(result.perplexity_before, rel=1e-4)
    assert "| top-1 agreement | 100.00% |" in result.table()


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
    with pytest.raises(MissingDependencyError, match=r"optimum.*ondevice\[verify\]"):
        original.check_installed()


def test_importing_the_package_is_light() -> None:
    code = (
        "import sys, ondevice_export.command; print({'torch', 'transformers', 'onnx_ir', 'numba'} & set(sys.modules))"
    )
    assert _python("-c", code).stdout.strip() == "set()"


@pytest.mark.skipif(not original.find_spec("optimum"), reason="optimum is not installed")
def test_optimum_finds_the_command(e2b: Pair, tmp_path: Path) -> None:
    run = ("-c", "from optimum.commands.optimum_cli import main; main()", "export", "ondevice")
    done = _python(*run, str(e2b.directory / "target"), "--out", str(tmp_path / "out"), "--quantize", "int8")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "bundle.json").is_file()
    failed = _python(*run, str(tmp_path / "absent"))
    assert failed.returncode == 2
    assert failed.stderr.startswith("ondevice: ")
    assert "Traceback" not in failed.stderr


def _python(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "export"), str(ROOT)])}
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, env=environment, check=False)
