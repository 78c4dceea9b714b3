"""`ondevice bench --mtp-bench`: nine prompts, their table, JSON."""

import json

import pytest

from ondevice.cli.bench import mtp_list
from ondevice.cli.bench.measure import Run, read_prompts
from ondevice.cli.bench.mtp_list import NAMES, mtp_report
from ondevice.generate.stats import Round, Stats


@pytest.fixture
def short(monkeypatch):
    """Prompts that fit into the toy's context."""
    monkeypatch.setattr(mtp_list, "read_prompts", lambda name, as_chat: ["abab"] * 9)


def test_there_are_nine_prompts():
    prompts = read_prompts("mtp", as_chat=True)
    assert len(prompts) == len(NAMES) == 9
    assert len({str(prompt) for prompt in prompts}) == 9
    for prompt, text in zip(prompts, read_prompts("mtp", as_chat=False), strict=True):
        assert isinstance(text, str)
        assert prompt == [{"role": "user", "content": text.strip()}]
        assert 15 <= len(text.split()) <= 200


def test_the_table(run, bundle, short):
    code, out, err = run("bench", bundle, "--mtp-bench", "--max-new-tokens", 12)
    assert (code, err) == (0, "")
    table, sums, _ = out.split("\n\n")
    header, _, *lines = table.splitlines()
    assert [title.strip() for title in header.split("|")[1:-1]] == [
        "prompt", "pred", "draft", "acc", "rate", "t/s", "by position"
    ]  # fmt: skip
    assert [line.split("|")[1].strip() for line in lines] == list(NAMES)
    assert max(map(len, table.splitlines())) <= 80
    assert sums.startswith("ngram, length auto: 108 tokens, ")
    assert sums.endswith("9 of 9 replies with the tokens of plain decoding")


def run_of(rounds):
    stats = Stats(new_tokens=1)
    for each in rounds:
        stats.add(each)
    return Run((1, 2, 3), 0.1, stats)


def test_its_figures():
    drafted = run_of([Round((1, 2, 3), drafted=4, accepted=2, depth=4, seconds=0.5)])
    plain = run_of([Round((1,), seconds=0.5)] * 3)
    text = mtp_report(["code_python"], "mtp", [drafted], [plain])
    assert [cell.strip() for cell in text.splitlines()[2].split("|")[1:-1]] == [
        "code_python", "4", "4", "2", "0.500", "6.0", "1.00 1.00 .00 .00"
    ]  # fmt: skip
    assert "mtp: 4 tokens, 4 drafted, 2 accepted, rate 0.500; 3.00 times plain decoding;" in text


def test_json_has_every_drafter_and_prompt(run, bundle, short):
    words = ("bench", bundle, "--mtp-bench", "--max-new-tokens", 6, "--limit", 2, "--lengths", "2,auto")
    _, out, _ = run(*words, "-o", "json")
    data = json.loads(out)
    assert [(each["drafter"], each["draft_length"], each["prompt"]) for each in data["rows"]] == [
        (drafter, length, name)
        for drafter, length in (("none", "0"), ("ngram", "2"), ("ngram", "auto"))
        for name in NAMES[:2]
    ]
    assert all(each["predicted_n"] == 6 for each in data["rows"])


def test_prompts_of_a_file(run, bundle, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("abc\ndcb\n")
    _, out, _ = run("bench", bundle, "--mtp-bench", "--prompts", path, "--max-new-tokens", 4)
    assert [line.split("|")[1].strip() for line in out.splitlines()[2:4]] == ["1", "2"]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["-r", "2"], "--repetitions does not go with --mtp-bench"),
        (["-o", "csv"], "--mtp-bench has no output csv"),
        (["--accept", "0.5"], "--accept does not go with --mtp-bench"),
    ],
)
def test_a_mistake_is_one_line(run, bundle, words, complaint):
    code, out, err = run("bench", bundle, "--mtp-bench", *words)
    assert (code, out) == (2, "")
    assert complaint in err
    assert err.count("\n") == 1
    code, _, err = run("bench", bundle, bundle, "--mtp-bench")
    assert "--mtp-bench measures one bundle, not 2" in err
