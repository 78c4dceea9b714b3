"""Pictures and sounds in `ondevice chat` and `ondevice batch`."""

from __future__ import annotations

import base64
import builtins
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ondevice
from ondevice import Image, Model, Video
from ondevice.cli.chat import Conversation, completions, run_command
from ondevice.cli.main import main
from ondevice.cli.prompts import dropped_files
from tests.fixtures.chat_bundle import write_chat_bundle
from tests.media.pictures_made import png
from tests.media.sounds_made import tone, wav

PICTURE, OTHER = png(50, 50), png(30, 90, seed=1)
SOUND = wav(tone(0.5))
pytestmark = pytest.mark.needs("onnxruntime")


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with files."""
    for name, content in {
        "photo.png": PICTURE,
        "my other.jpg": OTHER,
        "it's.wav": SOUND,
        "cut.wav": SOUND[:30],
        "notes.txt": b"x",
        "voice.opus": b"",
        "voice.AIFF": b"",
    }.items():
        (tmp_path / name).write_bytes(content)
    monkeypatch.chdir(tmp_path)
    return tmp_path


# Chats.


def url(content: bytes, kind: str = "png") -> dict[str, Any]:
    return {
        "type": "image_url",
        "image_url": {"url": f"data:image/{kind};base64,{base64.b64encode(content).decode()}"},
    }


@pytest.fixture
def conversation(chat_model: Model, files: Path) -> Conversation:
    return Conversation(chat_model, {"max_new_tokens": 4, "temperature": 0.0})


def test_a_picture_goes_with_the_next_message(conversation: Conversation, capsys: pytest.CaptureFixture[str]) -> None:
    run_command("/image photo.png", conversation)
    assert "(with the next message: photo.png (66 tokens))" in capsys.readouterr().err
    run_command("/image 'my other.jpg'", conversation)
    run_command("/audio it's.wav", conversation)
    assert "photo.png (66 tokens), my other.jpg (" in capsys.readouterr().err
    conversation.say("a")
    sound = {"type": "input_audio", "input_audio": {"data": base64.b64encode(SOUND).decode(), "format": "wav"}}
    content = [url(PICTURE), url(OTHER, "jpeg"), sound, {"type": "text", "text": "a"}]
    assert conversation.messages[0] == {"role": "user", "content": content}
    conversation.say("b")
    assert conversation.messages[2] == {"role": "user", "content": "b"}


def test_the_answer_is_that_of_python(
    conversation: Conversation, chat_model: Model, capsys: pytest.CaptureFixture[str]
) -> None:
    run_command("/image photo.png", conversation)
    run_command("/set image_tokens 140", conversation)
    conversation.say("the fox")
    prompt = [{"role": "user", "content": [Image(PICTURE, 140), {"type": "text", "text": "the fox"}]}]
    reply = chat_model.generate(prompt, max_new_tokens=4, temperature=0.0)
    assert capsys.readouterr().out.startswith(reply.text.rstrip("\n"))
    assert chat_model.last_stats.prompt_tokens == len(chat_model.encode(prompt)) > 120


def test_nothing_goes_with_it_after_none_and_clear(
    conversation: Conversation, capsys: pytest.CaptureFixture[str]
) -> None:
    for line in ("/image none", "/clear"):
        run_command("/image photo.png", conversation)
        run_command(line, conversation)
        run_command("/image", conversation)
        assert capsys.readouterr().err.endswith("(nothing goes with the next message)\n")
    conversation.say("a")
    assert conversation.messages[0]["content"] == "a"


def test_a_message_that_does_not_fit_keeps_its_picture(conversation: Conversation) -> None:
    run_command("/image photo.png", conversation)
    conversation.say("a" * 5000)
    assert not conversation.messages
    conversation.say("a")
    assert conversation.messages[0]["content"][0] == url(PICTURE)


def test_regenerate_save_and_load(conversation: Conversation, chat_model: Model, files: Path) -> None:
    run_command("/image photo.png", conversation)
    conversation.say("a")
    kept = conversation.messages
    run_command("/regenerate", conversation)
    assert conversation.messages == kept
    run_command("/save talk.json", conversation)
    (files / "photo.png").unlink()
    loaded = Conversation(chat_model, {"max_new_tokens": 4})
    run_command("/load talk.json", loaded)
    assert loaded.messages == kept
    loaded.say("b")
    assert len(loaded.messages) == 4


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("/image gone.png", "cannot read gone.png: No such file"),
        (
            "/image https://example.com/a.png",
            "cannot read https:/example.com/a.png: No such file or directory (no address",
        ),
        ("/image notes.txt", "picture 1 is damaged, or no PNG"),
        ("/audio cut.wav", "sound 1 is a WAV file that cannot be read"),
    ],
)
def test_files_that_are_refused(
    chat_bundle: Path, files: Path, line: str, complaint: str, capsys: pytest.CaptureFixture[str], piped: Any
) -> None:
    piped(f"{line}\na\n")
    assert main(["chat", str(chat_bundle), "-n", "3", "--threads", "1"]) == 0
    assert complaint in " ".join(capsys.readouterr().err.split())  # lines are as wide as the terminal


@pytest.fixture
def piped(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:

    return lambda text: monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode()), "utf-8"))


def test_a_file_that_is_too_large_is_not_read(
    conversation: Conversation, monkeypatch: pytest.MonkeyPatch, files: Path
) -> None:
    monkeypatch.setattr("ondevice.cli.prompts.MAX_BYTES", len(PICTURE) - 1)
    with pytest.raises(ondevice.PromptError, match="has more than"):
        run_command("/image photo.png", conversation)


def test_a_bundle_that_reads_text_only(reference_bundle: Path, files: Path) -> None:
    bundle = write_chat_bundle(reference_bundle, files / "chat")
    with ondevice.load(bundle, engine="simd", threads=1) as model, pytest.raises(ondevice.PromptError, match="text"):
        run_command("/image photo.png", Conversation(model, {}))


def test_dropped_files(files: Path) -> None:
    picture, other, sound = files / "photo.png", files / "my other.jpg", files / "it's.wav"
    for line, found in (
        ("photo.png", [Path("photo.png")]),
        (f"'{picture}'", [picture]),
        (f'"{other}"', [other]),
        (str(other), [other]),
        (str(other).replace(" ", "\\ "), [other]),
        (other.as_uri(), [other]),
        (str(sound), [sound]),
        (f"{picture} '{other}' ", [picture, other]),
        ("voice.opus voice.AIFF", [Path("voice.opus"), Path("voice.AIFF")]),
        (f"{picture} gone.png", []),
        ("look at photo.png", []),
        (str(files / "notes.txt"), []),
        ("", []),
        ("it's", []),
        ("~nobody/photo.png", []),
        ("http://[::1/photo.png", []),
        ("x" * 5000, []),
        ("a\0b", []),
    ):
        assert dropped_files(line) == found, line


def test_a_dropped_picture_in_a_terminal(
    chat_bundle: Path, files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], piped: Any
) -> None:
    asked: list[Any] = []
    real = Model.stream

    def stream(self: Model, prompt: Any, **options: Any) -> Any:
        asked.append(prompt)
        return real(self, prompt, **options)

    piped("")
    lines = iter([str(files / "photo.png"), "what is it?"])
    monkeypatch.setattr(Model, "stream", stream)
    monkeypatch.setattr(builtins, "input", lambda prompt="": next(lines, None) or _end())
    monkeypatch.setenv("ONDEVICE_HOME", str(files / "home"))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    assert main(["chat", str(chat_bundle), "--plain", "-n", "3", "--threads", "1"]) == 0
    assert "(with the next message: photo.png (66 tokens))" in capsys.readouterr().err
    assert [prompt[0]["content"] for prompt in asked] == [[url(PICTURE), {"type": "text", "text": "what is it?"}]]


def _end() -> str:
    raise EOFError


def test_tab_completes_names_of_pictures(files: Path) -> None:
    assert completions("/im") == ["/image "]
    assert completions("/image ph") == ["photo.png "]


# Batches.


@pytest.fixture
def ask(chat_bundle: Path, files: Path) -> Callable[..., tuple[int, dict[int, Any]]]:
    """Answer lines, each of which is a value for JSON: the exit code, and the answers by line."""

    def call(*lines: Any) -> tuple[int, dict[int, Any]]:
        (files / "prompts.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines), "utf-8")
        words = ["prompts.jsonl", "--out", "answers.jsonl", "-n", "6", "--temperature", "0", "--threads", "1"]
        code = main(["batch", str(chat_bundle), *words])
        answers = [json.loads(line) for line in (files / "answers.jsonl").read_text("utf-8").splitlines()]
        return code, {answer["line"]: answer for answer in answers}

    return call


def asked(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "the fox"}]}]


def test_a_batch_about_pictures(ask: Any, chat_model: Model) -> None:
    path, data = {"type": "image", "image": "photo.png"}, url(PICTURE)
    code, found = ask(
        {"prompt": asked(path)},
        {"messages": asked(path, {"type": "audio", "audio": "it's.wav"}), "image_tokens": 140},
        {"custom_id": "x", "url": "/v1/chat/completions", "body": {"messages": asked(data)}},
        {"prompt": asked(data)},
        {"prompt": asked({"type": "video", "video": ["photo.png", "my other.jpg"], "fps": 1})},
    )
    assert code == 0
    options: dict[str, Any] = {"max_new_tokens": 6, "temperature": 0.0}
    reply = chat_model.generate(asked(Image(PICTURE)), **options)
    for line in (1, 4):
        assert tuple(found[line]["token_ids"]) == reply.token_ids
        assert found[line]["usage"]["prompt_tokens"] == reply.stats.prompt_tokens > 60
    assert found[3]["response"]["body"]["choices"][0]["message"]["content"] == reply.text
    heard = {"type": "audio", "audio": SOUND}
    reply = chat_model.generate(asked(Image(PICTURE), heard), image_tokens=140, **options)
    assert tuple(found[2]["token_ids"]) == reply.token_ids
    reply = chat_model.generate(asked(Video([PICTURE, OTHER], fps=1)), **options)
    assert tuple(found[5]["token_ids"]) == reply.token_ids


def test_a_picture_that_changed_is_another_question(ask: Any, files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = {"prompt": asked({"type": "image", "image": "photo.png"})}
    assert ask(line)[0] == 0
    assert ask(line)[0] == 0
    (files / "photo.png").write_bytes(OTHER)
    assert ask(line)[0] == 2
    assert "answers another question than line 1 asks" in capsys.readouterr().err


def test_lines_with_bad_pictures_are_errors(ask: Any) -> None:
    code, found = ask(
        {"prompt": asked({"type": "image", "image": "gone.png"})},
        {"prompt": asked({"type": "image", "image": "notes.txt"})},
        {"prompt": asked({"type": "image", "image": "a\0b"})},
        {"prompt": asked({"type": "image", "image": 7})},
        {"prompt": asked({"type": "image_url", "image_url": {"url": "https://example.com/a.png"}})},
        {"body": {"messages": asked({"type": "image", "image": "photo.png"})}},
        {"prompt": "the fox"},
        {"prompt": asked({"type": "image", "image": "https://example.com/a.png"})},
    )
    assert code == 1
    for line, complaint in {
        1: "cannot read gone.png: No such file",
        2: "picture 1 is damaged",
        3: "cannot read",
        4: "picture 1 is a int",
        5: "no address is opened",
        8: "no address is opened: download the file",
    }.items():
        assert complaint in found[line]["error"]
    assert "send pictures as image_url" in found[6]["error"]["message"]
    assert "text" in found[7]
