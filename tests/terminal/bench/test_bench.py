import json
import os
import signal

import pytest

from ondevice.options import GenerationKeywords
from ondevice.terminal.bench import command, runner
from tests.model_made import write_bundle

SMALL = ["--limit", "3", "--max-new-tokens", "12", "--lengths", "2,auto"]


@pytest.fixture
def prompts_file(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("abc\nabcabcab\n\ne d c\n", "utf-8")
    return path


def test_the_table_and_its_foot(run, bundle, prompts_file):
    code, out, err = run("bench", bundle, "--prompts", prompts_file, *SMALL)
    assert (code, err) == (0, "")
    table, foot = out.split("\n\n")
    header, rule, plain, *drafted = table.splitlines()
    assert header.startswith("| drafter | draft |")
    assert set(rule) <= set("|-: ")
    assert plain.startswith("| plain")
    assert [line.split("|")[1:3] for line in drafted] == [[" ngram   ", " 2     "], [" ngram   ", " auto  "]]
    for line in (plain, *drafted):
        assert line.endswith("|   3/3 |")
    assert "toy-model (int4), engine toy, 1 threads" in foot
    assert "3 prompts of 6 tokens, 12 new tokens each" in foot
    assert "; none KV cache; " in foot
    assert "onnxruntime" in foot


def test_json(run, bundle, prompts_file):
    _, out, _ = run("bench", bundle, "--prompts", prompts_file, *SMALL, "--json", "--temperature", "1", "--seed", "5")
    data = json.loads(out)
    assert (data["temperature"], data["seed"], data["prompts"]) == (1.0, 5, 3)
    assert [(row["drafter"], row["length"]) for row in data["rows"]] == [
        ("none", "0"),
        ("ngram", "2"),
        ("ngram", "auto"),
    ]
    for row in data["rows"]:
        assert (row["equal"], row["prompts"], row["new_tokens"]) == (3, 3, 36)
        assert row["peak_rss_bytes"] > 0


def test_a_drafter_never_remembers_the_answer(run, bundle, prompts_file):
    _, out, _ = run("bench", bundle, "--prompts", prompts_file, "--lengths", "1,2,4", "--json")
    for row in json.loads(out)["rows"][1:]:
        assert row["acceptance"][0] < 0.3  # the toy's text is random; from memory nearly all would be right


def test_unequal_tokens_fail(run, bundle, prompts_file, monkeypatch):
    real = runner.run_prompt

    def run_wrong(model, prompt, configuration, options: GenerationKeywords):
        return real(model, prompt, configuration, {**options, "seed": len(configuration.drafter)})

    monkeypatch.setattr(runner, "run_prompt", run_wrong)
    code, out, _ = run("bench", bundle, "--prompts", prompts_file, *SMALL, "--temperature", "3")
    assert code == 1
    assert "0/3 |" in out


def test_ctrl_c_reports_the_prompts_that_are_done(run, bundle, prompts_file, monkeypatch):
    real = runner.run_prompt
    calls = []

    def interrupted(*words):
        calls.append(words)
        if len(calls) == 3 + 3 + 2:  # warm-up, the first prompt, part of the second
            os.kill(os.getpid(), signal.SIGINT)
        return real(*words)

    monkeypatch.setattr(runner, "run_prompt", interrupted)
    code, out, _ = run("bench", bundle, "--prompts", prompts_file, *SMALL)
    assert code == 130
    assert out.count("1/1 |") == 3


def test_ctrl_c_before_anything_is_done(run, bundle, monkeypatch):
    monkeypatch.setattr(command, "measure", lambda *words: (_ for _ in ()).throw(KeyboardInterrupt))
    assert run("bench", bundle)[:2] == (130, "")


def test_prompts_that_are_too_long_are_counted(run, bundle, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("a" * 500 + "\nab\n", "utf-8")
    code, out, err = run("bench", bundle, "--prompts", path, *SMALL)
    assert code == 0
    assert err == "1 of 2 prompts are too long: left out\n"
    assert "1 prompts of 3 tokens" in out
    path.write_text("a" * 500, "utf-8")
    code, _, err = run("bench", bundle, "--prompts", path)
    assert code == 2
    assert "no prompt fits into the context of 400 tokens" in err


def test_turns_without_a_template_are_plain_text(run, tmp_path):
    bundle = write_bundle(tmp_path / "plain", template=False)
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"turns": ["ab", "cd"]}\n', "utf-8")
    _, out, _ = run("bench", bundle, "--prompts", path, *SMALL, "--json")
    assert json.loads(out)["prompt_tokens"] == 3


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--limit", "0"], "--limit must be"),
        (["--prompts", "missing.txt"], "cannot read missing.txt"),
        (["--drafters", "mtp"], "no MTP drafter"),
        (["--max-new-tokens", "0"], "max_new_tokens"),
    ],
)
def test_a_mistake_is_one_line(run, bundle, words, complaint):
    code, out, err = run("bench", bundle, *words)
    assert (code, out) == (2, "")
    assert complaint in err
    assert err.count("\n") == 1
