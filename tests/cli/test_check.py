"""`ondevice check`: equal replies pass, a difference is named and fails."""

import json

import pytest

from ondevice.engines.protocol import Outputs
from tests.model_made import model_over
from tests.toy_engine import ToyEngine


@pytest.fixture
def prompts_file(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("abcabcabcabc\n" + "ab" * 20 + "\n", "utf-8")
    return path


class Unsteady(ToyEngine):
    """A row's logits depend on the number of rows, as in an engine that sums in another order for more rows."""

    def forward(self, batch):
        outputs = super().forward(batch)
        shift = 9.0 * (len(batch[0].tree) > 1 and len(batch[0].wanted) > 1)
        return [Outputs(each.logits[:, ::-1] + shift if shift else each.logits, each.hidden) for each in outputs]


def test_equal_replies(run, bundle, prompts_file):
    code, out, err = run("check", bundle, "--prompts", prompts_file, "--max-new-tokens", 20)
    assert (code, err) == (0, "")
    greedy, seeded = out.splitlines()[2:4]
    assert greedy.startswith("| ngram   | greedy")
    assert seeded.startswith("| ngram   | seeded")
    for line in (greedy, seeded):
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        assert (cells[2], cells[5]) == ("40", "2/2")
        assert int(cells[3]) > 0
    assert "token for token" in out


def test_a_difference_is_named_and_fails(run, bundle, prompts_file, monkeypatch):
    monkeypatch.setattr("ondevice.model.load", lambda location, **options: model_over(Unsteady(400), location))
    words = ["check", bundle, "--prompts", prompts_file, "--max-new-tokens", 20]
    code, out, _ = run(*words)
    assert code == 1
    assert "prompt 1 DIFFERS from token" in out
    assert "token for token" not in out
    code, out, _ = run(*words, "--json")
    data = json.loads(out)
    assert (code, data["equal"]) == (1, False)
    first = data["rows"][0]["differences"][0]
    assert first["plain"] != first["drafted"]
    assert first["logit_gap"] > 0  # greedy: the plain token is the likelier one


@pytest.mark.parametrize(
    ("words", "complaint"), [(["--limit", 0], "--limit must be"), (["--drafter", "none"], "makes no drafts to compare")]
)
def test_a_mistake_is_one_line(run, bundle, words, complaint):
    code, _, err = run("check", bundle, *words)
    assert (code, err.count("\n")) == (2, 1)
    assert complaint in err
