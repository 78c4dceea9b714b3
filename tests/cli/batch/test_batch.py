"""`ondevice batch`: every prompt is answered once, also after interruptions, kills and bad lines."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

import ondevice
from ondevice.cli.batch.command import BatchBar
from ondevice.cli.batch.workers import ModelThreads
from ondevice.cli.terminal import progress
from tests.cli.conftest import Terminal
from tests.conftest import ROOT
from tests.fixtures.model_made import load_toy


@pytest.fixture
def ask(run, bundle, tmp_path):
    """Run a batch over these lines: exit code, answers by line, standard error."""

    def call(lines, *words, out="answers.jsonl"):
        prompts = tmp_path / "prompts.jsonl"
        prompts.write_bytes(b"".join(line if isinstance(line, bytes) else to_line(line) for line in lines))
        code, printed, err = run("batch", bundle, prompts, "--out", tmp_path / out, "--max-new-tokens", 8, *words)
        assert printed == ""
        return code, answers_in(tmp_path / out), err

    return call


def to_line(value):
    return json.dumps(value).encode() + b"\n"


def answers_in(path):
    """The answers by line, each of which must occur once."""
    if not path.exists():
        return {}
    records = [json.loads(line) for line in path.read_bytes().splitlines()]
    by_line = {record["line"]: record for record in records}
    assert len(by_line) == len(records)
    return by_line


def test_answers_are_those_of_one_prompt_at_a_time(ask, bundle):
    prompts: list[Any] = ["abc", "b", [{"role": "user", "content": "c"}], [4, 5, 6], "eabde"]
    code, found, err = ask([{"prompt": prompt, "id": f"p{number}"} for number, prompt in enumerate(prompts)])
    assert code == 0
    with load_toy(bundle) as model:
        for number, prompt in enumerate(prompts):
            reply, answer = model.generate(prompt, max_new_tokens=8), found[number + 1]
            assert (answer["id"], answer["text"]) == (f"p{number}", reply.text)
            assert (tuple(answer["token_ids"]), answer["finish_reason"]) == (reply.token_ids, reply.finish_reason)
            assert answer["usage"]["prompt_tokens"] == reply.stats.prompt_tokens
    assert err.startswith("5 answers, 40 tokens in ")


def test_options_of_a_line_override_those_of_the_command(ask, bundle):
    lines = [{"prompt": "abc"}, {"prompt": "abc", "max_new_tokens": 3}, {"prompt": "abc", "temperature": 0.0}]
    code, found, _ = ask([*lines, {"prompt": "abc", "logit_bias": {"6": 100}}], "--temperature", 1.0, "--seed", 3)
    assert code == 0
    with load_toy(bundle) as model:
        drawn = model.generate("abc", max_new_tokens=8, temperature=1.0, seed=3)
        assert tuple(found[1]["token_ids"]) == drawn.token_ids
        assert tuple(found[2]["token_ids"]) == drawn.token_ids[:3]
        assert tuple(found[3]["token_ids"]) == model.generate("abc", max_new_tokens=8, temperature=0.0).token_ids
    assert found[4]["token_ids"] == [6] * 8


def test_chat_makes_a_text_a_message(ask):
    _, found, _ = ask([{"prompt": "abc"}, {"messages": [{"role": "user", "content": "abc"}]}], "--chat")
    assert found[1]["token_ids"] == found[2]["token_ids"]


def test_a_bad_line_is_an_error_and_the_others_are_answered(ask):
    lines = [
        b"\xff\n",
        b"{\n",
        b"[" * 100_000 + b"\n",
        {"id": "first", "prompt": "abc"},
        b"  \n",
        {"id": "first", "prompt": "abc"},
        {"id": 7},
        {"prompt": "abc", "messages": []},
        {"prompt": ""},
        {"prompt": "a" * 500},
        {"prompt": [99]},
        {"prompt": "abc", "temprature": 0},
        {"prompt": "abc", "temperature": "hot"},
        {"prompt": "abc", "drafter": "/etc"},
        {"prompt": "abc", "id": {}},
        {"prompt": "last"},
    ]
    code, found, err = ask(lines)
    complaints = {
        1: "not valid JSON",
        2: "not valid JSON",
        3: "not valid JSON",
        6: "line 4 has the id 'first' already",
        7: "one of prompt and messages",
        8: "one of prompt and messages",
        9: "empty",
        10: "context",
        11: "out of range",
        12: "unknown option 'temprature'",
        13: "temperature",
        14: "drafter cannot be set by a line",
        15: "an id must be",
    }
    assert code == 1
    assert "2 answers, 13 errors, " in err
    assert {line for line, answer in found.items() if "error" in answer} == set(complaints)
    assert {line for line, answer in found.items() if "text" in answer} == {4, 16}
    for line, complaint in complaints.items():
        assert complaint in found[line]["error"]
    assert "13 of 15 lines in " in err


def test_openai_form(ask, bundle):
    chat: dict[str, Any] = {
        "model": "m",
        "messages": [{"role": "user", "content": "abc"}],
        "max_completion_tokens": 4,
        "seed": 1,
    }
    text = {"prompt": "abc", "max_tokens": 3, "n": 1, "stream": False}
    lines = [
        {"custom_id": "x", "method": "POST", "url": "/v1/chat/completions", "body": chat},
        {"custom_id": "y", "method": "POST", "url": "/v1/completions", "body": text},
        {"custom_id": "z", "method": "POST", "url": "/v1/embeddings", "body": {"input": "abc"}},
        {"custom_id": "v", "body": {**chat, "n": 2}},
        {"custom_id": "w", "body": None},
        {"custom_id": "u", "body": {**chat, "logit_bias": [[float("inf"), 1]]}},
    ]
    code, found, _ = ask(lines)
    assert code == 1
    assert [found[line]["custom_id"] for line in range(1, 7)] == ["x", "y", "z", "v", "w", "u"]
    assert "logit_bias must map token ids" in found[6]["error"]["message"]
    with load_toy(bundle) as model:
        reply = model.generate(chat["messages"], max_new_tokens=4, seed=1)
        [choice] = found[1]["response"]["body"]["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (reply.text, "length")
        [choice] = found[2]["response"]["body"]["choices"]
        assert choice["text"] == model.generate("abc", max_new_tokens=3).text
    assert [found[line]["response"]["body"]["model"] for line in (1, 2)] == ["toy-model"] * 2  # OpenAI's types need it
    assert found[2]["response"]["body"]["usage"] == {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7}
    for line, complaint in {3: "url must be", 4: "body.n cannot be 2", 5: "body must be"}.items():
        assert complaint in found[line]["error"]["message"]
        assert found[line]["response"] is None


LINES = [{"prompt": "abcde"[: 1 + number % 5], "seed": number, "temperature": 1.0} for number in range(8)]


def test_a_file_that_is_cut_off_anywhere_is_continued(ask, tmp_path):
    _, whole, _ = ask(LINES)
    path = tmp_path / "answers.jsonl"
    content = path.read_bytes()
    ends = [0, *(at + 1 for at, byte in enumerate(content) if byte == ord("\n"))]
    for end in {1, 5, 12, ends[1], ends[3] - 1, ends[3] + 4, ends[7] + 60, len(content) - 1, len(content)}:
        path.write_bytes(content[:end])
        kept = sum(at <= end for at in ends[1:])
        code, found, err = ask(LINES)
        assert (code, found) == (0, whole)
        assert (f"{kept} of 8 are answered already" in err) == bool(kept)


def test_answers_to_lines_that_are_gone_do_not_count(ask):
    _, whole, _ = ask(LINES[:2])
    code, found, err = ask(LINES[:1])
    assert (code, found) == (0, whole)
    assert err == "1 of 1 are answered already\n"


def test_zero_bytes_of_a_power_cut_are_removed(ask, tmp_path):
    _, whole, _ = ask(LINES)
    with (tmp_path / "answers.jsonl").open("ab") as file:
        file.write(bytes(100))
    assert ask(LINES)[1] == whole


def test_added_prompts_are_answered(ask):
    ask(LINES[:5])
    assert sorted(ask(LINES)[1]) == list(range(1, 9))


@pytest.mark.parametrize("change", ["prompt", "option", "seed"])
def test_answers_to_changed_questions_are_an_error(ask, change):
    _, before, _ = ask(LINES)
    lines = [dict(line) for line in LINES]
    if change != "option":
        lines[5][change] = "e" if change == "prompt" else 99
    code, found, err = ask(lines, *(["--top-k", 3] if change == "option" else []))
    assert (code, found) == (2, before)
    assert f"line {1 if change == 'option' else 6} asks" in err


def test_another_drafter_changes_no_question(ask):
    _, before, _ = ask(LINES)
    assert ask(LINES, "--drafter", "none")[:2] == (0, before)


def test_a_deleted_error_is_answered_again(ask, tmp_path):
    ask([{"prompt": "abc"}, b"no\n"])
    path = tmp_path / "answers.jsonl"
    path.write_text("".join(line for line in path.read_text().splitlines(True) if '"error"' not in line))
    code, found, _ = ask([{"prompt": "abc"}, {"prompt": "a"}])
    assert code == 0
    assert found[2]["text"]


@pytest.mark.parametrize(
    "content",
    [
        "what\n",
        "precious",
        '{"line": 1}\n',
        '{"a": 1}\n',
        "[]\n",
        '{"line": [1], "asked": "a"}\n',
        '{"line": 1, "asked": null}\n',
    ],
)
def test_a_file_of_another_program_is_not_changed(run, bundle, tmp_path, content):
    path, prompts = tmp_path / "answers.jsonl", tmp_path / "prompts.jsonl"
    path.write_text(content)
    prompts.write_bytes(to_line({"prompt": "abc"}))
    code, _, err = run("batch", bundle, prompts, "--out", path)
    assert (code, err.count("\n")) == (2, 1)
    assert "line 1 was not written by" in err
    assert path.read_text() == content


@pytest.mark.skipif(os.name == "nt", reason="Windows has no named pipes in a directory")
def test_a_pipe_of_answers_is_only_written(run, bundle, tmp_path):
    """Reading it, as a file is read to be continued, would not end for a device such as /dev/full."""
    path, prompts = tmp_path / "answers", tmp_path / "prompts.jsonl"
    prompts.write_bytes(to_line({"prompt": "abc"}) + to_line({"prompt": "abcd"}))
    os.mkfifo(path)
    found = []
    reader = threading.Thread(target=lambda: found.append(path.read_bytes()))
    reader.start()
    code, _, err = run("batch", bundle, prompts, "--out", path, "--max-new-tokens", 4)
    if reader.is_alive() and code:
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
    reader.join()
    assert code == 0, err
    assert {json.loads(line)["line"] for line in found[0].splitlines()} == {1, 2}


@pytest.mark.skipif(os.name == "nt", reason="Windows has no named pipes in a directory")
@pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full")
def test_a_full_disk_is_one_line_that_names_the_answers(run, bundle, tmp_path):
    (tmp_path / "prompts.jsonl").write_bytes(to_line({"prompt": "a"}))
    code, out, err = run("batch", bundle, tmp_path / "prompts.jsonl", "--out", "/dev/full", "-n", 2)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1] == "ondevice: /dev/full: no space left on device"


def test_a_device_of_prompts_is_refused(run, bundle, tmp_path):
    """The file is read twice, and a device such as /dev/zero has no end."""
    code, _, err = run("batch", bundle, "/dev/zero", "--out", tmp_path / "answers.jsonl")
    assert (code, err.count("\n")) == (2, 1)
    assert "/dev/zero is not a regular file" in err


def test_the_prompts_are_never_written_to(run, bundle, tmp_path):
    prompts = tmp_path / "p.jsonl"
    prompts.write_bytes(to_line({"prompt": "abc"}))
    code, _, err = run("batch", bundle, prompts, "--out", prompts)
    assert (code, err.count("\n")) == (2, 1)
    assert prompts.read_bytes() == to_line({"prompt": "abc"})


def test_standard_output_is_no_file_named_minus(run, bundle, tmp_path, monkeypatch):
    prompts = tmp_path / "p.jsonl"
    prompts.write_bytes(to_line({"prompt": "abc"}))
    monkeypatch.chdir(tmp_path)
    code, _, err = run("batch", bundle, prompts, "--out", "-")
    assert (code, err.count("\n")) == (2, 1)
    assert "--out - is not a file" in err
    assert not (tmp_path / "-").exists()


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such lock")
def test_one_process_writes_at_a_time(ask, tmp_path):
    import fcntl

    with (tmp_path / "answers.jsonl").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        code, found, err = ask(LINES)
    assert (code, found) == (2, {})
    assert "another process writes" in err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--temperature", -1], "temperature"),
        (["--drafter", "none", "--num-assistant-tokens", 3], "num_assistant_tokens"),
    ],
)
def test_an_invalid_option_of_the_command_is_one_error(ask, words, complaint):
    code, found, err = ask(LINES, *words)
    assert (code, found) == (2, {})
    assert complaint in err


def test_a_failure_of_the_machine_ends_it_and_keeps_the_answers(ask, monkeypatch):
    from ondevice.model import Model

    real, calls = Model.stream, []

    def stream(self, prompt, **options):
        calls.append(prompt)
        if len(calls) == 5:
            raise MemoryError
        return real(self, prompt, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Model, "stream", stream)
        code, found, err = ask(LINES, "--max-sequences", 1)
        assert (code, len(found)) == (2, 4)
        assert "not enough memory" in err
    assert len(ask(LINES)[1]) == 8


def test_ctrl_c_keeps_the_answers(ask, monkeypatch):
    from ondevice.cli.batch.answers import AnswerFile

    real = AnswerFile.write

    def write(self, answer):
        real(self, answer)
        if len(self) == 3:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(AnswerFile, "write", write)
        code, found, err = ask([{**line, "max_new_tokens": 100} for line in LINES], "--max-sequences", 1)
    assert code == 130
    assert 3 <= len(found) < 8
    assert "run the same command again" in err
    assert len(ask([{**line, "max_new_tokens": 100} for line in LINES])[1]) == 8


def test_a_cancellation_before_anything_began(bundle):
    """The next request must not run to its end."""
    with load_toy(bundle) as model:
        threads = ModelThreads(model, 2)
        threads.cancel()
        assert list(threads.answers([])) == []
    assert not [thread for thread in threading.enumerate() if thread.name == "ondevice-batch"]


def test_the_bar_shows_answers_tokens_and_time(monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE_S", 0.0)
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    with BatchBar(4) as bar:
        bar._options.update(mininterval=0.0, delay=0.0)
        bar.count(0, 10)
        bar.count(1, 20)
        bar.count(0, 5)
    assert (bar.answers, bar.tokens) == (1, 35)
    assert "batch: 1/4" in shown.getvalue()
    assert re.search(r"\d\d:\d\d left, \d+\.\d tokens/s", shown.getvalue())


@pytest.mark.skipif(os.name == "nt", reason="has no SIGKILL")
def test_after_kills_every_prompt_is_answered_once(reference_bundle, tmp_path):
    chance = random.Random(5)
    prompts = [f"def {name}{number}(" for number in range(12) for name in ("read", "first", "is_even", "join")]
    lines: list[dict[str, Any]] = [
        {"prompt": prompt, "max_new_tokens": 40 + 5 * (at % 9)} for at, prompt in enumerate(prompts)
    ]
    (tmp_path / "p.jsonl").write_bytes(b"".join(map(to_line, lines)))
    out = tmp_path / "a.jsonl"
    words = [sys.executable, "-m", "ondevice", "batch", reference_bundle, tmp_path / "p.jsonl", "--out", out]
    words += ["--temperature", "0", "--threads", "1"]
    kills = 0
    while True:
        process = subprocess.Popen(words, stderr=subprocess.PIPE, cwd=ROOT)
        size = out.stat().st_size if out.exists() else 0
        while process.poll() is None and not (out.exists() and out.stat().st_size > size):
            time.sleep(0.002)
        time.sleep(chance.uniform(0, 0.03))
        if kills < 3:
            process.send_signal(signal.SIGKILL)
            kills += process.wait() == -signal.SIGKILL
        _, err = process.communicate()
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, err
    assert kills
    found = answers_in(out)
    assert sorted(found) == list(range(1, len(lines) + 1))
    with ondevice.load(reference_bundle, threads=1) as model:
        for number, line in enumerate(lines, 1):
            alone = model.generate(line["prompt"], max_new_tokens=line["max_new_tokens"], temperature=0.0)
            assert tuple(found[number]["token_ids"]) == alone.token_ids
