"""`--drafter PATH`: a draft bundle in every command that takes a drafter."""

import json

import pytest

from ondevice.generate.drafters import registry
from tests.drafters.test_draft_model import with_other_vocabulary
from tests.fixtures.model_made import write_bundle


@pytest.fixture
def small(tmp_path):
    return str(write_bundle(tmp_path / "small"))


@pytest.fixture
def prompts_file(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("abc\nedc\n", "utf-8")
    return path


CONSTANT = ["--num-assistant-tokens-schedule", "constant"]


@pytest.mark.parametrize("prefix", ["", "auto+"])
def test_generate(run, bundle, small, prefix):
    words = ["abcde", "--max-new-tokens", 40, *CONSTANT, "--drafter", prefix + small, "--compare", "--json"]
    code, out, _ = run("generate", bundle, *words)
    data = json.loads(out)
    assert code == 0
    assert data["comparison"]["equal"]
    assert data["stats"]["drafter"] == ("ngram+draft:small" if prefix else "draft:small")
    if not prefix:
        assert data["stats"]["drafted"] == data["stats"]["accepted"] > 20


def test_generate_with_the_ratio_rule(run, bundle, small):
    words = ["generate", bundle, "abcde", "--temperature", 1, "--seed", 1, "--drafter", small, *CONSTANT]
    code, out, _ = run(*words, "--draft-sampling", "ratio", "--json")
    assert code == 0
    stats = json.loads(out)["stats"]
    assert stats["drafted"] == stats["accepted"] > 20
    code, _, err = run(*words, "--draft-sampling", "ratio", "--compare")
    assert code == 2
    assert "leave one of them out" in err


def test_chat(run, bundle, small):
    words = ["--max-new-tokens", 30, *CONSTANT, "--drafter", small]
    code, out, err = run("chat", bundle, *words, stdin="ab\n/stats\n")
    assert code == 0
    assert out == run("chat", bundle, "--max-new-tokens", 30, "--drafter", "none", stdin="ab\n")[1]
    assert "draft:small" in err


def test_bench(run, bundle, small, prompts_file):
    words = ["--drafts", "--prompts", prompts_file, "--max-new-tokens", 12, "--lengths", "2", "-o", "json"]
    code, out, _ = run("bench", bundle, *words, "--drafters", f"none,{small},auto+{small}")
    assert code == 0
    rows = json.loads(out)["rows"]
    assert [row["drafter"] for row in rows] == ["none", small, f"auto+{small}"]
    assert rows[1]["acceptance"] == [1.0, 1.0]
    assert all(row["equal"] == 2 for row in rows)


def test_check(run, bundle, small, prompts_file):
    code, out, _ = run("check", bundle, "--prompts", prompts_file, "--drafter", small, "--json")
    assert code == 0
    rows = json.loads(out)["rows"]
    assert [row["drafter"] for row in rows] == [small, small]
    assert all(row["num_accepted_tokens"] > 20 for row in rows)


@pytest.mark.parametrize("command", ["generate", "chat", "check", "bench"])
def test_another_vocabulary_is_one_line(run, bundle, small, prompts_file, command):
    with_other_vocabulary(small, 12)
    options = {
        "generate": ["a", "--drafter", small],
        "chat": ["--drafter", small],
        "check": ["--prompts", prompts_file, "--drafter", small],
        "bench": ["--drafts", "--prompts", prompts_file, "--drafters", small],
    }
    code, _, err = run(command, bundle, *options[command], stdin="a\n")
    assert code == 2
    assert err.splitlines()[-1] == f"ondevice: {small} cannot draft for this model: it has 12 tokens, and this model 11"


@pytest.mark.parametrize("words", [["generate", "b", "p", "--drafter", "mpt"], ["bench", "b", "--drafters", "mpt"]])
def test_a_mistyped_name_is_one_line(run, words):
    code, _, err = run(*words)
    assert code == 2
    assert f"'mpt' is none of {', '.join(registry.names())}, and there is no such bundle" in err
