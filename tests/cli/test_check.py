"""`ondevice check`: equal replies pass, a difference is named and fails."""

import json

import numpy as np
import pytest

from ondevice.engines.protocol import Outputs
from tests.fixtures.model_made import model_over, write_bundle
from tests.fixtures.toy_engine import VOCAB, ToyEngine


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


@pytest.fixture
def long_text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("abcde" * 300, "utf-8")
    return path


class Tilted(ToyEngine):
    """A model that finds the tokens of even ids likelier than the toy does."""

    def forward(self, batch):
        tilt = np.where(np.arange(VOCAB) % 2, 0, 0.5).astype(np.float32)
        return [Outputs(each.logits + tilt, each.hidden) for each in super().forward(batch)]


def test_against_another_bundle(run, bundle, tmp_path, long_text, monkeypatch):
    reference = write_bundle(tmp_path / "reference")
    engines = {str(bundle): Tilted(600), str(reference): ToyEngine(600)}
    loaded = []

    def load(location, **options):
        loaded.append((str(location), options["engine"]))
        return model_over(engines[str(location)], location)

    monkeypatch.setattr("ondevice.model.load", load)
    code, out, err = run("check", bundle, "--against", reference, "--text", long_text)
    assert (code, err) == (0, "")
    assert loaded == [(str(bundle), "auto"), (str(reference), "auto")]
    lines = out.splitlines()
    assert lines[0].split() == ["tokens", "510"]
    assert [line.split("  ")[0] for line in lines[1:]] == [
        "KL divergence, mean",
        "KL divergence, median",
        "KL divergence, 99.9 %",
        "same top token",
        "RMS change of probability",
        "perplexity",
        "perplexity of the reference",
        "ratio of perplexities",
    ]
    code, out, _ = run("check", bundle, "--against", reference, "--text", long_text, "--json")
    data = json.loads(out)
    assert (code, data["bundle"], data["engine"], data["tokens"]) == (0, "toy-model", "toy", 510)
    assert f"{data['kl']['value']:.5f} ± {data['kl']['error']:.5f}" in lines[1]
    assert data["kl"]["value"] > 0.001
    assert data["perplexity"]["value"] / data["reference_perplexity"]["value"] == pytest.approx(data["ratio"]["value"])


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--text", "t.txt"], "--text is for --against"),
        (["--against", "REFERENCE", "--drafter", "ngram"], "leave --prompts, --limit and --drafter out"),
        (["--against", "REFERENCE", "--prompts", "p.txt"], "leave --prompts, --limit and --drafter out"),
        (["--against", "REFERENCE", "--limit", "2"], "leave --prompts, --limit and --drafter out"),
        (["--against", "REFERENCE", "--seed", "0"], "as well as --max-new-tokens and --seed"),
        (["--against", "REFERENCE", "--max-new-tokens", "9"], "as well as --max-new-tokens and --seed"),
        (["--against", "REFERENCE", "--text", "missing.txt"], "cannot read missing.txt"),
        (["--against", "./nothing"], "./nothing is neither a directory, a GGUF file nor a hub id"),
        (["--against", "REFERENCE", "--text", "SHORT"], "needs 400: give a longer --text"),
    ],
)
def test_a_mistake_with_a_reference_is_one_line(run, bundle, tmp_path, words, complaint):
    (tmp_path / "short.txt").write_text("abc", "utf-8")
    places = {"REFERENCE": write_bundle(tmp_path / "reference"), "SHORT": tmp_path / "short.txt"}
    code, out, err = run("check", bundle, *(places.get(word, word) for word in words))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert complaint in err
