"""`ondevice tune` on the reference bundle: a search, its continuation, Ctrl-C."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Unpack

import pytest

import ondevice
from ondevice import GenerationKeywords, Prompt, Reply, Session
from ondevice.bundle import SKIPPED_LAYERS
from ondevice.cli.main import main
from ondevice.engines.layer_path import SkipRecord
from ondevice.errors import PromptError
from ondevice.generate.drafters.skip_search import SkipSearch
from ondevice.tuning import Tuning


@pytest.fixture
def bundle(reference_bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(reference_bundle, tmp_path / "reference"))


def tune(bundle: Path, *words: str) -> int:
    return main(["tune", str(bundle), "--engine", "simd", "--threads", "1", "--limit", "2", *words])


def test_a_search_continues(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tune(bundle, "--seconds", "0.3", "--json") == 0
    captured = capsys.readouterr()
    first = json.loads(captured.out)
    assert first["tried"] > 0
    assert first["file"] == str(bundle / SKIPPED_LAYERS)
    assert "run it again to continue" in captured.err or first["finished"]
    assert tune(bundle, "--seconds", "120") == 0
    captured = capsys.readouterr()
    assert "search complete" in captured.out
    assert "predicted" in captured.out
    assert len(json.loads((bundle / SKIPPED_LAYERS).read_text())["tried"]) >= first["tried"]
    assert main(["info", str(bundle), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["drafts_without"]["predicted_speed_up"] > 0


def test_ctrl_c_keeps_the_best_so_far(
    bundle: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, seen = SkipSearch.record, list[SkipSearch]()

    def interrupted(self: SkipSearch) -> SkipRecord:
        seen.append(self)
        if len(seen) == 10:
            raise KeyboardInterrupt
        return real(self)

    monkeypatch.setattr(SkipSearch, "record", interrupted)
    assert tune(bundle, "--json") == 130
    assert json.loads(capsys.readouterr().out)["tried"] == 8
    assert len(json.loads((bundle / SKIPPED_LAYERS).read_text())["tried"]) >= 8


def test_no_sequence_stays_open_where_a_prompt_fails(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []
    with ondevice.load(bundle, engine="simd", threads=1) as model:
        real = model.generate

        def generate(prompt: Prompt, **options: Unpack[GenerationKeywords]) -> Reply:
            reply = real(prompt, **options)
            monkeypatch.setattr(model.engine, "open_session", counted)  # from now on: not those of generations
            return reply

        def counted() -> Session:
            monkeypatch.undo()
            monkeypatch.setattr(model, "generate", generate)
            opened.append(model.engine.open_session())
            return opened[-1]

        monkeypatch.setattr(model, "generate", generate)
        with pytest.raises(PromptError):
            Tuning(model).run(["def f(n):", [-1]], 1.0, lambda facts, seconds: None)
    assert [session.closed for session in opened] == [True]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seconds", "0"], "--seconds must be a number above 0"),
        (["--seconds", "inf"], "--seconds must be a number above 0"),
        (["--engine", "ort"], "use --engine simd"),
    ],
)
@pytest.mark.needs("onnxruntime")
def test_mistakes(bundle: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert tune(bundle, *words) == 2
    assert message in capsys.readouterr().err
