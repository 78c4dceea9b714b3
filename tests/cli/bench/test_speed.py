"""`ondevice bench`: llama-bench's tests, names, figures and forms; simulated acceptance; energy."""

import csv
import io
import itertools
import json
import os
import re
import signal
from types import SimpleNamespace
from typing import Any

import pytest

from ondevice.cli.bench import speed
from ondevice.cli.bench.energy import energy_counters, joules_between, read_counters
from ondevice.cli.bench.measure import PLAIN, Configuration
from ondevice.cli.bench.speed import SpeedCase, SpeedRow, SpeedSample, SpeedTest, cases_of, text_ids
from ondevice.cli.bench.speed_report import COMMON
from ondevice.generate.stats import Round, Stats
from tests.fixtures.model_made import BOS, EOS, load_toy, write_bundle

SMALL = ["-p", 16, "-n", 8, "-pg", "8,4", "-d", "0,40", "-r", 2]


def records(run, *words):
    code, out, err = run("bench", *words, "-o", "json")
    assert (code, err) == (0, "")
    return json.loads(out)


@pytest.mark.parametrize(
    ("test", "name"),
    [
        (SpeedTest(512, 0), "pp512"),
        (SpeedTest(0, 128), "tg128"),
        (SpeedTest(512, 128), "pp512+tg128"),
        (SpeedTest(0, 128, 4096), "tg128 @ d4096"),
    ],
)
def test_names_are_those_of_llama_bench(test, name):
    assert test.name == name
    assert SpeedCase(test, PLAIN).name == name
    assert SpeedCase(test, Configuration("mtp", "auto")).name == f"{name} + mtp"
    assert SpeedCase(test, Configuration("mtp", "4")).name == f"{name} + mtp k=4"
    assert SpeedCase(test, Configuration("simulated", "auto"), 0.6).name == f"{name} + accept 0.6"


def test_every_test_runs_at_every_depth_with_every_drafter(run, bundle):
    found = records(run, bundle, *SMALL, "--drafters", "none,ngram")
    names = ["pp16", "tg8", "tg8 + ngram", "pp8+tg4", "pp8+tg4 + ngram"]
    deep = ["pp16 @ d40", "tg8 @ d40", "tg8 @ d40 + ngram", "pp8+tg4 @ d40", "pp8+tg4 @ d40 + ngram"]
    assert [each["test"] for each in found] == names + deep
    for each in found:
        assert len(each["samples_ts"]) == len(each["samples_ns"]) == 2
        assert each["avg_ts"] == pytest.approx(sum(each["samples_ts"]) / 2)
        tokens = each["n_prompt"] + each["n_gen"]
        assert each["samples_ts"] == pytest.approx([1e9 * tokens / taken for taken in each["samples_ns"]], rel=1e-4)
        assert each["equal_to_plain"]
        assert (each["first_token_ms"] is None) == (not each["n_prompt"])
        assert (each["tokens_per_round"] is None) == (not each["n_gen"])
    assert {each["n_depth"] for each in found} == {0, 40}


def test_a_depth_is_in_the_cache_and_is_not_timed(run, bundle, toy, monkeypatch):
    """From 40 + 16 tokens a test `pp16 @ d40` reads 16, and `tg8 @ d40` one."""
    read = []
    real = speed._Bench._sample

    def recorded(self, case, repetition):
        sample = real(self, case, repetition)
        read.append((case.name, sample.stats.prompt_tokens - sample.stats.cached_tokens, sample.tokens))
        return sample

    monkeypatch.setattr(speed._Bench, "_sample", recorded)
    records(run, bundle, "-p", 16, "-n", 8, "-d", 40, "-r", 1, "--drafters", "none")
    assert set(read) == {("pp16 @ d40", 16, 16), ("tg8 @ d40", 1, 8)}


def test_a_reply_does_not_end_early(run, tmp_path):
    """Every token of the vocabulary but one ends a reply, and 8 are generated all the same."""
    bundle = write_bundle(tmp_path / "ends", eos=(BOS, EOS, 2, 3, 4, 5, 6, 7, 8, 9))
    [found] = records(run, bundle, "-p", 0, "-n", 8, "-r", 1, "--drafters", "none")
    assert found["samples_ns"][0] > 0
    assert found["avg_ts"] == pytest.approx(8e9 / found["samples_ns"][0], rel=1e-4)


def test_simulated_drafts_are_accepted_at_the_given_rate(run, bundle):
    words = ["-p", 0, "-n", 100, "-r", 2, "--drafters", "none", "--lengths", 1, "--accept", "0,0.6,1"]
    plain, never, often, always = records(run, bundle, *words)
    assert plain["synthetic_acceptance"] is None
    assert [each["synthetic_acceptance"] for each in (never, often, always)] == [0, 0.6, 1]
    assert (never["acceptance"], always["acceptance"]) == (0, 1)
    assert often["acceptance"] == pytest.approx(0.6, abs=0.15)
    assert often["acceptance_by_position"] == [often["acceptance"]]
    assert all(each["equal_to_plain"] for each in (never, often, always))


def test_markdown_has_llama_benchs_columns_first_and_fits(run, bundle, tmp_path):
    other = write_bundle(tmp_path / "other", name="other-model")
    code, out, err = run("bench", bundle, other, *SMALL)
    assert (code, err) == (0, "")
    *tables, foot = out.split("\n\n")
    assert max(len(line) for text in tables for line in text.splitlines()) <= 80
    model, tests, *_ = [[title.strip() for title in text.splitlines()[0].split("|")[1:-1]] for text in tables]
    assert model == ["model", "size", "params", "backend", "threads"]
    assert tests[:2] == ["test", "t/s"]
    assert [out.count(f"| {name} int4 |") for name in ("toy-model", "other-model")] == [1, 1]
    assert re.search(r"\| tg8 @ d40 \+ ngram +\| +[\d.]+ ± [\d.]+ \|", out)
    assert "ondevice 0" in foot


@pytest.mark.parametrize("joules", [4.0, None])
def test_the_wide_table_has_all_columns_that_have_a_figure(run, bundle, monkeypatch, joules):
    monkeypatch.setattr(speed, "joules_between", lambda *_: joules)
    energy = [] if joules is None else ["J/tok"]
    drafted = ["tok/rd", "accepted", "first ms", "RSS MB", *energy]
    assert all_titles(run, bundle, "--accept", 0.6, "--wide") == [*COMMON, "test", "t/s", *drafted]
    assert all_titles(run, bundle, "-n", 0, "--wide") == [*COMMON, "test", "t/s", "first ms", "RSS MB", *energy]
    assert ("J/tok" in all_titles(run, bundle)) == bool(energy)


def all_titles(run, bundle, *words):
    """Titles of all tables of a measurement."""
    _, out, _ = run("bench", bundle, "-p", 8, "-n", 4, "-r", 1, "--drafters", "none", *words)
    lines = out.splitlines()
    return [
        title.strip()
        for line, below in itertools.pairwise(lines)
        if below.startswith("| --")
        for title in line.split("|")[1:-1]
    ]


def test_all_forms_have_the_same_rows(run, bundle):
    words = ("bench", bundle, "-p", 8, "-n", 4, "-r", 2, "--drafters", "none,ngram")
    _, lines, _ = run(*words, "-o", "jsonl")
    _, text, _ = run(*words, "-o", "csv")
    found = [json.loads(line) for line in lines.splitlines()]
    table = list(csv.DictReader(io.StringIO(text)))
    names = ["pp8", "tg4", "tg4 + ngram"]
    assert [each["test"] for each in found] == [each["test"] for each in table] == names
    assert set(found[0]) == set(table[0])
    assert table[0]["joules_per_token"] in ("", *[str(each["joules_per_token"]) for each in found])
    assert len(table[1]["samples_ns"].split()) == 2


def test_several_engines_and_threads_are_loaded_one_after_another(run, bundle, monkeypatch):
    asked = []

    def load(location, **options):
        asked.append((options["engine"], options["threads"]))
        return load_toy(location)

    monkeypatch.setattr("ondevice.model.load", load)
    words = ("-p", 4, "-n", 0, "-r", 1, "--engine", "simd,ort", "--threads", "1,2")
    assert len(records(run, bundle, *words)) == 4
    assert asked == [("simd", 1), ("simd", 2), ("ort", 1), ("ort", 2)]


def test_other_tokens_than_plain_decoding_fail(run, bundle, monkeypatch):
    monkeypatch.setattr(SpeedRow, "equal", False)
    code, out, err = run("bench", bundle, "-p", 4, "-n", 0, "-r", 1)
    assert code == 1
    assert "| pp4 " in out
    assert err == "tokens differ from plain decoding: pp4\n"


def test_tokens_are_compared():
    case = SpeedCase(SpeedTest(0, 2), Configuration("mtp", "auto"))
    assert SpeedRow(case, (1, 2, 3), [sample((1, 2, 3))]).equal
    assert not SpeedRow(case, (1, 2, 3), [sample((1, 2, 3)), sample((1, 2, 4))]).equal


def sample(token_ids=(1, 2, 3), tokens=2, seconds=0.5, joules=None):
    stats = Stats(new_tokens=1)
    stats.add(Round((2, 3), drafted=2, accepted=1, depth=2, seconds=seconds))
    return SpeedSample(tokens, seconds, 0.1, joules, token_ids, stats)


def test_figures_of_a_row():
    row = SpeedRow(
        SpeedCase(SpeedTest(0, 2), PLAIN), (), [sample(seconds=0.5, joules=3.0), sample(seconds=0.25, joules=5.0)]
    )
    assert row.speeds == [4.0, 8.0]
    assert row.speed == 6.0
    assert row.deviation == pytest.approx(8**0.5)
    assert (row.tokens_per_round, row.acceptance) == (2.0, 0.5)
    assert row.joules_per_token == 2.0
    assert row.acceptance_by_position == (1.0, 0.0)
    unknown = SpeedRow(row.case, (), [sample(joules=3.0), sample()])
    assert unknown.joules_per_token is None
    assert SpeedRow(row.case, (), [sample()]).deviation == 0.0


def test_ctrl_c_reports_what_is_done(run, bundle, monkeypatch):
    real = speed._Bench._sample
    calls = []

    def interrupted(self, case, repetition):
        calls.append(case)
        if len(calls) == 2 + 2 + 2:  # two warm-ups, two of the first repetition, one of the second
            os.kill(os.getpid(), signal.SIGINT)
        return real(self, case, repetition)

    monkeypatch.setattr(speed._Bench, "_sample", interrupted)
    code, out, _ = run("bench", bundle, "-p", 4, "-n", 4, "-r", 3, "--drafters", "none", "-o", "json")
    assert code == 130
    assert sorted(len(each["samples_ns"]) for each in json.loads(out)) in ([1, 1], [1, 2])


def test_text_is_as_long_as_it_must_be(bundle):
    with load_toy(bundle) as model:
        short, long = text_ids(model, 10), text_ids(model, 100_000)
        assert (len(short), len(long)) == (10, 100_000)
        assert short[0] == long[0] == model.manifest.first_token_id
        assert short[1:] != long[1:10]
        assert text_ids(model, 100_000) == long


def test_a_bundle_without_tokenizer_has_no_text(run, tmp_path):
    code, _, err = run("bench", write_bundle(tmp_path / "bare", tokenizer=False), "-p", 4, "-n", 0)
    assert code == 2
    assert err == "ondevice: this bundle has no tokenizer, and the tests need a text: name one with a tokenizer\n"


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["-p", "0", "-n", "0"], "there is no test"),
        (["-pg", "5"], "'5' is not two numbers"),
        (["-pg", "0,5"], "'0,5' is not two numbers"),
        (["-p", "x"], "'x' is not a whole number"),
        (["-p", "512"], "the tests need a context of 513 tokens, this model has 400"),
        (["-d", "380", "-p", "8", "-n", "16"], "the tests need a context of 397 tokens"),
        (["-r", "0"], "--repetitions must be"),
        (["--accept", "1.5"], "'1.5' is not a number from 0 to 1"),
        (["--temperature", "1"], "--temperature needs --drafts, --scenarios or --mtp-bench"),
        (["--drafters", "mtp", "-p", "4", "-n", "4"], "no MTP drafter"),
        (["-o", "sql"], "invalid choice"),
    ],
)
def test_a_mistake_is_one_line(run, bundle, words, complaint):
    context = ["--context-length", "396"] if "380" in words else []
    code, out, err = run("bench", bundle, *words, *context)
    assert (code, out) == (2, "")
    assert complaint in err
    assert err.count("\n") == 1


def test_tests_that_do_not_generate_run_once():
    found = cases_of([SpeedTest(8, 0), SpeedTest(0, 8)], ["mtp", "auto"], ["auto", "2"], [0.5])
    names = [
        "pp8",
        "tg8 + mtp",
        "tg8 + mtp k=2",
        "tg8 + auto",
        "tg8 + auto k=2",
        "tg8 + accept 0.5",
        "tg8 + accept 0.5 k=2",
    ]
    assert [case.name for case in found] == names


# Energy.


def machine_with(root, files: dict[str, str]) -> Any:
    for name, text in files.items():
        path = root / "sys/class" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return energy_counters(root)


def test_rapl_counts_packages_and_starts_again(tmp_path):
    zone = "powercap/intel-rapl:0"
    counters = machine_with(
        tmp_path,
        {
            f"{zone}/name": "package-0",
            f"{zone}/energy_uj": "9000000",
            f"{zone}/max_energy_range_uj": "10000000",
            "powercap/intel-rapl:0:0/name": "core",
            "powercap/intel-rapl:0:0/energy_uj": "5",
            "powercap/intel-rapl:1/name": "psys",
            "powercap/intel-rapl:1/energy_uj": "5",
        },
    )
    before = read_counters(counters)
    (tmp_path / "sys/class" / zone / "energy_uj").write_text("1000000\n")
    assert joules_between(counters, before, read_counters(counters)) == 2.0


def test_hwmon_counts_sockets(tmp_path):
    files = {"energy1_label": "Ecore000", "energy1_input": "7", "energy9_label": "Esocket0", "energy9_input": "4000000"}
    counters = machine_with(tmp_path, {f"hwmon/hwmon3/{name}": text for name, text in files.items()})
    before = read_counters(counters)
    (tmp_path / "sys/class/hwmon/hwmon3/energy9_input").write_text("5500000")
    assert joules_between(counters, before, read_counters(counters)) == 1.5


def test_energy_is_empty_where_it_cannot_be_read(tmp_path):
    assert energy_counters(tmp_path) == []
    assert joules_between([], [], []) is None
    counters = machine_with(tmp_path, {"powercap/intel-rapl:0/name": "package-0"})  # energy_uj is for root only
    assert counters == []


def test_the_reference_of_a_bundles_size_is_its_target(run, bundle):
    [found] = records(run, bundle, "-p", 4, "-n", 0, "-r", 1)
    assert (found["model_type"], found["model_size"], found["model_n_params"]) == ("toy-model int4", 0, 0)
    assert found["backends"] == SimpleNamespace(name="toy").name
