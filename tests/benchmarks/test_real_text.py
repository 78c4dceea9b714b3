"""`benchmarks.drafts.real_text`: its statistics, its check of every reply, and a run on the reference pair."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.drafts import real_text
from benchmarks.drafts.real_text import check_equal
from benchmarks.drafts.real_text_tables import (
    Record,
    geometric,
    interval_text,
    kinds_table,
    merge,
    positions_table,
    profile_table,
    repeated_share,
    report,
    seen_grams,
    spread_lines,
)
from benchmarks.peers.xllamacpp_worker import Completion, LlamaProcess, Speculation, mtp_ways
from ondevice.cli.bench.measure import Run
from ondevice.generate.stats import Stats

FACTS = {
    "bundle": "toy", "weights": "int4", "engine": "simd", "threads": 2, "processor": "a CPU", "system": "an OS",
    "versions": {"numpy": "2"}, "tokens": 96, "turns": 3, "left_out": ["self", "swift", "early-exit"],
    "sampled": {"top_k": 64, "top_p": 0.95},
}  # fmt: skip
PLAIN = Record("chat", 0, 0.0, "plain", 95, (9.5, 9.5, 19.0), rounds=285, repeated=0.1)
MTP = replace(PLAIN, setting="mtp", seconds=(4.75, 19.0, 4.75), rounds=95, drafted=(90, 40), taken=(81, 20))
AUTO = replace(MTP, setting="auto", seconds=(5.0, 5.0, 5.0))


def test_the_share_that_repeats_itself() -> None:
    assert repeated_share([]) == 0
    assert repeated_share(range(50)) == 0
    assert repeated_share([*range(8), *range(100, 124), *range(8)]) == pytest.approx(16 / 40)
    assert repeated_share([7] * 20) == 1
    assert seen_grams([1, 2, 3]) == seen_grams(range(50)) == 0
    assert seen_grams([1, 2, 3, 4, 1, 2, 3, 4, 1]) == pytest.approx(2 / 6)


def test_speed_ups_are_taken_turn_by_turn() -> None:
    assert MTP.speed_up(PLAIN) == 2.0
    assert replace(MTP, tokens=190).speed_up(PLAIN) == 4.0
    mean, low, high = geometric([1.0, 4.0])
    assert mean == pytest.approx(2.0)
    assert low == pytest.approx(1.0)
    assert high == pytest.approx(4.0)
    assert interval_text([1.5]) == "1.50"
    assert interval_text([]) == "-"


def test_the_report() -> None:
    other = [replace(each, prompt=1, repeated=0.9) for each in (PLAIN, MTP, AUTO)]
    lines = report([PLAIN, MTP, AUTO, *other], FACTS).splitlines()
    assert lines[0] == "Temperature 0, 2 prompts, 1 without repetition:"
    assert lines[5].replace(" ", "") == "|mtp|2|20.0[20.0,20.0]|2.00[2.00,2.00]|2.00|3.00|90%|"
    assert lines[13].replace(" ", "") == "|chat|0|2|50%|0%|10.0|mtp|2.00|1.90[1.90,1.90]|0.95|"
    assert "Left out" in "\n".join(lines)
    assert "self, swift, early-exit" in "\n".join(lines)


def test_llama_cpp_by_kind_and_acceptance_by_position() -> None:
    slow = replace(PLAIN, setting="llama.cpp plain", seconds=3 * (19.0,))
    fast = replace(slow, setting="llama.cpp ngram_mod", seconds=3 * (7.6,))
    line = kinds_table([PLAIN, MTP, AUTO, slow, fast]).splitlines()[2].replace(" ", "")
    assert line.endswith("|mtp|2.00|1.90|0.95|ngram_mod|1.52|")
    sampled = replace(MTP, temperature=1.0, drafted=(10,), taken=(3,))
    lines = [line.replace(" ", "") for line in positions_table([PLAIN, MTP, sampled]).splitlines()[2:]]
    assert lines == ["|mtp|.90.50|.30|"]


def test_the_profile() -> None:
    plain = replace(PLAIN, seconds=(9.5,), rounds=95, target_s=8.55)
    mtp = replace(plain, setting="mtp", seconds=(5.0,), rounds=50, target_s=4.6, draft_s=0.2, control_s=0.01)
    lines = [line.replace(" ", "") for line in profile_table([plain, mtp, replace(mtp, prompt=1)]).splitlines()]
    assert lines[2:] == [
        "|0|plain|1.00|90.00|0.00|10.00|0.00|0.00|100.00|",
        "|0|mtp|1.90|90.00|2.00|3.80|4.00|0.20|100.00|",
    ]


def test_turns_that_differ_are_named() -> None:
    stalled = replace(PLAIN, setting="llama.cpp plain", seconds=(9.0, 31.0, 9.0))
    spread, named = spread_lines([PLAIN, AUTO, stalled])
    assert "100% longer than its fastest" in spread
    assert named.endswith("not left out: llama.cpp plain 31 s (chat, T=0).")
    assert len(spread_lines([PLAIN, AUTO])) == 1


def test_a_reply_that_differs_ends_the_run() -> None:
    plain = Run((1, 2, 3), 0.1, Stats())
    runs = {"plain": [plain, plain], "mtp 4": [plain, Run((1, 5, 3), 0.1, Stats())]}
    with pytest.raises(SystemExit, match=r"chat, prompt 7, turn 1: the reply of mtp 4 differs .* from token 1 on"):
        check_equal("chat, prompt 7", runs)
    with pytest.raises(SystemExit, match="from token 2 on"):
        check_equal("chat", {**runs, "mtp 4": [Run((1, 2), 0.1, Stats())]})
    check_equal("chat", {**runs, "mtp 4": [plain]})


def test_short_replies_are_left_out_and_counted() -> None:
    short = [replace(each, prompt=1, tokens=3) for each in (PLAIN, MTP, AUTO)]
    other = replace(PLAIN, setting="llama.cpp plain", tokens=2)
    alone = replace(other, prompt=1, tokens=95)
    printed = report([PLAIN, MTP, AUTO, *short, other, alone], FACTS)
    assert "Temperature 0, 1 prompts" in printed
    assert "Left out, with fewer than 16 tokens: 5 of 8 replies." in printed
    assert "llama.cpp" not in printed


def test_a_run_on_the_reference_pair(
    reference_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks, stored = tmp_path / "tasks.jsonl", tmp_path / "found.json"
    tasks.write_text(json.dumps({"task_id": "T/0", "prompt": "def add(a, b):\n"}))
    options = ["--human-eval", tasks, "--kinds", "chat", "HumanEval", "--limit", "1", "--tokens", "20", "--turns", "1"]
    monkeypatch.setattr("sys.argv", ["real_text", *map(str, [reference_bundle, *options, "--json", stored])])
    real_text.main()
    printed = capsys.readouterr().out
    records, facts = merge([stored])
    settings = {record.setting for record in records}
    constant = {f"{way} {length}" for way in ("mtp", "mtp chain") for length in (2, 4, 6, 8)}
    assert settings == {"plain", "mtp", "ngram", "medusa", "blockwise", "auto"} | constant
    assert all(0 < record.target_s < sum(record.seconds) for record in records)
    assert {record.kind for record in records} <= {"chat", "HumanEval"}
    assert facts["turns"] == 1
    chains = {record.setting: record for record in records if "chain" in record.setting and record.temperature}
    assert all(record.drafted[0] > 0 for record in chains.values())
    monkeypatch.setattr("sys.argv", ["real_text", "--merge", str(stored)])
    real_text.main()
    assert capsys.readouterr().out == printed
    with pytest.raises(SystemExit, match="prompts in common"):
        merge([stored, stored])
    other, shorter = tmp_path / "other.json", tmp_path / "shorter.json"
    for path, more in ((other, ["--skip", "1"]), (shorter, ["--skip", "1", "--tokens", "18"])):
        monkeypatch.setattr("sys.argv", ["real_text", *map(str, [reference_bundle, *options, "--json", path, *more])])
        real_text.main()
    both, _ = merge([stored, other])
    assert {(record.kind, record.prompt) for record in both if record not in records} == {("chat", 1)}
    with pytest.raises(SystemExit, match="other conditions"):
        merge([stored, shorter])


def test_a_few_settings_behind_source_and_beside_a_busy_process(
    reference_bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["real_text", str(reference_bundle), "--kinds", "chat", "--limit", "1", "--tokens", "20", "--turns", "1"]
    monkeypatch.setattr("sys.argv", [*command, "--settings", "mtp 2", "--before", "900", "--busy", "1"])
    real_text.main()
    printed = capsys.readouterr().out
    assert [line.split("|")[1].strip() for line in printed.splitlines()[4:7]] == ["plain", "mtp 2", "auto"]
    assert "Behind 900 characters of Python source." in printed
    assert "Beside 1 busy processes." in printed
    monkeypatch.setattr("sys.argv", [*command, "--settings", "mtp 3"])
    with pytest.raises(SystemExit, match=r"no such setting: mtp 3; there are plain, mtp, "):
        real_text.main()


@pytest.mark.parametrize(
    "content", ["no JSON", "[]", "{}", '{"facts": {}, "records": [1]}', '{"facts": {}, "records": [{}]}']
)
def test_a_file_of_something_else_is_not_merged(content: str, tmp_path: Path) -> None:
    (tmp_path / "found.json").write_text(content)
    with pytest.raises(SystemExit, match=r"found\.json was not written by"):
        merge([tmp_path / "found.json"])


@pytest.mark.parametrize("options", [["x", "--merge", "y"], ["x", "--mtp-gguf", "y"], ["x", "--tokens", "8"], []])
def test_options_that_do_not_fit(options: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["real_text", *options])
    with pytest.raises(SystemExit, match="2"):
        real_text.main()


FAKE = """
import json

__version__ = "2026.10.11549"

class common_speculative_type:
    COMMON_SPECULATIVE_TYPE_NONE, COMMON_SPECULATIVE_TYPE_DRAFT_MTP = 0, 7

class Fields:
    def __getattr__(self, name):
        self.__dict__[name] = Fields()
        return self.__dict__[name]

CommonParams = Fields

class Server:
    def __init__(self, params):
        if params.model.path == "absent.gguf":
            raise SystemExit(3)
        self.own = params.speculative

    def handle_completions(self, asked):
        draft = self.own.draft
        accepted = draft.n_max if self.own.__dict__.get("types") == [7] and draft.probabilistic else 0
        timings = {"predicted_n": len(asked["prompt"]) + accepted, "predicted_ms": 500.0}
        return {"timings": {**timings, "draft_n": 6, "draft_n_accepted": accepted}}
"""
"""Stands for xllamacpp: a reply has a token for each of the prompt, and the accepted ones."""


def test_llama_cpp_in_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "xllamacpp.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    ways = mtp_ways(Path("mtp.gguf"), [2, 4], 0.75)
    assert list(ways) == [f"mtp {length}{way}" for length in (2, 4) for way in ("", ", p_min 0.75", ", probabilistic")]
    assert ways["mtp 4, p_min 0.75"] == Speculation("DRAFT_MTP", "mtp.gguf", 4, 0.75)
    with LlamaProcess(Path("model.gguf"), 2, ways["mtp 4, probabilistic"]) as process:
        assert process.version.endswith("11549")
        found = process.complete([5, 6, 7], {"n_predict": 7})
    assert found == Completion(7, seconds=0.5, rounds=2, drafted=6, accepted=4)
    with LlamaProcess(Path("model.gguf"), 2) as process:
        assert process.complete([5, 6, 7], {}) == Completion(3, seconds=0.5, rounds=2, drafted=6, accepted=0)
    with pytest.raises(SystemExit, match=r"can llama|pip install xllamacpp"):
        LlamaProcess(Path("absent.gguf"), 2)
