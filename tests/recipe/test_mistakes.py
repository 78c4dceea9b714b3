"""Commands of the recipe: a path that leads nowhere ends them with one line, not with a traceback."""

import runpy
from pathlib import Path

import pytest

RECIPE = Path(__file__).parents[2] / "models" / "recipe"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("train.py --finish target --work missing", "missing/target.finish: no such file or directory"),
        ("evaluate.py missing", "missing/target/config.json is missing"),
        ("train_heads.py --target missing --out out", "missing/config.json is missing"),
        ("train_draft_model.py --target missing --out out", "missing/config.json is missing"),
        ("train_drafter.py --target missing.gguf --out out --work work", "missing.gguf does not exist"),
        ("compare_drafters.py missing", "missing/figures.json: no such file or directory"),
    ],
)
def test_a_path_that_leads_nowhere(command: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, *options = command.split()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [script, *options])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(RECIPE / script), run_name="__main__")
    line = str(ended.value.code)
    assert said in line
    assert "\n" not in line
