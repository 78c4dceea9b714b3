"""The desktop example, in a window that nobody sees."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import pytest

import ondevice
from tests.conftest import ROOT
from tests.fixtures.chat_bundle import Script, write_chat_bundle

if TYPE_CHECKING:
    from PySide6.QtWidgets import QApplication

    from examples.desktop.window import Window

pytestmark = pytest.mark.needs("pyside6")

PATIENCE_S = 300.0
QUESTION = "def fibonacci(n):"


@pytest.fixture(scope="module")
def application() -> QApplication:
    os.environ["QT_QPA_PLATFORM"] = "offscreen"
    try:
        from PySide6.QtWidgets import QApplication
    except ImportError as error:
        pytest.fail(
            f"Qt lacks a part of the system ({error}): apt-get install libegl1 libgl1 libxkbcommon0 libdbus-1-3"
        )
    return QApplication([])


@pytest.fixture
def window(application: QApplication) -> Iterator[Window]:
    from examples.desktop.window import Window

    before = set(threading.enumerate())  # other tests' pools may be among them
    made = Window()
    made.show()
    yield made
    made.close()
    assert [each for each in threading.enumerate() if each not in before and not each.daemon] == []


@pytest.fixture
def until(application: QApplication) -> Callable[[Callable[[], bool]], None]:
    def wait(holds: Callable[[], bool]) -> None:
        end = monotonic() + PATIENCE_S
        while not holds():
            assert monotonic() < end, "waited in vain"
            application.processEvents()

    return wait


def ask(window: Window, text: str) -> None:
    window.line.setText(text)
    window.button.click()
    assert window.busy


def test_a_chat(window: Window, until: Any, reference_bundle: Path, monkeypatch: pytest.MonkeyPatch,
                tmp_path: Path) -> None:  # fmt: skip
    from PySide6.QtWidgets import QFileDialog

    monkeypatch.setattr(QFileDialog, "getExistingDirectory", lambda *words: str(reference_bundle))
    window.choose.click()
    until(lambda: not window.busy)
    model = window.worker._model
    assert model is not None
    assert window.status.text() == f"{model.manifest.name} is ready"

    # one reply in five would end before it is cancelled
    monkeypatch.setattr(model, "stream", partial(model.stream, ignore_eos=True))
    shown: list[str] = []
    window.worker.said.connect(lambda *added: shown.append(added[0]))
    ask(window, QUESTION)
    until(lambda: len(shown) > 2)
    assert window.replies.text == "".join(shown)
    assert not window.replies.fold.isVisible()
    window.button.click()
    until(lambda: not window.busy)
    assert window.button.text() == "Send"
    assert window.status.text().endswith(", cancelled")
    assert "tokens/s" in window.status.text()
    assert window.grab().save(str(tmp_path / "window.png"))

    messages = window.worker._messages
    assert [message["role"] for message in messages] == ["user", "assistant"]
    assert messages[1]["content"] == window.replies.text
    ask(window, "def is_prime(n):")
    until(lambda: bool(window.replies.text))
    window.button.click()
    until(lambda: not window.busy)
    assert len(window.worker._messages) == 4


def test_stop_while_the_prompt_is_read(
    window: Window, until: Any, reference_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    window.open(str(reference_bundle))
    until(lambda: not window.busy)
    read, begun, go_on = window.worker._read, threading.Event(), threading.Event()

    def wait(done: int, total: int) -> None:
        begun.set()
        go_on.wait(PATIENCE_S)
        read(done, total)

    monkeypatch.setattr(window.worker, "_read", wait)
    ask(window, QUESTION)
    until(begun.is_set)
    window.button.click()
    go_on.set()
    until(lambda: not window.busy)
    assert window.status.text() == "stopped"
    assert window.replies.text == ""
    assert window.worker._messages == []
    monkeypatch.setattr(window.worker, "_read", read)
    ask(window, QUESTION)
    until(lambda: bool(window.replies.text))


def test_thoughts_are_folded(
    window: Window, until: Any, reference_bundle: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    window.open(str(write_chat_bundle(reference_bundle, tmp_path / "chat")))
    until(lambda: not window.busy)
    model = window.worker._model
    assert model is not None
    stream, asked = model.stream, []

    def scripted(prompt: Any, **options: Any) -> ondevice.Generation:
        asked.append(options["thinking"])
        count = len(model.encode(prompt, thinking=options["thinking"]))
        script = Script("<|channel>thought\nIs it?<channel|><b>It is</b>.<turn|>", count)
        return stream(prompt, logits_processors=[script], **options)

    monkeypatch.setattr(model, "stream", scripted)
    window.think.click()
    ask(window, "Is it?")
    until(lambda: not window.busy)
    assert asked == [True]
    assert window.replies.text == "<b>It is</b>."
    assert "&lt;b&gt;It is&lt;/b&gt;." in window.replies.answer.text()
    assert window.replies.thoughts.text() == "Is it?"
    assert window.replies.fold.isVisible()
    assert not window.replies.thoughts.isVisible()
    window.replies.fold.click()
    assert window.replies.thoughts.isVisible()
    assert window.status.text().endswith(", stop")


def test_a_download_shows_its_progress_and_can_be_stopped(
    window: Window, until: Any, reference_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from PySide6.QtWidgets import QInputDialog

    waits, go_on, asked = threading.Event(), threading.Event(), []

    def pull(repository: str, *, on_progress: Callable[[int, int], None], replace: bool) -> Path:
        asked.append(repository)
        on_progress(250_000_000, 1_000_000_000)
        waits.set()
        go_on.wait(PATIENCE_S)
        on_progress(1_000_000_000, 1_000_000_000)
        return reference_bundle

    monkeypatch.setattr(ondevice, "pull", pull)
    monkeypatch.setattr(QInputDialog, "getText", lambda *words: (" someone/model ", True))
    window.get.click()
    until(lambda: waits.is_set() and window.bar.value() == 25)
    assert window.status.text() == "downloading, 0.25 of 1.00 GB"
    assert not window.get.isEnabled()
    window.button.click()
    go_on.set()
    until(lambda: not window.busy)
    assert window.status.text() == "stopped"
    assert window.worker._model is None
    window.get.click()
    until(lambda: not window.busy)
    assert asked == ["someone/model"] * 2
    assert window.worker._model is not None
    assert window.status.text().endswith(" is ready")


def test_a_reply_opens_no_files(window: Window, tmp_path: Path) -> None:
    from PySide6.QtGui import QImage

    picture = QImage(300, 200, QImage.Format.Format_RGB32)
    picture.fill(0xFF0000)
    assert picture.save(str(tmp_path / "p.png"))
    window.replies.begin("Which?")
    window.replies.append(f'See ![a "red" > one]({tmp_path / "p.png"}) and ![](/x.png) **here**.', "")
    assert window.replies.answer.sizeHint().height() < 100  # the picture has 200
    text = window.replies.answer.text()
    assert "See a &quot;red&quot; &gt; one and" in text
    assert "<img" not in text


def test_memory_is_shown() -> None:
    from examples.desktop.worker import figures

    assert figures(ondevice.Stats(peak_rss_bytes=1_250_000_000)).endswith("accepted, 1.25 GB")
    assert figures(ondevice.Stats()).endswith("drafted tokens accepted")


def test_an_error_is_one_line(window: Window, until: Any, tmp_path: Path) -> None:
    ask(window, "Hello")
    until(lambda: not window.busy)
    assert window.status.text() == "choose a bundle first"
    window.open(str(tmp_path))
    until(lambda: not window.busy)
    assert window.status.text().startswith(f"no bundle at {tmp_path}")
    assert "\n" not in window.status.text()


@pytest.mark.parametrize("stopped_by", ["close", "stop"])
def test_preparing_shows_a_bar_and_ends_when_told(
    window: Window, until: Any, reference_bundle: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stopped_by: str
) -> None:
    monkeypatch.setenv("ONDEVICE_CACHE", str(tmp_path))
    ended: list[str] = []
    window.worker.ended.connect(ended.append)
    window.open(str(reference_bundle))
    until(window.bar.isVisible)
    assert window.status.text() in {"compiling kernels", "packing weights"}
    if stopped_by == "close":
        window.close()
    else:
        window.button.click()
    until(lambda: bool(ended))
    assert ended == ["stopped"]


WHILE = """
import sys
from PySide6.QtCore import QTimer
from PySide6.QtWidgets import QApplication
from examples.desktop.window import Window, main

def look(said=[]):
    [window] = [each for each in QApplication.topLevelWidgets() if isinstance(each, Window)]
    if not window.busy:
        window.line.setText("def fibonacci(n):")
        window.send()
    elif window.replies.__dict__.get("answer") and window.replies.text:
        window.close()

show, Window.show = Window.show, lambda window: (show(window), timer.start(10))
timer = QTimer()
timer.timeout.connect(look)
sys.exit(main())
"""


@pytest.mark.usefixtures("application")
def test_closing_the_window_ends_the_process(reference_bundle: Path) -> None:
    command = [sys.executable, "-c", WHILE, str(reference_bundle)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=PATIENCE_S)
    said = ended.stderr.replace("This plugin does not support propagateSizeHints()\n", "")  # Qt's offscreen one
    assert (ended.returncode, ended.stdout, said) == (0, "", "")
