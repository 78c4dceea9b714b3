"""`ondevice chat`: piped and typed messages, the history, and the lines that begin with a slash."""

import builtins
import json
import os
import re
import signal
import sys

import pytest

import ondevice
from ondevice.cli import chat
from ondevice.cli.chat import Conversation, completions, run_command
from ondevice.cli.terminal.reply_view import MarkdownView
from ondevice.generate.stats import Stats
from ondevice.generation import Reply
from ondevice.model import Model
from tests.cli.test_generate import interrupt_after
from tests.fixtures.chat_bundle import HARMONY, Script, write_chat_bundle
from tests.fixtures.model_made import load_toy, write_bundle

OPTIONS = ["--max-new-tokens", "6", "--drafter", "none"]
REPLY = Reply("c", (6,), "length", Stats())
SHORT = ["--max-new-tokens", "4", "--drafter", "none"]


@pytest.fixture
def typed(monkeypatch, tmp_path):
    """Let `input` return these lines, raise those that are exceptions, and end with Ctrl-D."""

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
    """The template removes thoughts by their control tokens, and writes the end of the turn itself."""
    with load_toy(bundle) as model:
        conversation = Conversation(model, {})
        reply = Reply("thoughtanswer", (2, 4, 5, 2, 6, 3), "stop", Stats())
        assert conversation._as_message(reply)["content"] == "<|turn>ab<|turn>c"
        assert conversation._as_message(Reply("abc", (4, 5, 6, 3), "stop", Stats()))["content"] == "abc"


def test_stats_clear_help_and_exit(run, bundle, prompts, toy):
    code, _, err = run("chat", bundle, *OPTIONS, stdin="/stats\na\n/stats\n/clear\nb\n/help\n/what now\n/exit\nc\n")
    assert code == 0
    assert "no reply yet" in err
    assert "6 tokens, " in err
    assert "/clear" in err
    assert "unknown command /what: /help" in err
    assert [[message["content"] for message in asked] for asked in prompts] == [["a"], ["b"]]


def test_regenerate_replaces_the_last_reply(run, bundle, prompts):
    code, out, err = run("chat", bundle, *OPTIONS, stdin="/regenerate\nab\ncd\n/regenerate\nef\n")
    assert code == 0
    assert "there is no message to answer again" in err
    asked = [[message["content"] for message in prompt if message["role"] == "user"] for prompt in prompts]
    assert asked == [["ab"], ["ab", "cd"], ["ab", "cd"], ["ab", "cd", "ef"]]
    assert [message["role"] for message in prompts[3]] == ["user", "assistant"] * 2 + ["user"]
    assert len(out.splitlines()) >= 4


@pytest.mark.parametrize("word", ["/exit", "/quit", "/bye"])
def test_every_exit_word_ends_the_chat(run, bundle, prompts, word):
    assert run("chat", bundle, *OPTIONS, stdin=f"a\n{word}\nb\n")[0] == 0
    assert len(prompts) == 1


@pytest.mark.parametrize(
    ("typed", "messages"),
    [
        ('"""a\nb\n\n/exit\n"""\ncd\n', ["a\nb\n\n/exit", "cd"]),
        ('"""\na\n  b"""\n', ["a\n  b"]),
        ('"""ab"""\n', ["ab"]),
        ('a\n"""\nab\n', ["a"]),
        ('"""/exit"""\n"""\n/tmp is what?\n"""\ncd\n', ["/exit", "/tmp is what?", "cd"]),
    ],
)
def test_quotes_make_one_message_of_several_lines(run, bundle, prompts, typed, messages):
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


@pytest.mark.needs("rich")
@pytest.mark.parametrize("words", [[], ["--plain"]])
def test_a_terminal_shows_formatted_replies_unless_plain_ones_are_asked_for(run, bundle, monkeypatch, words):
    asked = []
    monkeypatch.setattr(chat, "can_format", lambda: True)

    def reply(model, prompt, options, view):
        asked.append(view)
        return REPLY

    monkeypatch.setattr(chat, "stream_reply", reply)
    assert run("chat", bundle, *OPTIONS, *words, stdin="ab\n")[0] == 0
    assert [isinstance(view, MarkdownView) for view in asked] == [not words]


def test_a_pipe_gets_the_text_as_it_is(run, bundle):
    text = run("chat", bundle, *OPTIONS, "--seed", 1, stdin="ab\n")[1]
    assert run("chat", bundle, *OPTIONS, "--seed", 1, "--plain", stdin="ab\n")[1] == text


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("/sa", ["/save "]),
        ("/s", ["/system ", "/set ", "/save ", "/stats "]),
        ("/b", ["/bye "]),
        ("", []),
        ("hello", []),
        ("/save ", ["/save a.json", "/save dir/"]),
        ("/load a", ["/load a.json"]),
        ("/load dir/", ["/load dir/b.json"]),
        ("/load gone/", []),
        ("/set a", []),
    ],
)
def test_tab_completes_commands_and_files(monkeypatch, tmp_path, line, found):
    (tmp_path / "dir").mkdir()
    for name in ("a.json", "dir/b.json"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    begin = line[: line.rfind(" ") + 1]
    assert [f"{begin}{word}".rstrip() if begin else word for word in completions(line)] == found


def test_help_fits_a_narrow_terminal(run, bundle, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    _, _, err = run("chat", bundle, stdin="/help\n")
    assert "/clear" in err
    assert max(map(len, err.splitlines())) <= 40


def test_typed_lines_end_with_ctrl_d(run, bundle, prompts, typed):
    typed(["ab", KeyboardInterrupt(), "cd", ""])
    code, out, err = run("chat", bundle, *OPTIONS)
    assert code == 0
    assert err.startswith("toy-model: /help")
    assert "(Ctrl-D leaves)" in err
    assert len(prompts) == 2
    assert out.endswith("\n")


@pytest.mark.parametrize("is_typed", [True, False])
def test_ctrl_c_ends_a_command_and_not_what_is_typed(run, bundle, prompts, typed, monkeypatch, is_typed):
    def attach(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Conversation, "attach", attach)
    lines = ["/image photo.png", "ab"]
    if is_typed:
        typed(lines)
    code, _, err = run("chat", bundle, *OPTIONS, **({} if is_typed else {"stdin": "\n".join(lines)}))
    assert code == (0 if is_typed else 130)
    assert ("(stopped)" in err, len(prompts)) == (is_typed, is_typed)


def test_a_message_of_several_lines_has_a_prompt_of_its_own(run, bundle, prompts, monkeypatch, tmp_path):
    """And a reply stands between empty lines. Without colours, the prompts are plain."""
    lines, asked = iter(['"""ab', "cd", 'ef"""', "gh"]), []

    def type_one(prompt):
        asked.append(prompt)
        if (line := next(lines, None)) is None:
            raise EOFError
        return line

    monkeypatch.setattr(builtins, "input", type_one)
    monkeypatch.setenv("ONDEVICE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    code, _, err = run("chat", bundle, *OPTIONS)
    assert code == 0
    assert asked == ["> ", "... ", "... ", "> ", "> "]
    assert [prompt[-1]["content"] for prompt in prompts] == ["ab\ncd\nef", "gh"]
    assert err.splitlines()[1:] == ["", "(cut at --max-new-tokens)", ""] * 2


@pytest.mark.parametrize("end", [KeyboardInterrupt(), EOFError()])
def test_ctrl_c_and_ctrl_d_drop_a_message_of_several_lines(run, bundle, prompts, typed, end):
    typed(['"""', "abc", end, "d"])
    code, _, err = run("chat", bundle, *OPTIONS)
    assert code == 0
    assert '(not sent: the message does not end with """)' in err
    assert "(Ctrl-D leaves)" not in err
    assert [prompt[-1]["content"] for prompt in prompts] == (["d"] if isinstance(end, KeyboardInterrupt) else [])


@pytest.mark.parametrize(("stdin", "complaint"), [(b"\xff\n", "not UTF-8"), ("", "")])
def test_piped_input_must_be_utf_8(run, bundle, stdin, complaint):
    code, _, err = run("chat", bundle, stdin=stdin)
    assert code == (2 if complaint else 0)
    assert complaint in err


@pytest.mark.parametrize(("tokenizer", "complaint"), [(True, "no chat_template"), (False, "no tokenizer")])
def test_a_bundle_that_cannot_chat_fails_at_once(run, tmp_path, tokenizer, complaint):
    bundle = write_bundle(tmp_path / "bare", tokenizer=tokenizer, template=False)
    code, _, err = run("chat", bundle, stdin="hello\n")
    assert code == 2
    assert complaint in err


def test_ctrl_c_between_piped_lines_ends_the_chat(run, bundle, monkeypatch):
    def lines(file, name):
        os.kill(os.getpid(), signal.SIGINT)
        yield b"never"

    monkeypatch.setattr(chat, "read_lines", lines)
    assert run("chat", bundle, stdin="")[0] == 130


def contents(prompt):
    return [message["content"] for message in prompt if message["role"] != "assistant"]


def test_system_shows_and_replaces_the_system_message(run, bundle, prompts):
    lines = "/system\nab\n/system be brief\n/system\ncd\n/system none\ne\n"
    code, _, err = run("chat", bundle, *SHORT, stdin=lines)
    assert code == 0
    assert "no system message" in err
    assert "\nbe brief\n" in err
    assert [contents(prompt) for prompt in prompts] == [["ab"], ["be brief", "ab", "cd"], ["ab", "cd", "e"]]


def test_drop_forgets_the_oldest_turn(run, bundle, prompts):
    code, _, err = run("chat", bundle, "--system", "x", *SHORT, stdin="/drop\na\nb\n/drop\nc\n/drop\n/drop\nd\n")
    assert code == 0
    assert "there is no message to drop" in err
    assert [contents(prompt) for prompt in prompts] == [["x", "a"], ["x", "a", "b"], ["x", "b", "c"], ["x", "d"]]


def test_a_full_context_continues_after_drop(run, bundle, prompts):
    words = ["--context-length", "60", "--max-new-tokens", "20", "--drafter", "none"]
    code, _, err = run("chat", bundle, *words, stdin=f"{'a' * 20}\n{'b' * 20}\n/drop\n{'b' * 20}\n")
    assert code == 0
    assert "the context holds 60" in err
    assert "(/drop forgets the oldest question and its reply, /clear all)" in err
    assert contents(prompts[-1]) == ["b" * 20]


def test_save_and_load(run, bundle, prompts, tmp_path):
    path = tmp_path / "a chat.json"
    code, _, err = run("chat", bundle, "--system", "x", *SHORT, stdin=f"a\n/save {path}\nb\n/save {path}\n")
    assert code == 0
    assert err.count(f"(saved: {path})") == 2
    messages = json.loads(path.read_text("utf-8"))
    assert [message["role"] for message in messages] == ["system", *["user", "assistant"] * 2]
    _, _, err = run("chat", bundle, *SHORT, stdin=f"/load {path}\nc\n/system\n")
    assert "(5 messages)" in err
    assert err.endswith("x\n")
    assert prompts[-1] == [*messages, {"role": "user", "content": "c"}]


def test_a_save_to_a_full_disk_leaves_the_old_file(bundle, tmp_path):
    resource = pytest.importorskip("resource", reason="Windows has no limit of a file's size")
    path = tmp_path / "chat.json"
    with load_toy(bundle) as model:
        conversation = Conversation(model, {}, "Be brief.")
        conversation.save(path)
        saved = path.read_text("utf-8")
        conversation.instruct("Be brief. " * 100)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
            with pytest.raises(OSError, match="too large"):
                conversation.save(path)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_text("utf-8") == saved
    assert not list(tmp_path.glob(".chat.json*"))


def test_an_error_while_a_message_is_answered_again_keeps_the_conversation(bundle, monkeypatch):
    with load_toy(bundle) as model:
        conversation = Conversation(model, {"max_new_tokens": 2})
        conversation.say("ab")
        before = conversation.messages

        def fail(*arguments, **options):
            raise ondevice.GrammarError("too large")

        monkeypatch.setattr(chat, "stream_reply", fail)
        with pytest.raises(ondevice.GrammarError):
            conversation.regenerate()
        assert conversation.messages == before


def test_files_that_are_not_conversations_are_neither_loaded_nor_overwritten(run, bundle, prompts, tmp_path):
    other = tmp_path / "notes.txt"
    other.write_text("precious")
    (tmp_path / "list.json").write_text('["x"]')
    (tmp_path / "bad.json").write_text('[{"role": "nobody", "content": "x"}]')
    names = ["/save notes.txt", "/load notes.txt", "/load list.json", "/load bad.json", "/load gone.json"]
    lines = "".join(f"{line.split()[0]} {tmp_path / line.split()[1]}\n" for line in names)
    code, _, err = run("chat", bundle, *SHORT, stdin=f"{lines}/save\n/save {tmp_path}/no/x\na\n")
    assert code == 0
    assert other.read_text() == "precious"
    for complaint in (
        "is not a conversation", "is not valid JSON", "is not a list", "the role 'nobody'", "cannot read",
        "give the name of a file", "No such file",
    ):  # fmt: skip
        assert complaint in err
    assert contents(prompts[-1]) == ["a"]


def test_a_name_that_no_file_can_have_does_not_end_the_chat(run, bundle, prompts):
    code, _, err = run("chat", bundle, *SHORT, stdin="/save a\0b\na\n")
    assert code == 0
    assert "cannot write 'a\\x00b'" in err
    assert contents(prompts[-1]) == ["a"]


def test_set_changes_options(run, bundle, monkeypatch):
    from ondevice.model import Model

    asked = []
    real = Model.stream

    def stream(self, prompt, **options):
        asked.append(options)
        return real(self, prompt, **options)

    monkeypatch.setattr(Model, "stream", stream)
    lines = (
        "/set temperature 0.5\n/set max-new-tokens 3\n/set seed 7\n/set stop .\n/set\na\n"
        "/set temperature default\n/set min_p 5\nb\n/set min_p default\nc\n/set max_new_tokens 9\n/stats\n"
    )
    code, _, err = run("chat", bundle, *SHORT, stdin=lines)
    assert code == 0
    assert re.search(r"^temperature +0\.5$", err, re.MULTILINE)
    assert re.search(r"^max_new_tokens +3$", err, re.MULTILINE)
    assert re.search(r"^frequency_penalty +default$", err, re.MULTILINE)
    asked = [options for options in asked if "on_prefill" in options]  # the others were only validated
    assert len(asked) == 3
    assert asked[0].items() >= {"temperature": 0.5, "max_new_tokens": 3, "seed": 7, "stop": (".",)}.items()
    assert "temperature" not in asked[1]
    assert "min_p must be between 0 and 1" in err  # and the chat continues
    assert "\n3 tokens, " in err
    assert "min_p" not in asked[-1]


def test_the_default_length_of_a_reply_is_that_of_a_chat(bundle):
    with load_toy(bundle) as model:
        conversation = Conversation(model, {"max_new_tokens": 6})
        run_command("/set max_new_tokens default", conversation)
        assert conversation.options == {"max_new_tokens": chat.REPLY_TOKENS}


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("/set heat 5", "unknown option heat: /set takes"),
        ("/set temprature 5", "unknown option temprature: did you mean temperature? /set takes"),
        ("/set temprature", "unknown option temprature: did you mean temperature? /set shows"),
        ("/set temperature", "temperature  0.0 (default)"),
        ("/claer", "unknown command /claer: did you mean /clear? /help"),
        ("/exit now", "/exit takes no argument"),
        ("/save nowhere/x", "ondevice: nowhere/x: no such file or directory"),
        ("/set temperature hot", "invalid float value: 'hot'\n"),
        ("/set max_new_tokens -1", "max_new_tokens must be a whole number"),
        ("/clear all", "/clear takes no argument"),
        ("/what now", "unknown command /what: /help lists the commands"),
    ],
)
def test_a_mistake_is_one_line_and_the_chat_continues(run, bundle, prompts, line, complaint):
    code, _, err = run("chat", bundle, *OPTIONS, stdin=f"{line}\na\n")
    assert code == 0
    assert complaint in err.splitlines(keepends=True)[0]
    assert contents(prompts[-1]) == ["a"]


def test_a_template_without_thinking(run, bundle):
    code, _, err = run("chat", bundle, "--thinking", *SHORT, stdin="/think\n/think\n/thoughts\n")
    assert code == 0
    assert err.splitlines()[0] == "ondevice: --thinking is on, but this bundle's template does not support it"
    assert "(thinking is off" in err
    assert "(thinking is on, but" in err
    assert "no thoughts in the last reply" in err


def test_how_much_it_thinks(run, bundle, monkeypatch):
    real, seen = Model.stream, []

    def stream(self, prompt, **options):
        seen.append(options.get("thinking"))
        return real(self, prompt, **options)

    monkeypatch.setattr(Model, "stream", stream)
    for words in ((), ("--effort", "high"), ("--thinking",)):
        assert run("chat", bundle, *words, *SHORT, stdin="hi\n")[0] == 0
    assert seen == [None, "high", True]


def test_thinking_that_is_switched_on_again_is_as_much_as_before(reference_bundle, tmp_path):
    bundle = write_chat_bundle(reference_bundle, tmp_path / "chat", HARMONY)
    with ondevice.load(bundle, threads=1) as model:
        conversation = Conversation(model, {"thinking": "high"})
        for thinking in (False, "high", False, "high"):
            run_command("/think", conversation)
            assert conversation.options["thinking"] == thinking
        run_command("/set seed 3", conversation)
        assert conversation.options["thinking"] == "high"


def test_a_reply_without_thoughts_goes_back_without_its_form(capsys, reference_bundle, tmp_path):
    """gpt-oss's template refuses a message with the beginning of one in it."""
    bundle = write_chat_bundle(reference_bundle, tmp_path / "chat", HARMONY)
    with ondevice.load(bundle, threads=1) as model:
        conversation = Conversation(model, {})
        for text in ("Yes.", "No."):
            asked = [*conversation.messages, {"role": "user", "content": "hi"}]
            script = Script(f"<|channel|>final<|message|>{text}<|return|>", len(model.encode(asked)), model.tokenizer)
            conversation.options["logits_processors"] = [script]
            conversation.say("hi")
            assert conversation.messages[-1] == {"role": "assistant", "content": text}
    assert capsys.readouterr().out == "Yes.\nNo.\n"


def test_thoughts_shows_the_thoughts_of_the_last_reply(capsys, reference_bundle, tmp_path):
    bundle = write_chat_bundle(reference_bundle, tmp_path / "chat")
    with ondevice.load(bundle, threads=1) as model:
        conversation = Conversation(model, {})
        run_command("/think", conversation)
        assert conversation.options["thinking"] is True
        prompt = model.encode([{"role": "user", "content": "hi"}], thinking=True)
        script = Script("<|channel>thought\nhm, hm\n<channel|>Yes.<turn|>", len(prompt))
        conversation.options["logits_processors"] = [script]
        conversation.say("hi")
        run_command("/thoughts", conversation)
    out, err = capsys.readouterr()
    assert out == "Yes.\n"
    assert err.splitlines()[0] == "(thinking is on)"
    assert err.splitlines()[1].startswith("(thinking ... ")
    assert err.endswith("hm, hm\n")
    assert conversation.messages[-1] == {"role": "assistant", "content": "Yes.", "reasoning_content": "hm, hm"}
