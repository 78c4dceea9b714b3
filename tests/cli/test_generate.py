"""`ondevice generate`: prompts, output, options, --compare, Ctrl-C, and replies of a given form."""

import json
import os
import re
import signal
import sys
import threading
import time
from typing import Any

import pytest

from ondevice.cli.generate import STATS_KEYS
from ondevice.cli.main import main
from ondevice.cli.options import unescape
from tests.conftest import ROOT
from tests.fixtures.model_made import load_toy, write_bundle

SCHEMA = {"type": "object", "properties": {"a": {"enum": ["b", "c"]}}, "required": ["a"], "additionalProperties": False}


def answer(bundle, prompt="abc", **options):
    with load_toy(bundle) as model:
        return model.generate(prompt, **{"max_new_tokens": 12, **options})


def test_the_text_goes_to_stdout_and_the_summary_to_stderr(run, bundle):
    code, out, err = run("generate", bundle, "abc", "--max-new-tokens", 12)
    assert code == 0
    assert out.removesuffix("\n") == answer(bundle).text.removesuffix("\n")
    cut, summary = err.splitlines()
    assert cut == "(cut at --max-new-tokens)"
    assert summary.startswith("12 tokens, ")
    for word in ("tokens/s", "tokens per round", "drafted tokens accepted (ngram)"):
        assert word in err


def test_json_is_one_object_of_the_documented_shape(run, bundle):
    code, out, err = run("generate", bundle, "abc", "--max-new-tokens", 12, "--json")
    assert (code, err) == (0, "")
    data = json.loads(out)
    expected = answer(bundle)
    assert list(data) == ["text", "reasoning", "tool_calls", "token_ids", "finish_reason", "stats", "timings"]
    assert (data["text"], tuple(data["token_ids"]), data["finish_reason"]) == (
        expected.text,
        expected.token_ids,
        "length",
    )
    assert tuple(data["stats"])[: len(STATS_KEYS)] == STATS_KEYS
    assert data["stats"]["engine"] == "toy"
    assert data["stats"].keys() >= {"num_drafts", "num_draft_tokens", "num_accepted_tokens_per_pos", "by_source"}
    assert data["timings"]["draft_n"] == data["stats"]["num_draft_tokens"] == data["stats"]["drafted"]
    assert (data["timings"]["prompt_n"], data["timings"]["predicted_n"]) == (data["stats"]["prompt_tokens"], 12)


@pytest.mark.parametrize("place", ["argument", "after an option", "stdin", "file"])
def test_sources_of_the_prompt(run, bundle, tmp_path, place):
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"\xef\xbb\xbfab\n")
    words = {
        "argument": ["ab\n"],
        "after an option": ["--seed", "1", "ab\n"],
        "stdin": ["-"],
        "file": ["--file", file],
    }[place]
    _, out, _ = run("generate", bundle, *words, "--max-new-tokens", 12, "--json", stdin="ab\n")
    assert tuple(json.loads(out)["token_ids"]) == answer(bundle, "ab\n").token_ids


def test_token_ids_and_a_bundle_without_tokenizer(run, tmp_path):
    bundle = write_bundle(tmp_path / "bare", tokenizer=False, template=False)
    code, out, _ = run("generate", bundle, "--ids", "0,5, 6", "--max-new-tokens", 5)
    assert code == 0
    assert out == ",".join(map(str, answer(bundle, [0, 5, 6], max_new_tokens=5).token_ids)) + "\n"
    code, _, err = run("generate", bundle, "abc")
    assert code == 2
    assert "--ids" in err


def test_chat_makes_a_user_message(run, bundle):
    _, out, _ = run("generate", bundle, "ab", "--chat", "--max-new-tokens", 12, "--json")
    message = [{"role": "user", "content": "ab"}]
    assert tuple(json.loads(out)["token_ids"]) == answer(bundle, message).token_ids


def test_options_reach_the_model(run, bundle):
    words = ["--temperature", "0.7", "--top-k", "5", "--top-p", "0.9", "--min-p", "0.01", "--repetition-penalty", "1.1"]
    _, out, _ = run("generate", bundle, "ab", *words, "--seed", 7, "--stop", "a", "--stop", r"\n", "--json")
    options = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1, "seed": 7}
    assert json.loads(out)["text"] == answer(bundle, "ab", **options, stop=("a", "\n"), max_new_tokens=256).text


def test_compare_prints_the_speed_up_and_that_the_tokens_are_equal(run, bundle):
    code, _, err = run("generate", bundle, "ab", "--max-new-tokens", 20, "--num-assistant-tokens", 2, "--compare")
    assert code == 0
    assert "as fast; all 20 tokens equal" in err
    code, out, _ = run("generate", bundle, "ab", "--temperature", 1, "--compare", "--json")
    assert code == 0
    assert json.loads(out)["comparison"]["equal"] is True


def test_compare_names_no_speed_where_nothing_was_decoded(run, bundle):
    code, _, err = run("generate", bundle, "ab", "-n", 1, "--compare")
    assert code == 0
    assert "x as fast" not in err
    assert "all 1 tokens equal" in err


def test_watch_drafts_keeps_the_text_and_adds_a_legend(run, bundle):
    words = ["generate", bundle, "abc abc abc", "-n", 40, "--num-assistant-tokens-schedule", "constant"]
    _, text, _ = run(*words)
    code, out, err = run(*words, "--watch-drafts")
    assert (code, out) == (0, text)
    legend, _, summary = err.splitlines()
    found = re.fullmatch(r"tokens: (\d+) accepted, (\d+) corrected, (\d+) plain; (\d\.\d\d) tokens per round", legend)
    assert found
    assert sum(map(int, found.groups()[:3])) == 40
    assert int(found[1]) > 0
    assert f"{found[4]} tokens per round" in summary


def test_lines_fit_a_narrow_terminal(run, bundle, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    _, _, err = run("generate", bundle, "abc", "-n", 12, "--watch-drafts", "--compare")
    assert max(map(len, err.splitlines())) <= 40
    assert "tokens per round" in err.replace("\n", " ")


@pytest.mark.parametrize("form", ["--json", "--json-lines"])
def test_watch_drafts_is_for_text(run, bundle, form):
    code, out, err = run("generate", bundle, "ab", "--watch-drafts", form)
    assert (code, out) == (2, "")
    assert "--watch-drafts shows text" in err


def test_compare_fails_where_the_tokens_differ(run, bundle, monkeypatch):
    monkeypatch.setattr("ondevice.cli.generate.plain_options", lambda options: {**options, "temperature": 5.0})
    code, _, err = run("generate", bundle, "ab", "--compare")
    assert code == 1
    assert "THE TOKENS DIFFER from number" in err


@pytest.mark.parametrize(
    ("words", "stdin", "complaint"),
    [
        ([], None, "no prompt"),
        (["ab", "--ids", "3"], None, "more than one prompt"),
        (["--ids", "3", "--chat"], None, "--chat is for text"),
        (["--ids", "3,x"], None, "not '3,x'"),
        (["--ids", "99"], None, "out of range"),
        (["--ids", ""], None, "the prompt is empty"),
        (["-"], b"ab\xff", "standard input is not UTF-8 text (byte 2)"),
        (["-"], "", "the prompt is empty"),
        (["--file", "missing.txt"], None, "cannot read missing.txt: No such file"),
        (["a" * 500], None, "prompt is too long: 501 tokens"),
        (["ab", "--top-p", "7"], None, "top_p"),
        (["ab", "--max-new-tokens", "-1"], None, "max_new_tokens"),
        (["ab", "--stop", ""], None, "non-empty"),
        (["ab", "--drafter", "mtp"], None, "no MTP drafter"),
    ],
)
def test_a_mistake_is_one_line(run, bundle, words, stdin, complaint):
    code, out, err = run("generate", bundle, *words, stdin=stdin)
    assert (code, out) == (2, "")
    assert complaint in err
    assert err.count("\n") == 1


def test_ctrl_c_keeps_the_printed_text(run, bundle, monkeypatch):
    kept = answer(bundle, max_new_tokens=6).text
    interrupt_after(monkeypatch, 5)
    code, out, err = run("generate", bundle, "abc", "--max-new-tokens", 300, "--drafter", "none")
    assert code == 130
    assert out == kept.removesuffix("\n") + "\n"
    assert err.startswith("(stopped)\n6 tokens")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_still_prints_the_json(run, bundle, monkeypatch):
    interrupt_after(monkeypatch, 5)
    code, out, _ = run("generate", bundle, "abc", "--max-new-tokens", 300, "--drafter", "none", "--json")
    assert code == 130
    assert json.loads(out)["finish_reason"] == "cancelled"


def test_ctrl_c_during_the_comparison_keeps_the_reply(run, bundle, monkeypatch):
    words = ["generate", bundle, "abc", "--max-new-tokens", 100, "--drafter", "none", "--compare"]
    _, whole, _ = run(*words)
    interrupt_after(monkeypatch, 8 + 8 + 100 + 50)  # two warm-ups, the reply, part of the second run
    code, out, err = run(*words)
    assert (code, out) == (130, whole)
    assert err.startswith("(cut at --max-new-tokens)\n100 tokens")
    assert "equal" not in err


def test_a_chat_runs_to_the_end_of_the_context(run, bundle):
    """The toy's replies do not end by themselves. Without a chat, the default is 256 tokens."""
    code, _, err = run("generate", bundle, "ab", "--chat", "--temperature", 0)
    assert code == 0
    assert err.startswith("(the context is full)\n")
    with load_toy(bundle) as model:
        room = model.context_length - len(model.encode([{"role": "user", "content": "ab"}]))
    assert int(err.splitlines()[1].split()[0]) >= room
    assert json.loads(run("generate", bundle, "ab", "--json")[1])["stats"]["new_tokens"] == 256


def test_an_empty_system_message_makes_a_chat(run, bundle, prompts):
    assert run("generate", bundle, "ab", "--system", "", "-n", 2)[0] == 0
    assert prompts == [[{"role": "user", "content": "ab"}]]


def test_unescape():
    assert unescape(r"a\n\t\\n\x") == "a\n\t\\n\\x"


def interrupt_after(monkeypatch, forwards):
    """Send this process a Ctrl-C during the forward of this number."""
    from tests.fixtures.toy_engine import ToyEngine

    real = ToyEngine.forward

    def forward(self, batch):
        if self.forwards == forwards:
            os.kill(os.getpid(), signal.SIGINT)
        return real(self, batch)

    monkeypatch.setattr(ToyEngine, "forward", forward)


def test_chat_options_make_the_prompt_a_message(run, bundle, tmp_path):
    tools = tmp_path / "tools.json"
    tools.write_text('[{"type": "function", "function": {"name": "f"}}]')
    message = [{"role": "user", "content": "ab"}]
    for words, messages in (
        (["--system", "cd"], [{"role": "system", "content": "cd"}, *message]),
        (["--thinking"], message),
        (["--effort", "low"], message),
        (["--tools", tools], message),
    ):
        _, out, _ = run("generate", bundle, "ab", *words, "--max-new-tokens", 12, "--json")
        assert tuple(json.loads(out)["token_ids"]) == answer(bundle, messages).token_ids


@pytest.mark.parametrize("content", ["{", "{}", "[1]"])
def test_tools_that_are_not_a_list_of_functions(run, bundle, tmp_path, content):
    (tmp_path / "tools.json").write_text(content)
    code, out, err = run("generate", bundle, "ab", "--tools", tmp_path / "tools.json")
    assert (code, out, err.count("\n")) == (2, "", 1)


def test_short_names(run, bundle):
    _, out, _ = run("generate", bundle, "ab", "-n", 5, "--temp", 0.5, "-t", 1, "-c", 100, "--seed", 3, "--json")
    assert json.loads(out)["text"] == answer(bundle, "ab", max_new_tokens=5, temperature=0.5, seed=3).text


def test_json_lines_are_the_steps_and_then_the_reply(run, bundle):
    code, out, err = run("generate", bundle, "abc", "-n", 12, "--json-lines", "--top-logprobs", 2)
    assert (code, err) == (0, "")
    *steps, last = map(json.loads, out.splitlines())
    assert "".join(step["text"] for step in steps) == last["text"]
    assert [token for step in steps for token in step["token_ids"]] == last["token_ids"]
    assert "stats" in last
    assert [each["token_id"] for each in last["logprobs"]] == last["token_ids"]
    assert all(len(each["top"]) == 2 for each in last["logprobs"])


@pytest.mark.parametrize(
    ("piped", "prompt"), [("a\nb\n", "a\nb\n\ncd"), ("", "cd"), (None, "cd")], ids=["text", "nothing", "closed"]
)
def test_piped_text_comes_before_the_prompt(run, bundle, monkeypatch, piped, prompt):
    _, expected, _ = run("generate", bundle, prompt, "-n", 8, "--json")
    reading, writing = os.pipe()
    with os.fdopen(reading) as standard_input:
        os.write(writing, (piped or "").encode())
        os.close(writing)
        monkeypatch.setattr(sys, "stdin", None if piped is None else standard_input)
        _, out, _ = run("generate", bundle, "cd", "-n", 8, "--json")
    assert json.loads(out)["token_ids"] == json.loads(expected)["token_ids"]


@pytest.mark.skipif(os.name == "nt", reason="needs select on a pipe")
def test_a_line_explains_the_wait_for_an_open_pipe(run, bundle, monkeypatch):
    monkeypatch.setattr("ondevice.cli.prompts.PATIENCE_S", 0.0)
    reading, writing = os.pipe()
    written: Any = sys.stderr  # pytest's

    def close():
        ends = time.monotonic() + 300
        while "waiting for" not in written.getvalue() and time.monotonic() < ends:
            time.sleep(0.01)
        os.close(writing)

    closing = threading.Thread(target=close)
    closing.start()
    with os.fdopen(reading) as standard_input:
        monkeypatch.setattr(sys, "stdin", standard_input)
        code, _, err = run("generate", bundle, "cd", "-n", 8)
    closing.join()
    assert code == 0
    assert err.startswith("ondevice: waiting for the end of standard input (use < /dev/null")


@pytest.fixture
def generate_reference(capsys, reference_bundle):
    """Run the command on the reference pair: the toy bundle has a tokenizer that no grammar can use."""

    def call(*words):
        code = main(["generate", str(reference_bundle), "x = ", "--max-new-tokens", "40", "--threads", "1", *words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.mark.needs("llguidance")
@pytest.mark.parametrize(
    ("words", "texts"),
    [
        (["--json-schema", "schema.json"], ['{"a": "b"}', '{"a": "c"}']),
        (["--regex", "ab|cd"], ["ab", "cd"]),
        (["--choice", "yes, sir", "--choice", "no"], ["yes, sir", "no"]),
        (["--lark", "form.lark"], ["c", "d"]),
    ],
    ids=lambda value: value[0],
)
def test_the_reply_has_the_form(generate_reference, tmp_path, monkeypatch, words, texts):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    (tmp_path / "form.lark").write_text('start: "c" | "d"')
    code, out, _ = generate_reference(*words)
    assert code == 0
    assert out.removesuffix("\n") in texts


@pytest.mark.needs("llguidance")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--json-schema", "gone.json"], "gone.json"),
        (["--json-schema", str(ROOT / "README.md")], "is not valid JSON"),
        (["--regex", "("], "this grammar cannot be compiled: "),
        (["--json-object", "--regex", "a"], "not allowed with"),
        (["--tool-choice", "auto"], "tool_choice='auto' needs tools"),
        (["--tool-choice", "clock"], "names the function 'clock', and these are declared: none"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_a_mistake_in_the_form_is_one_line(generate_reference, words, said):
    code, out, err = generate_reference(*words)
    assert (code, out) == (2, "")
    assert said in err.strip().splitlines()[-1]
