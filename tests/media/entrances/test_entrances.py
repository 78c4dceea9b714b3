"""Pictures and sounds through the command line and the server, and what text alone does not import."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ondevice
from ondevice import Model
from ondevice.bundle import Bundle
from ondevice.cli.main import main
from tests.media.pictures_made import png
from tests.media.sounds_made import tone, wav
from tests.server.served import Served, serving

PICTURE = png(50, 50)
URL = "data:image/png;base64," + base64.b64encode(PICTURE).decode()
SOUND = wav(tone(0.7))
pytestmark = pytest.mark.needs("onnxruntime")


@pytest.fixture(scope="module")
def bundle(seeing: dict[tuple[str, str], Bundle]) -> Path:
    return seeing["seeing", "int8"].path


@pytest.fixture(scope="module")
def model(bundle: Path) -> Iterator[Model]:
    with ondevice.load(bundle, engine="simd", threads=1) as made:
        yield made


@pytest.fixture(scope="module")
def served(bundle: Path, model: Model) -> Iterator[Served]:
    with serving(bundle, lambda: model) as server:
        yield server
        server.wait_until_idle()


def expected(model: Model, text: str = "the fox", tokens: int = 70, new: int = 12) -> tuple[int, ...]:
    parts = [{"type": "image", "image": PICTURE}, {"type": "text", "text": text}]
    return model.generate(
        [{"role": "user", "content": parts}], max_new_tokens=new, image_tokens=tokens, temperature=0.0
    ).token_ids


# The command line.


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = main([str(word) for word in words])
    return code, *capsys.readouterr()


def test_generate(bundle: Path, model: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a picture.png"
    path.write_bytes(PICTURE)
    options = ("--image", path, "--image-tokens", 70, "-n", 12, "--temperature", 0, "--threads", 1, "--json")
    code, out, _ = run(capsys, "generate", bundle, "the fox", *options)
    assert code == 0
    reply = json.loads(out)
    assert tuple(reply["token_ids"]) == expected(model)
    prompt = [{"role": "user", "content": [ondevice.Image(path), {"type": "text", "text": "the fox"}]}]
    assert reply["stats"]["prompt_tokens"] == len(model.encode(prompt, image_tokens=70))


def test_generate_with_sounds(bundle: Path, model: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Files come before the text, in the order in which they are given."""
    files = {"a.wav": SOUND, "b.png": PICTURE, "c.wav": wav(tone(0.3))}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    first, second, third = (tmp_path / name for name in files)
    options = ("--image-tokens", 70, "-n", 12, "--temperature", 0, "--threads", 1, "--json")
    words = ("--audio", first, "--image", second, "--audio", third)
    code, out, _ = run(capsys, "generate", bundle, "the fox", *words, *options)
    assert code == 0
    reply = json.loads(out)
    parts = [ondevice.Audio(first), ondevice.Image(second), ondevice.Audio(third), {"type": "text", "text": "the fox"}]
    prompt = [{"role": "user", "content": parts}]
    found = model.generate(prompt, max_new_tokens=12, image_tokens=70, temperature=0.0)
    assert tuple(reply["token_ids"]) == found.token_ids
    assert reply["stats"]["prompt_tokens"] == len(model.encode(prompt, image_tokens=70))


def test_mistakes(bundle: Path, reference_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def mistake(*words: object) -> str:
        code, out, error = run(capsys, "generate", *words, "--threads", 1)
        assert (code, out) == (2, "")
        assert error.count("\n") == 1
        return error

    broken = tmp_path / "broken.png"
    broken.write_bytes(PICTURE[:100])
    assert "picture 1 is damaged" in mistake(bundle, "x", "--image", broken, "--image-tokens", 70)
    assert "No such file" in mistake(bundle, "x", "--image", tmp_path / "none.png")
    assert "sound 1 is not a sound file" in mistake(bundle, "x", "--audio", broken)
    assert "No such file" in mistake(bundle, "x", "--audio", tmp_path / "none.wav")
    for option in ("--image", "--audio", "--video"):
        assert "no address is opened: download the file" in mistake(bundle, "x", option, "https://example.com/a")
    assert "--audio is for text" in mistake(bundle, "--ids", "2,5", "--audio", broken)
    assert "--image-tokens is for pictures" in mistake(bundle, "x", "--audio", broken, "--image-tokens", 70)
    assert "reads text only" in mistake(reference_bundle, "x", "--audio", broken)
    assert "--image is for text" in mistake(bundle, "--ids", "2,5", "--image", broken)
    assert "--image-tokens is for pictures" in mistake(bundle, "x", "--image-tokens", 70)
    assert "reads text only" in mistake(reference_bundle, "x", "--image", broken)


def test_info(bundle: Path, reference_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "info", bundle, "--json")
    assert code == 0
    assert json.loads(out)["vision"] == {"layers": 3, "hidden_size": 48, "tokens": 280}
    assert json.loads(out)["audio"] == {"layers": 2, "hidden_size": 32}
    assert {"vision.onnx", "audio.onnx"} <= json.loads(out)["files"].keys()
    assert "3 layers of 48, 280 tokens for a picture" in run(capsys, "info", bundle)[1]
    assert re.search(r"audio +2 layers of 32", run(capsys, "info", bundle)[1])
    text = json.loads(run(capsys, "info", reference_bundle, "--json")[1])
    assert (text["vision"], text["audio"]) == (None, None)


# The server.


def ask(served: Served, *parts: object, **fields: Any) -> Any:
    messages = [{"role": "user", "content": list(parts)}]
    return served.post("/v1/chat/completions", messages=messages, max_tokens=12, temperature=0, **fields)


def picture(url: str = URL, detail: str | None = "low") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **({} if detail is None else {"detail": detail})}}


TEXT = {"type": "text", "text": "the fox"}


def test_chat_completions(served: Served, model: Model) -> None:
    answer = ask(served, picture(), TEXT)
    assert answer.status == 200
    prompt = [{"role": "user", "content": [picture(), TEXT]}]
    reply = model.generate(prompt, max_new_tokens=12, temperature=0.0)
    assert reply.token_ids == expected(model)
    assert answer.body["choices"][0]["message"]["content"] == reply.text
    assert answer.body["usage"]["prompt_tokens"] == len(model.encode(prompt)) > 60


def sound(content: bytes = SOUND, **fields: Any) -> dict[str, Any]:
    given = {"data": base64.b64encode(content).decode(), "format": "wav", **fields}
    return {"type": "input_audio", "input_audio": given}


def test_chat_completions_with_a_sound(served: Served, model: Model) -> None:
    answer = ask(served, sound(), picture(), TEXT)
    assert answer.status == 200
    prompt = [{"role": "user", "content": [ondevice.Audio(SOUND), picture(), TEXT]}]
    reply = model.generate(prompt, max_new_tokens=12, temperature=0.0)
    assert answer.body["choices"][0]["message"]["content"] == reply.text
    assert answer.body["usage"]["prompt_tokens"] == len(model.encode(prompt)) > 80


@pytest.mark.needs("clients")
def test_openais_client_sends_a_sound(served: Served) -> None:
    import openai

    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        user: Any = {"role": "user", "content": [sound(), TEXT]}
        made = client.chat.completions.create(model=client.models.list().data[0].id, max_tokens=4, messages=[user])
    assert made.usage is not None
    assert made.usage.prompt_tokens > 18


def test_bad_sounds_are_the_clients_mistake(served: Served, tmp_path: Path) -> None:
    path = tmp_path / "secret.wav"
    path.write_bytes(SOUND)
    for part, complaint in (
        (sound(b"no sound"), "is not a sound file"),
        (sound(SOUND[:30]), "cannot be read"),
        (sound(data="!!!!"), "base64 is damaged"),
        (sound(data=None), "base64 is not a string"),
        (sound(data=str(path)), "base64 is damaged"),
        ({"type": "input_audio"}, "base64 is not a string"),
        ({"type": "audio", "audio": str(path)}, "input_audio, in base64"),
    ):
        answer = ask(served, part, TEXT)
        assert (answer.status, answer.body["error"]["type"]) == (400, "invalid_request_error"), part
        assert complaint in answer.body["error"]["message"]
        assert "\n" not in answer.body["error"]["message"]


def test_a_sound_longer_than_the_context_is_the_clients_mistake(served: Served) -> None:
    answer = ask(served, sound(wav(tone(12.0))), TEXT)
    assert (answer.status, answer.body["error"]["type"]) == (400, "exceed_context_size_error")


def test_a_conversation_about_a_picture_reads_it_once(served: Served) -> None:
    turns: list[dict[str, Any]] = [{"role": "user", "content": [picture(), TEXT]}]
    for _ in range(2):
        answer = served.post("/v1/chat/completions", messages=turns, max_tokens=4, temperature=0)
        turns += [{"role": "assistant", "content": "ab"}, {"role": "user", "content": "a b"}]
    assert answer.body["usage"]["prompt_tokens_details"]["cached_tokens"] > 60


def test_no_file_and_no_address_is_opened(served: Served, tmp_path: Path) -> None:
    path = tmp_path / "secret.png"
    path.write_bytes(PICTURE)
    for part in (
        picture(str(path)),
        picture(path.as_uri()),
        picture("http://127.0.0.1:9/a.png"),
        {"type": "image", "image": str(path)},
        {"type": "image", "url": str(path)},
        {"type": "image"},
    ):
        answer = ask(served, part, TEXT)
        assert answer.status == 400, part
        message = answer.body["error"]["message"]
        assert "data: URI" in message
        assert "\n" not in message


def test_bad_pictures_are_the_clients_mistake(served: Served) -> None:
    for url, expected_message in (
        ("data:image/png;base64,!!!!", "base64 is damaged"),
        (URL[:200], "damaged"),
        ("data:image/png;base64," + base64.b64encode(PICTURE[:99]).decode(), "picture 1 is damaged"),
    ):
        answer = ask(served, picture(url), TEXT)
        assert (answer.status, answer.body["error"]["type"]) == (400, "invalid_request_error")
        assert expected_message in answer.body["error"]["message"]
    assert ask(served, picture(detail="best"), TEXT).status == 400
    assert ask(served, *[picture(detail="high")] * 3, TEXT).status == 400  # more than the context


# Packages that are not imported, and packages that are missing.


def in_a_process(code: str) -> str:
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


def test_text_imports_nothing_of_media(bundle: Path) -> None:
    code = f"""
import sys, ondevice
with ondevice.load({str(bundle)!r}, engine="simd", threads=1) as model:
    model.generate([{{"role": "user", "content": "the fox"}}], max_new_tokens=3)
print([name for name in sys.modules if name.startswith(("PIL", "soundfile", "ondevice.media", "onnxruntime"))])
"""
    assert in_a_process(code) == "[]"


@pytest.mark.parametrize(("package", "hint"), [("PIL", "'ondevice-runtime[images]'"), ("onnxruntime", "onnxruntime")])
def test_a_missing_package_is_one_line(bundle: Path, package: str, hint: str) -> None:
    code = f"""
import sys, ondevice
sys.modules[{package!r}] = None
with ondevice.load({str(bundle)!r}, engine="simd", threads=1) as model:
    try:
        model.generate([{{"role": "user", "content": [ondevice.Image({PICTURE!r}, 70)]}}], max_new_tokens=3)
    except ondevice.MissingDependencyError as error:
        print(error)
"""
    assert in_a_process(code).endswith(f"in a prompt needs {package}: pip install {hint}")
