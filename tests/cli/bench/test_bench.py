"""`ondevice bench --drafts`, on one set of prompts: measuring, the table, the chart."""

import json
import os
import signal
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from ondevice.cli.bench import drafters, measure, tables
from ondevice.cli.bench.measure import PLAIN, Configuration, Row, Run, Variant, rows_of
from ondevice.errors import MissingDependencyError, UsageError
from ondevice.generate.stats import Round, Stats
from ondevice.options import GenerationKeywords
from tests.fixtures.model_made import write_bundle

SMALL = ["--limit", "3", "--max-new-tokens", "12", "--lengths", "2,auto"]


class ToyModel:
    """The fields of a model that a row has."""

    engine = SimpleNamespace(name="toy")
    threads = 1


MODEL: Any = ToyModel()
TOY_PLAIN, TOY_MTP = Variant(MODEL, PLAIN), Variant(MODEL, Configuration("mtp", "4"))

TABLE = """\
| drafter | draft | prefill tok/s | decode tok/s | first ms | tokens/round | acceptance by position | k=0 | RSS MB | speed-up | equal |
| ------- | ----- | ------------: | -----------: | -------: | -----------: | ---------------------- | --: | -----: | -------: | ----: |
| plain   |       |           100 |         10.0 |      200 |         1.00 |                        |     |      5 |    1.00x |   2/2 |
| mtp     | 4     |           100 |         20.0 |      200 |         2.00 | 1.00 .50               | 50% |      5 |    2.00x |   1/2 |"""  # noqa: E501


@pytest.fixture
def prompts_file(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("abc\nabcabcab\n\ne d c\n", "utf-8")
    return path


def test_the_table_and_its_footer(run, bundle, prompts_file):
    code, out, err = run("bench", bundle, "--drafts", "--prompts", prompts_file, *SMALL, "--wide")
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
    _, out, _ = run(
        "bench",
        bundle,
        "--drafts",
        "--prompts",
        prompts_file,
        *SMALL,
        "-o",
        "json",
        "--temperature",
        "1",
        "--seed",
        "5",
    )
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
    _, out, _ = run("bench", bundle, "--drafts", "--prompts", prompts_file, "--lengths", "1,2,4", "-o", "json")
    _, *drafted = json.loads(out)["rows"]
    assert drafted
    for row in drafted:
        assert (
            row["acceptance"][0] < 0.3
        )  # the toy's text is random; a remembered reply would be accepted almost always


def test_unequal_tokens_fail(run, bundle, prompts_file, monkeypatch):
    real = measure.run_prompt

    def run_wrong(model, prompt, configuration, options: GenerationKeywords):
        return real(model, prompt, configuration, {**options, "seed": len(configuration.drafter)})

    monkeypatch.setattr(measure, "run_prompt", run_wrong)
    code, out, _ = run("bench", bundle, "--drafts", "--prompts", prompts_file, *SMALL, "--temperature", "3")
    assert code == 1
    assert "0/3 |" in out


def test_ctrl_c_reports_the_complete_prompts(run, bundle, prompts_file, monkeypatch):
    real = measure.run_prompt
    calls = []

    def interrupted(*words):
        calls.append(words)
        if len(calls) == 3 + 3 + 2:  # warm-up, the first prompt, part of the second
            os.kill(os.getpid(), signal.SIGINT)
        return real(*words)

    monkeypatch.setattr(measure, "run_prompt", interrupted)
    code, out, _ = run("bench", bundle, "--drafts", "--prompts", prompts_file, *SMALL)
    assert code == 130
    assert out.count("1/1 |") == 3


def test_ctrl_c_before_anything_is_done(run, bundle, monkeypatch):
    monkeypatch.setattr(drafters, "run_in_turns", lambda *words: (_ for _ in ()).throw(KeyboardInterrupt))
    assert run("bench", bundle, "--drafts")[:2] == (130, "")


def test_prompts_that_are_too_long_are_skipped(run, bundle, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("a" * 500 + "\nab\n", "utf-8")
    code, out, err = run("bench", bundle, "--drafts", "--prompts", path, *SMALL)
    assert code == 0
    assert err == "skipped 1 of 2 prompts: too long\n"
    assert "1 prompts of 3 tokens" in out
    path.write_text("a" * 500, "utf-8")
    code, _, err = run("bench", bundle, "--drafts", "--prompts", path)
    assert code == 2
    assert "no prompt fits into the context of 400 tokens" in err


def test_turns_without_a_template_are_plain_text(run, tmp_path):
    bundle = write_bundle(tmp_path / "plain", template=False)
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"turns": ["ab", "cd"]}\n', "utf-8")
    _, out, _ = run("bench", bundle, "--drafts", "--prompts", path, *SMALL, "-o", "json")
    assert json.loads(out)["prompt_tokens"] == 3


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--limit", "0"], "--limit must be"),
        (["--prompts", "missing.txt"], "cannot read missing.txt"),
        (["--drafters", "mtp"], "no MTP drafter"),
        (["--max-new-tokens", "0"], "--max-new-tokens must be"),
    ],
)
def test_a_mistake_is_one_line(run, bundle, words, complaint):
    code, out, err = run("bench", bundle, "--drafts", *words)
    assert (code, out) == (2, "")
    assert complaint in err
    assert err.count("\n") == 1


def run_of(rounds, token_ids=(1, 2, 3, 4, 5), first_token_s=0.2):
    stats = Stats(prompt_tokens=20, new_tokens=1, prefill_s=0.2, peak_rss_bytes=5_000_000, drafter="mtp")
    for this in rounds:
        stats.add(this)
    return Run(tuple(token_ids), first_token_s, stats)


def plain_run():
    return run_of([Round((1,), seconds=0.1)] * 4)


def mtp_run(**options):
    return run_of([Round((1, 2, 3), drafted=2, accepted=2, depth=2, seconds=0.1), Round((4,), seconds=0.1)], **options)


def other_run():
    wrong = [Round((1, 2), drafted=2, accepted=1, depth=2, seconds=0.1), Round((3, 4), drafted=0, seconds=0.1)]
    return run_of(wrong, token_ids=(1, 2, 3, 9, 9))


def test_the_whole_table():
    results = [{TOY_PLAIN: plain_run(), TOY_MTP: mtp_run()}, {TOY_MTP: other_run(), TOY_PLAIN: plain_run()}]
    assert tables.report(rows_of(results), "foot", wide=True) == f"{TABLE}\n\nfoot"
    *cut, foot = tables.report(rows_of(results), "foot").split("\n\n")
    assert foot == "foot"
    assert max(len(line) for part in cut for line in part.splitlines()) <= 80
    titles = [title.strip() for part in cut for title in part.splitlines()[0].split("|")[3:-1]]
    assert titles == [title for title, _ in tables.COLUMNS[2:]]


def test_long_replies_weigh_more():
    long, short = run_of([Round((1,), seconds=0.1)] * 9), run_of([Round((1,), seconds=1.0)])
    assert Row.of(TOY_PLAIN, [long, short], [long, short]).decode_tokens_per_s == 10 / 1.9


def test_the_first_token_is_a_median():
    runs = [mtp_run(first_token_s=seconds) for seconds in (0.1, 0.2, 9.0)]
    assert Row.of(TOY_MTP, runs, runs).first_token_ms == 200


def test_a_reply_of_one_token_has_no_decoding_speed():
    runs = [run_of([])]
    row = Row.of(TOY_PLAIN, runs, runs)
    assert (row.decode_tokens_per_s, row.tokens_per_round, row.speed_up) == (0, 0, 0)


def test_acceptance_of_long_drafts_is_cut():
    run = run_of([Round(tuple(range(9)), drafted=8, accepted=8, depth=8, seconds=0.1)])
    [line] = tables.report([Row.of(TOY_MTP, [run], [run])], "", wide=True).splitlines()[2:3]
    assert "1.00 1.00 1.00 1.00 1.00 1.00 ... |" in line


def test_combinations_of_drafters_and_lengths(run, bundle, prompts_file):
    words = ["--drafts", "--drafters", "none,ngram,auto", "--lengths", "2,auto", "--max-new-tokens", 4, "-o", "json"]
    _, out, _ = run("bench", bundle, "--prompts", prompts_file, *words)
    pairs = [(row["drafter"], row["length"]) for row in json.loads(out)["rows"]]
    assert pairs == [("none", "0"), ("ngram", "2"), ("ngram", "auto"), ("auto", "2"), ("auto", "auto")]
    assert Configuration("mtp", "heuristic").options() == {
        "drafter": "mtp",
        "num_assistant_tokens_schedule": "heuristic",
    }


def test_matplotlib_is_optional(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(MissingDependencyError, match=r"ondevice-runtime\[bench\]"):
        tables.check_plot(tmp_path / "speed.png")


def test_the_chart_of_the_rows(tmp_path):
    path = tmp_path / "speed.png"
    tables.check_plot(path)
    tables.draw(rows_of([{TOY_PLAIN: plain_run(), TOY_MTP: mtp_run()}]), "toy", path)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["speed.doc", "speed", "missing/speed.png"])
def test_a_bad_path_of_the_chart_is_found_before_measuring(tmp_path, name):
    with pytest.raises(UsageError, match="--plot"):
        tables.check_plot(tmp_path / name)
