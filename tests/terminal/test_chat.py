import builtins
import os
import re
import signal
import sys

import pytest

from ondevice.decoding.record import Stats
from ondevice.reply import Reply
from ondevice.terminal.conversation import Conversation
from tests.model_made import load_toy, write_bundle
from tests.terminal.test_generate import interrupt_after

OPTIONS = ["--max-new-tokens", "6", "--drafter", "none"]


@pytest.fixture
def typed(monkeypatch, tmp_path):
    """Pretend that a person types these lines; an exception is raised instead, and the end is Ctrl-D."""

    def start(lines):
        rest = iter(lines)

        def type_one(prompt=""):
            line = next(rest, EOFError())
            if isinstance(line, BaseException):
                raise line
            return line

        monkeypatch.setattr(builtins, "input", type_one)
        monkeypatch.setenv("ONDEVICE_HOME", str(tmp_path / "home"))
        monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)

    return start


def test_every_piped_line_is_a_message_and_the_history_grows(run, bundle, prompts):
    code, out, err = run("chat", bundle, "--system", "be brief", *OPTIONS, stdin="ab\n\ncd\r\n")
    assert code == 0
    assert ">" not in out
    assert err.count("(cut at --max-new-tokens)") == 2
    roles = [[message["role"] for message in asked] for asked in prompts]
    assert roles == [["system", "user"], ["system", "user", "assistant", "user"]]
    assert [message["content"] for message in prompts[1]][:2] == ["be brief", "ab"]
    assert prompts[1][3]["content"] == "cd"
    said = re.sub(r"<[a-z|]+>", "", prompts[1][2]["content"])
    assert said
    assert out.startswith(said)


def test_control_tokens_inside_a_reply_stay_in_the_history(bundle):
    """The template can drop a thought only where it sees the thought's marks; the end of the turn it writes itself."""
    with load_toy(bundle) as model:
        conversation = Conversation(model, {})
        reply = Reply("thoughtanswer", (2, 4, 5, 2, 6, 3), "stop", Stats())
        assert conversation._as_said(reply) == "<|turn>ab<|turn>c"
        assert conversation._as_said(Reply("abc", (4, 5, 6, 3), "stop", Stats())) == "abc"


def test_commands(run, bundle, prompts, toy):
    code, _, err = run("chat", bundle, *OPTIONS, stdin="/stats\na\n/stats\n/clear\nb\n/help\n/what now\n/exit\nc\n")
    assert code == 0
    assert "no reply yet" in err
    assert "6 tokens, " in err
    assert "/clear" in err
    assert "no command /what: /help" in err
    assert [[message["content"] for message in asked] for asked in prompts] == [["a"], ["b"]]


def test_another_reply_takes_the_place_of_the_last(run, bundle, prompts):
    code, out, err = run("chat", bundle, *OPTIONS, stdin="/regenerate\nab\ncd\n/regenerate\nef\n")
    assert code == 0
    assert "no message yet" in err
    asked = [[message["content"] for message in prompt if message["role"] == "user"] for prompt in prompts]
    assert asked == [["ab"], ["ab", "cd"], ["ab", "cd"], ["ab", "cd", "ef"]]
    assert [message["role"] for message in prompts[3]] == ["user", "assistant"] * 2 + ["user"]
    assert len(out.splitlines()) >= 4


@pytest.mark.parametrize("word", ["/exit", "/quit", "/bye"])
def test_words_to_leave_with(run, bundle, prompts, word):
    assert run("chat", bundle, *OPTIONS, stdin=f"a\n{word}\nb\n")[0] == 0
    assert len(prompts) == 1


@pytest.mark.parametrize(
    ("typed", "messages"),
    [
        ('"""a\nb\n\n/exit\n"""\ncd\n', ["a\nb\n\n/exit", "cd"]),
        ('"""\na\n  b"""\n', ["a\n  b"]),
        ('"""ab"""\n', ["ab"]),
        ('"""\nab\n', ["ab"]),
    ],
)
def test_a_message_of_several_lines(run, bundle, prompts, typed, messages):
    assert run("chat", bundle, *OPTIONS, stdin=typed)[0] == 0
    assert [prompt[-1]["content"] for prompt in prompts] == messages


def test_ctrl_c_stops_the_reply_and_keeps_the_session(run, bundle, prompts, monkeypatch):
    interrupt_after(monkeypatch, 3)
    code, _, err = run("chat", bundle, "--max-new-tokens", "100", "--drafter", "none", stdin="ab\ncd\n")
    assert code == 0
    assert err.startswith("(stopped)\n")
    kept = prompts[1][1]
    assert kept["role"] == "assistant"
    assert 0 < len(kept["content"]) <= 40


def test_a_message_that_does_not_fit_leaves_the_conversation_as_it_was(run, bundle, prompts):
    code, _, err = run("chat", bundle, *OPTIONS, "--context-length", "60", stdin=f"ab\n{'a' * 90}\ncd\n")
    assert code == 0
    assert "the context holds 60" in err
    assert "/drop forgets the oldest question" in err
    assert [message["content"] for message in prompts[2]][::2] == ["ab", "cd"]


def test_at_a_terminal(run, bundle, prompts, typed):
    typed(["ab", KeyboardInterrupt(), "cd", ""])
    code, out, err = run("chat", bundle, *OPTIONS)
    assert code == 0
    assert err.startswith("toy-model: /help")
    assert "(Ctrl-D leaves)" in err
    assert len(prompts) == 2
    assert out.endswith("\n")


@pytest.mark.parametrize(("stdin", "complaint"), [(b"\xff\n", "not UTF-8"), ("", "")])
def test_what_is_piped_must_be_text(run, bundle, stdin, complaint):
    code, _, err = run("chat", bundle, stdin=stdin)
    assert code == (2 if complaint else 0)
    assert complaint in err


@pytest.mark.parametrize(("tokenizer", "complaint"), [(True, "no chat_template"), (False, "no tokenizer")])
def test_a_bundle_that_cannot_chat_says_so_at_once(run, tmp_path, tokenizer, complaint):
    bundle = write_bundle(tmp_path / "bare", tokenizer=tokenizer, template=False)
    code, _, err = run("chat", bundle, stdin="hello\n")
    assert code == 2
    assert complaint in err


def test_ctrl_c_between_piped_lines_leaves(run, bundle, monkeypatch):
    from ondevice.terminal import lines as chat_lines

    def lines():
        os.kill(os.getpid(), signal.SIGINT)
        yield "never"

    monkeypatch.setattr(chat_lines, "piped", lines)
    assert run("chat", bundle, stdin="")[0] == 130
