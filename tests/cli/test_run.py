"""`ondevice run`: an answer, a chat, and models that are missing."""

import hashlib
import sys

import pytest

from ondevice.bundle import Bundle, exports_directory
from ondevice.bundle_format.manifest import Source
from ondevice.cli import chat
from ondevice.cli import run as command
from ondevice.cli.main import Parser
from ondevice.cli.origins import note_origin
from tests.cli.conftest import Terminal
from tests.fixtures.model_made import write_bundle


@pytest.fixture
def ran(monkeypatch, tmp_path):
    """The commands that were run to get a model; each makes a bundle where it would be, and remembers its origin."""
    commands = []

    def run(*words):
        commands.append(words)
        path = tmp_path / "home" / words[1].split("/")[1] if words[0] == "pull" else tmp_path / words[-1]
        note_origin(Bundle.open(write_bundle(path)), words[1])

    monkeypatch.setattr(command, "_run", run)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("ONDEVICE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("ONDEVICE_HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    return commands


@pytest.fixture
def home(ran, monkeypatch, tmp_path):
    """The directory of bundles with names."""
    monkeypatch.setenv("ONDEVICE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def write_checkpoint(path):
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")


def test_a_prompt_gets_one_answer_as_a_chat(run, bundle, prompts):
    code, out, _ = run("run", bundle, "ab", "-n", 4)
    assert code == 0
    assert out
    assert prompts == [[{"role": "user", "content": "ab"}]]


def test_token_ids_are_the_prompt_itself(run, bundle, prompts):
    assert run("run", bundle, "--ids", "2,5,7", "-n", 4)[0] == 0
    assert prompts == [[2, 5, 7]]


def test_the_options_of_one_answer_are_those_that_a_chat_lacks():
    parsers = {name: Parser(name) for name in ("run", "chat")}
    command.add_arguments(parsers["run"])
    chat.add_arguments(parsers["chat"])
    one, several = ({action.dest for action in parser._actions} for parser in parsers.values())
    assert {*command.ANSWER_OPTIONS} == one - several - {"prompt", "file", "ids", "chat", "yes"}


def test_token_ids_are_no_message(run, bundle, prompts):
    code, _, err = run("run", bundle, "--ids", "2,5,7", "--chat")
    assert code == 2
    assert "--chat is for text" in err
    assert not prompts


def test_piped_text_is_the_prompt(run, bundle, prompts):
    assert run("run", bundle, "-n", 4, stdin="ab\ncd\n")[0] == 0
    assert prompts == [[{"role": "user", "content": "ab\ncd\n"}]]


@pytest.mark.parametrize("words", [[], [""], ["-"], [" \n"]])
def test_without_a_message_there_is_no_answer(run, bundle, prompts, words):
    code, out, err = run("run", bundle, *words, stdin="\n")
    assert (code, out, prompts) == (2, "", [])
    assert err == "ondevice: there is no message: give a text, or pipe one in\n"


def test_a_system_message_alone_is_answered(run, bundle, prompts):
    assert run("run", bundle, "", "-n", 4, "--system", "ab")[0] == 0
    assert prompts == [[{"role": "system", "content": "ab"}, {"role": "user", "content": ""}]]


def test_a_terminal_gets_a_chat(run, bundle, prompts, monkeypatch):
    lines = iter(["ab", "cd"])

    def typed(prompt):
        line = next(lines, None)
        if line is None:
            raise EOFError
        return line

    monkeypatch.setattr("builtins.input", typed)
    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr("ondevice.cli.chat.standard_input", lambda: None)
    assert run("run", bundle, "-n", 4)[0] == 0
    assert [asked[-1]["content"] for asked in prompts] == ["ab", "cd"]


@pytest.mark.parametrize(
    "words", [["--json"], ["--regex", "[0-9]+"], ["--audio", "a.wav"], ["--top-logprobs", 2], ["--tools", "t.json"]]
)
def test_a_chat_refuses_the_options_of_one_answer(run, bundle, prompts, monkeypatch, words):
    monkeypatch.setattr(sys, "stdin", Terminal())
    code, _, said = run("run", bundle, *words)
    assert (code, said) == (
        2,
        f"ondevice: {words[0]} is for one answer: add a prompt, or leave it out for a chat\n",
    )
    assert not prompts


def test_a_bundle_of_the_hub_is_pulled_once(run, ran, home, prompts, monkeypatch):
    monkeypatch.setattr("ondevice.hub.is_published", lambda name: True)
    for _ in range(2):
        assert run("run", "owner/model", "ab", "-n", 4, "--yes")[0] == 0
    assert ran == [("pull", "owner/model")]


def test_a_checkpoint_of_the_hub_is_exported(run, ran, home, prompts, monkeypatch):
    monkeypatch.setattr("ondevice.hub.is_published", lambda name: False)
    assert run("run", "owner/model", "ab", "-n", 4, "--yes")[0] == 0
    assert ran == [("export", "owner/model", "--out", str(home / "model"))]


def test_a_gguf_file_is_exported_once(run, ran, prompts, tmp_path):
    (tmp_path / "small.gguf").write_bytes(b"GGUF")
    for _ in range(2):
        assert run("run", "small.gguf", "ab", "-n", 4, "--yes")[0] == 0
    assert ran == [("export", "small.gguf", "--out", "bundles/small")]


@pytest.mark.parametrize(("said", "code"), [("y\n", 0), ("\n", 1)])
def test_it_asks_first(run, ran, home, prompts, monkeypatch, said, code):
    monkeypatch.setattr("ondevice.hub.is_published", lambda name: True)
    monkeypatch.setattr(sys, "stdin", Terminal(said))
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert run("run", "owner/model", "ab", "-n", 4)[0] == code
    assert len(ran) == (code == 0)


def test_without_a_terminal_it_does_not_ask(run, ran, tmp_path):
    code, _, err = run("run", "owner/model", "ab", stdin="")
    assert code == 2
    assert err == (
        "ondevice: no bundle at owner/model; get OWNER/NAME owner/model from the Hugging Face hub, to "
        f"{tmp_path}/.ondevice/model? There is no terminal to ask in: add --yes\n"
    )


def test_a_directory_keeps_the_points_of_its_name(run, ran, prompts, tmp_path):
    for name in ("Llama-3.2-1B", "Llama-3.1-8B"):
        write_checkpoint(tmp_path / name)
        assert run("run", f"./{name}/", "ab", "-n", 4, "--yes")[0] == 0
    assert [words[-1] for words in ran] == ["bundles/Llama-3.2-1B", "bundles/Llama-3.1-8B"]


def test_a_bundle_goes_where_export_would_put_it(run, ran, home, prompts, tmp_path):
    (tmp_path / "small.gguf").write_bytes(b"GGUF")
    assert run("run", "small.gguf", "ab", "-n", 4, "--yes")[0] == 0
    assert ran == [("export", "small.gguf", "--out", str(home / "small"))]
    assert exports_directory() == home


@pytest.mark.parametrize(("source", "name"), [("pair/target", "pair"), ("large-00001-of-00002.gguf", "large")])
def test_a_bundle_has_the_name_that_export_gives_it(run, ran, home, prompts, tmp_path, source, name):
    path = tmp_path / source
    if path.suffix:
        path.write_bytes(b"GGUF")
    else:
        write_checkpoint(path)
    assert run("run", f"./{source}", "ab", "-n", 4, "--yes")[0] == 0
    assert ran == [("export", f"./{source}", "--out", str(home / name))]


@pytest.mark.parametrize("make", [lambda path: path.parent.mkdir() or path.write_bytes(b"GGUF"), write_checkpoint])
def test_another_model_of_the_same_name_is_not_answered_by_the_first_bundle(run, ran, prompts, tmp_path, make):
    for directory in ("a", "b"):
        make(tmp_path / directory / "small.gguf")
    assert run("run", "a/small.gguf", "ab", "-n", 4, "--yes")[0] == 0
    code, _, err = run("run", "b/small.gguf", "ab", "-n", 4, stdin="")
    bundle = ran[0][-1]
    assert code == 2
    assert f"export b/small.gguf to {bundle}, replacing the bundle of " in err
    assert f"(`ondevice run {bundle}` runs that one)? There is no terminal to ask in: add --yes" in err
    code, _, err = run("run", "b/small.gguf", "ab", "-n", 4, "--yes")
    assert code == 0
    assert err.startswith(f"note: export b/small.gguf to {bundle}, replacing the bundle of ")
    assert [words[1] for words in ran] == ["a/small.gguf", "b/small.gguf"]


def test_a_file_that_was_replaced_is_exported_again(run, ran, prompts, tmp_path):
    for content in (b"GGUF", b"GGUF 2"):
        (tmp_path / "small.gguf").write_bytes(content)
        assert run("run", "small.gguf", "ab", "-n", 4, "--yes")[0] == 0
    assert len(ran) == 2


@pytest.mark.parametrize(("listed", "is_same"), [(b"GGUF", True), (b"other", False)])
def test_without_a_record_the_hash_of_a_gguf_file_decides(run, ran, prompts, tmp_path, listed, is_same):
    (tmp_path / "small.gguf").write_bytes(b"GGUF")
    source = Source("small.gguf", None, "small.gguf", hashlib.sha256(listed).hexdigest(), {"F32": 1})
    write_bundle(tmp_path / "bundles" / "small", source=source)
    for _ in range(2):
        assert run("run", "small.gguf", "ab", "-n", 4, stdin="")[0] == (0 if is_same else 2)
    assert not ran


@pytest.mark.parametrize("id", ["owner/model", "other/model"])
def test_a_bundle_of_another_owner_is_not_the_one_that_was_named(run, ran, prompts, monkeypatch, tmp_path, id):
    monkeypatch.setattr("ondevice.hub.is_published", lambda name: True)
    write_bundle(tmp_path / ".ondevice" / "model", source=Source(id))
    code, _, err = run("run", "owner/model", "ab", "-n", 4, stdin="")
    assert code == (0 if id == "owner/model" else 2)
    assert (f"replacing the bundle of {id} there" in err) == (code == 2)
    assert run("run", "owner/model", "ab", "-n", 4, "--yes")[0] == 0
    assert ran == ([] if code == 0 else [("pull", "owner/model", "--replace")])


@pytest.mark.parametrize("name", ["nowhere", "a/b/c", "/x", "directory"])
def test_what_is_no_model(run, ran, tmp_path, name):
    (tmp_path / "directory").mkdir()
    code, _, err = run("run", name, "ab")
    assert code == 2
    assert "is neither a bundle nor a checkpoint, a .gguf file or an OWNER/NAME" in err
