"""Encoding a picture takes seconds: other generations of the model go on meanwhile, in Python and in the commands."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import ondevice
from ondevice import Model
from ondevice.cli.main import main
from ondevice.media.tower import Tower
from tests.conftest import ENGINES
from tests.media.pictures_made import png
from tests.server.served import PATIENCE_S, serving, text_of, wait_until

SQUARE, WIDE = png(50, 50), png(30, 90, seed=1)
TEXT = [{"role": "user", "content": "a b\na b\na the fox\na b"}]
OPTIONS: dict[str, Any] = {"max_new_tokens": 40, "temperature": 0.0}
pytestmark = pytest.mark.needs("onnxruntime")


class SlowTower:
    """Encodings that take as long as a test says.

    begun : set when the first encoding begins
    go_on : what encodings wait for
    gave_up : set by one that has waited for `PATIENCE_S`, so that a test fails where it would wait forever
    """

    def __init__(self) -> None:
        self.begun, self.go_on, self.gave_up = (threading.Event() for _ in range(3))

    def wait(self) -> None:
        self.begun.set()
        if not self.go_on.wait(PATIENCE_S):
            self.gave_up.set()

    @property
    def encodes(self) -> bool:
        """Whether an encoding has begun, and none has ended."""
        return self.begun.is_set() and not self.go_on.is_set() and not self.gave_up.is_set()


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> SlowTower:
    made, encode = SlowTower(), Tower.encode

    def slowly(self: Tower, piece: Any, *cancelled: Any) -> Any:
        made.wait()
        return encode(self, piece, *cancelled)

    monkeypatch.setattr(Tower, "encode", slowly)
    return made


@pytest.fixture(params=ENGINES)
def model(request: pytest.FixtureRequest, chat_bundle: Path) -> Iterator[Model]:
    with ondevice.load(chat_bundle, engine=request.param, threads=2) as made:
        yield made


def asked(picture: bytes) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": "a b"}]}]


def encoding(slow: SlowTower, call: Callable[[], Any]) -> Any:
    """The results of a function that is called while the tower encodes, from the beginning to the end."""
    assert slow.begun.wait(PATIENCE_S)
    found = call()
    assert slow.encodes, "it waited for the tower"
    slow.go_on.set()
    return found


def test_running_and_new_generations_go_on(model: Model, slow: SlowTower) -> None:
    """Decoding rounds of one that has begun; the prefill and the rounds of one that begins now."""
    with ThreadPoolExecutor(1) as pool, model.stream(TEXT, **OPTIONS) as running:
        first = next(running)
        seeing = pool.submit(model.generate, asked(SQUARE), **OPTIONS)
        other = [{"role": "user", "content": "the fox\nab"}]
        steps, new = encoding(slow, lambda: ([first, *running], model.generate(other, **OPTIONS)))
        reply = seeing.result()
    model.forget()
    assert [token for step in steps for token in step.token_ids] == list(model.generate(TEXT, **OPTIONS).token_ids)
    assert new.token_ids == model.generate(other, **OPTIONS).token_ids
    assert reply.token_ids == model.generate(asked(SQUARE), **OPTIONS).token_ids
    assert min(map(len, (steps, new.token_ids, reply.token_ids))) > 4


def test_a_kept_picture_does_not_wait_for_another(model: Model, slow: SlowTower) -> None:
    slow.go_on.set()
    expected = model.generate(asked(SQUARE), **OPTIONS)
    slow.begun.clear()
    slow.go_on.clear()
    model.generate(TEXT, **OPTIONS)
    text = [{"role": "system", "content": "ab"}, *asked(SQUARE)]  # no beginning of it is cached
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(model.generate, asked(WIDE), **OPTIONS)
        reply = encoding(slow, lambda: model.generate(text, **OPTIONS))
        other.result()
    assert reply.stats.cached_tokens < 10
    assert reply.token_ids == model.generate(text, **OPTIONS).token_ids != expected.token_ids


def test_streams_of_a_server_go_on(chat_bundle: Path, slow: SlowTower) -> None:
    url = "data:image/png;base64," + base64.b64encode(SQUARE).decode()
    fields: dict[str, Any] = {"max_completion_tokens": 40, "temperature": 0}
    picture = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
    with (
        serving(chat_bundle, lambda: ondevice.load(chat_bundle, engine="simd", threads=2)) as served,
        ThreadPoolExecutor(1) as pool,
    ):
        path = "/v1/chat/completions"
        expected = text_of(served.messages(path, messages=TEXT, **fields))
        with served.stream(path, messages=TEXT, **fields) as lines:
            found = [next(lines)]
            seeing = pool.submit(served.post, path, messages=picture, **fields)
            encoding(slow, lambda: found.extend(lines))
        assert seeing.result().status == 200
        assert found.pop() == "data: [DONE]"
        assert text_of([json.loads(line.removeprefix("data: ")) for line in found]) == expected
        served.wait_until_idle()


def test_other_lines_of_a_batch_are_answered(chat_bundle: Path, slow: SlowTower, tmp_path: Path) -> None:
    questions, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    (tmp_path / "photo.png").write_bytes(SQUARE)
    part = {"type": "image", "image": str(tmp_path / "photo.png")}
    lines = [[{"role": "user", "content": [part]}], *([{"role": "user", "content": text}] for text in ("a", "b", "ab"))]
    questions.write_text("".join(json.dumps({"prompt": line}) + "\n" for line in lines), "utf-8")

    def answered() -> list[int]:
        return (
            [json.loads(line)["line"] for line in answers.read_text("utf-8").splitlines()] if answers.exists() else []
        )

    def others() -> None:
        wait_until(lambda: len(answered()) == 3 or not slow.encodes)

    words = [str(questions), "--out", str(answers), "-n", "20", "--threads", "2", "--max-sequences", "2"]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(encoding, slow, others)
        assert main(["batch", str(chat_bundle), *words]) == 0
        waiting.result()
    assert answered() == [2, 3, 4, 1]
