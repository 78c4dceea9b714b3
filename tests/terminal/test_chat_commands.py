"""What can be typed into a chat beside messages."""

import json

import pytest

from tests.chat_bundle import Script, write_chat_bundle
from tests.terminal.test_chat import OPTIONS

SHORT = ["--max-new-tokens", "4", "--drafter", "none"]


def said(prompt):
    return [message["content"] for message in prompt if message["role"] != "assistant"]


def test_other_instructions(run, bundle, prompts):
    lines = "/system\nab\n/system be brief\n/system\ncd\n/system none\ne\n"
    code, _, err = run("chat", bundle, *SHORT, stdin=lines)
    assert code == 0
    assert "no instructions" in err
    assert "\nbe brief\n" in err
    assert [said(prompt) for prompt in prompts] == [["ab"], ["be brief", "ab", "cd"], ["ab", "cd", "e"]]


def test_the_oldest_turn_can_be_dropped(run, bundle, prompts):
    code, _, err = run("chat", bundle, "--system", "x", *SHORT, stdin="/drop\na\nb\n/drop\nc\n/drop\n/drop\nd\n")
    assert code == 0
    assert "no message yet that could be dropped" in err
    assert [said(prompt) for prompt in prompts] == [["x", "a"], ["x", "a", "b"], ["x", "b", "c"], ["x", "d"]]


def test_a_context_that_is_full_goes_on_without_the_oldest_turn(run, bundle, prompts):
    words = ["--context-length", "60", "--max-new-tokens", "20", "--drafter", "none"]
    code, _, err = run("chat", bundle, *words, stdin=f"{'a' * 20}\n{'b' * 20}\n/drop\n{'b' * 20}\n")
    assert code == 0
    assert "the context holds 60" in err
    assert "(/drop forgets the oldest question and its reply, /clear all)" in err
    assert said(prompts[-1]) == ["b" * 20]


def test_a_conversation_is_kept_in_a_file(run, bundle, prompts, tmp_path):
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


def test_files_that_are_no_conversations_stay_as_they_are(run, bundle, prompts, tmp_path):
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
        "is no conversation", "is not valid JSON", "holds no list", "the role 'nobody'", "cannot read", "name a file",
        "No such file",
    ):  # fmt: skip
        assert complaint in err
    assert said(prompts[-1]) == ["a"]


def test_options_can_be_set(run, bundle, monkeypatch):
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
    assert "temperature 0.5" in err
    asked = [options for options in asked if "on_prefill" in options]  # the others were tried, not run
    assert len(asked) == 3
    assert asked[0].items() >= {"temperature": 0.5, "max_new_tokens": 3, "seed": 7, "stop": (".",)}.items()
    assert "temperature" not in asked[1]
    assert "min_p must be between 0 and 1" in err  # the chat goes on
    assert "\n3 tokens, " in err
    assert "min_p" not in asked[-1]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("/set heat 5", "there is no option heat: /set takes"),
        ("/set temperature hot", "invalid float value: 'hot'\n"),
        ("/set max_new_tokens 0", "max_new_tokens must be a whole number"),
        ("/clear all", "/clear takes nothing behind it"),
        ("/what now", "no command /what: /help lists them"),
    ],
)
def test_a_mistake_is_one_line_and_the_chat_goes_on(run, bundle, prompts, line, complaint):
    code, _, err = run("chat", bundle, *OPTIONS, stdin=f"{line}\na\n")
    assert code == 0
    assert complaint in err.splitlines(keepends=True)[0]
    assert said(prompts[-1]) == ["a"]


def test_a_template_that_knows_no_thinking(run, bundle):
    code, _, err = run("chat", bundle, "--thinking", *SHORT, stdin="/think\n/think\n/thoughts\n")
    assert code == 0
    assert err.splitlines()[0] == "ondevice: --thinking is on, but this bundle's template does not know it"
    assert "(thinking is off" in err
    assert "(thinking is on, but" in err
    assert "no thoughts in the last reply" in err


def test_thoughts_can_be_unfolded(capsys, reference_bundle, tmp_path):
    import ondevice
    from ondevice.terminal.chat_commands import run_command
    from ondevice.terminal.conversation import Conversation

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
