"""`ondevice bench --scenarios`: measuring, tables, verdicts, JSON, CSV, the chart."""

import csv
import io
import json
import sys
from dataclasses import replace

import pytest

from ondevice import machine
from ondevice.cli.bench import measure
from ondevice.cli.bench.measure import RAW, SCENARIOS, Row, load_scenarios
from ondevice.cli.bench.scenario_report import WORTH, report, verdicts

NAMES = ["code completion", "code editing", "summary", "question", "chat", "translation", "extraction"]


@pytest.fixture
def short(monkeypatch):
    """Prompts that fit into the toy's context."""
    monkeypatch.setattr("ondevice.cli.bench.measure.read_prompts", lambda name, as_chat: ("abab", "cdcdcd"))


def row(scenario, temperature, drafter, *speed_ups):
    return Row(
        scenario=scenario,
        temperature=temperature,
        engine="simd",
        threads=2,
        drafter=drafter,
        length="auto",
        name=drafter,
        prompts=2,
        new_tokens=96,
        prefill_tokens_per_s=500.0,
        decode_tokens_per_s=3333.0,
        first_token_ms=50.0,
        tokens_per_round=2.5,
        acceptance=(0.75, 0.5),
        idle_rounds=0.1,
        peak_rss_bytes=5_000_000,
        speed_ups=speed_ups,
        equal=2,
    )


def rows(*speed_ups):
    """Two scenarios with a plain row each, and `mtp`, `ngram` and `auto` at these speeds."""
    return [
        row(scenario, 0.0, drafter, *([1.0] * 3 if drafter == "none" else [speed, speed + 0.1, speed + 0.2]))
        for scenario in NAMES[:2]
        for drafter, speed in zip(("none", "mtp", "ngram", "auto"), (1.0, *speed_ups), strict=True)
    ]


def test_every_scenario_ships_prompts_of_a_few_hundred_words_at_most():
    found = load_scenarios(None, as_chat=True)
    assert [scenario.name for scenario in found] == NAMES == list(SCENARIOS)
    for scenario in found:
        assert len(scenario.prompts) >= 2
        for prompt in scenario.prompts:
            assert isinstance(prompt, str) == (scenario.name in RAW)
            text = prompt if isinstance(prompt, str) else str(prompt)
            assert 20 <= len(text.split()) <= 300
    assert all(isinstance(prompt, str) for each in load_scenarios(1, as_chat=False) for prompt in each.prompts)


def test_the_tables_the_legend_and_the_verdicts(run, bundle, short):
    code, out, err = run("bench", bundle, "--scenarios", "-r", 2, "--max-new-tokens", 10)
    assert (code, err) == (0, "")
    name = machine.processor_name()  # as long as the machine has it
    assert max(len(line) for line in out.splitlines()[:-1] if name not in line) <= 80
    _, speed, _, acceptance, _, conditions, legend, foot, *_ = out.split("\n\n")
    for each in (speed, acceptance, conditions):
        assert [
            line.split("|")[1].strip() for line in each.splitlines()[2:]
        ] == NAMES  # the toy samples at T = 0 anyway
    assert all(line.endswith("|   2/2 |") for line in conditions.splitlines()[2:])
    for title in ("first ms", "plain ms", "spread", "equal", "tok/rd", "k=0"):
        assert title in conditions
        assert title in legend
    assert "14 replies of 10 tokens on average, 2 repeats" in foot
    lines = out.splitlines()[-len(NAMES) :]
    assert [line.removeprefix("- ").split(":")[0] for line in lines] == NAMES


def test_json_and_csv_have_the_same_rows(run, bundle, short):
    words = ("bench", bundle, "--scenarios", "--quick", "--max-new-tokens", 5, "--temperature", 1)
    _, out, _ = run(*words, "-o", "json")
    data = json.loads(out)
    assert (data["repeats"], data["seed"]) == (3, 0)
    assert [each["drafter"] for each in data["rows"]] == ["none", "ngram"] * len(NAMES)
    assert {each["temperature"] for each in data["rows"]} == {1.0}
    assert all(len(each["speed_ups"]) == 3 for each in data["rows"])
    _, out, _ = run(*words, "-o", "csv")
    table = list(csv.DictReader(io.StringIO(out)))
    assert [each["scenario"] for each in table] == [each["scenario"] for each in data["rows"]]
    assert set(table[0]) == set(data["rows"][0])


def test_several_thread_counts_take_turns(run, bundle, short, monkeypatch):
    """Each repeat begins with another variant. The toy has no threads, so their number is patched in."""
    used = []
    real = measure.run_prompt

    def recorded(model, prompt, configuration, options):
        used.append((model.threads, configuration.drafter, options["max_new_tokens"]))
        return real(model, prompt, configuration, options)

    monkeypatch.setattr(measure, "run_prompt", recorded)
    load = sys.modules["ondevice.model"].load

    def with_threads(location, **options):
        model = load(location, **options)
        model.threads = options["threads"]
        return model

    monkeypatch.setattr("ondevice.model.load", with_threads)
    code, out, _ = run("bench", bundle, "--scenarios", "--quick", "--max-new-tokens", 5, "--threads", "1,2")
    assert code == 0
    turns = [run[:2] for run in used if run[2] == 5][:12]
    variants = {(1, "none"), (1, "ngram"), (2, "none"), (2, "ngram")}
    assert [set(turns[first : first + 4]) for first in (0, 4, 8)] == [variants] * 3
    assert len({turns[first] for first in (0, 4, 8)}) == 3  # another one begins each time
    assert "| engine | threads |" in out


def test_verdicts_name_the_fastest_drafter_or_none():
    assert verdicts(rows(1.4, 1.2, 1.3)) == [f"- {name}: mtp 1.50x at T=0" for name in NAMES[:2]]
    below = WORTH - 0.11
    assert verdicts(rows(0.8, 0.7, below))[0] == f"- code completion: none (best {below + 0.1:.2f}x) at T=0"


def test_tables_of_many_drafters_are_not_wider():
    drafters = ["mtp", "ngram", "self", "swift", "medusa", "blockwise", "early-exit", "auto"]
    [plain] = [each for each in rows(1.0, 1.0, 1.0) if each.drafter == "none"][:1]
    text = report([plain, *(replace(plain, drafter=name, acceptance=(0.5,) * 6) for name in drafters)], "")
    assert all(f" {name} |" in text for name in drafters)
    assert " .50 .50 " in text
    assert max(map(len, text.splitlines())) <= 80


def test_auto_is_compared_with_the_best_single_setting():
    text = report(rows(1.9, 1.2, 1.8), "foot")
    assert "auto at its worst: 1.90 of plain decoding (code completion, T=0), 0.95 of" in text
    assert "1.90 of plain decoding" in report(rows(0.5, 0.6, 1.8), "")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--scenarios", "--prompts", "x.txt"], "--prompts does not go with --scenarios"),
        (["--scenarios", "--lengths", "2"], "--lengths does not go with --scenarios"),
        (["--scenarios", "--repetitions", "0"], "--repetitions must be"),
        (["--drafts", "-r", "2"], "--repetitions does not go with --drafts"),
        (["--quick"], "--quick needs --scenarios"),
        (["--drafts", "--threads", "1,2"], "--threads with several values does not go with --drafts"),
        (["--scenarios", "-o", "jsonl"], "--scenarios has no output jsonl"),
        (["--scenarios", "-p", "4"], "--n-prompt does not go with --scenarios"),
        (["--scenarios", "--drafts"], "not allowed with"),
        (["--scenarios", "--engine", "gpu"], "'gpu' is none of auto, simd, ort"),
        (["--scenarios"], "the scenarios need a longer context"),
    ],
)
def test_a_mistake_is_one_line(run, bundle, words, complaint):
    code, out, err = run("bench", bundle, *words)
    assert (code, out) == (2, "")
    assert complaint in err
    assert err.count("\n") == 1


def test_the_chart(run, bundle, short, tmp_path):
    path = tmp_path / "scenarios.png"
    code, *_ = run("bench", bundle, "--scenarios", "--quick", "--max-new-tokens", 5, "--plot", path)
    assert code == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_a_chart_is_one_line_of_error(run, bundle, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    code, _, err = run("bench", bundle, "--scenarios", "--plot", "x.png")
    assert code == 2
    assert "ondevice-runtime[bench]" in err
