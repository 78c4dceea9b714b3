"""Commands of `models/`: a path that leads nowhere ends them with one line, not with a traceback."""

import runpy
from pathlib import Path

import pytest

MODELS = Path(__file__).parents[2] / "models"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("recipe/train.py --finish target --work missing", "missing/target.finish: no such file or directory"),
        ("recipe/evaluate.py missing", "missing/target/config.json is missing"),
        ("recipe/train_heads.py --target missing --out out", "missing/config.json is missing"),
        ("recipe/train_draft_model.py --target missing --out out", "missing/config.json is missing"),
        ("recipe/train_drafter.py --target missing.gguf --out out --work work", "missing.gguf does not exist"),
        ("recipe/compare_drafters.py missing", "missing/figures.json: no such file or directory"),
        ("recipe/compare_head_sizes.py --target missing.gguf --drafter d --work w", "missing.gguf does not exist"),
        ("replies.py", "no bundle at bundles/smollm2"),
        ("published.py smollm2", "cache/published: not a directory"),
    ],
)
def test_a_path_that_leads_nowhere(command: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, *options = command.split()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cache").touch()
    monkeypatch.setenv("ONDEVICE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("sys.argv", [script, *options])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(MODELS / script), run_name="__main__")
    line = str(ended.value.code)
    assert said in line
    assert "\n" not in line


@pytest.mark.parametrize(
    "command",
    [
        "train.py --tokens 0",
        "train_heads.py --offsets 0",
        "train_draft_model.py --blocks -1",
        "train_drafter.py --target T --out O --tokens 0",
        "compare_head_sizes.py --target T --drafter D --work W --sizes 0",
    ],
)
def test_a_number_out_of_range(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script, *options = command.split()
    monkeypatch.setattr("sys.argv", [script, *options])
    with pytest.raises(SystemExit):
        runpy.run_path(str(MODELS / "recipe" / script), run_name="__main__")
    assert f"argument {options[-2]}: a whole number of at least 1, not '{options[-1]}'" in capsys.readouterr().err
