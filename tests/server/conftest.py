import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import ondevice
from ondevice import Generation, Model, Prompt
from ondevice.engines.protocol import Rows
from tests.fixtures.chat_bundle import Script, write_chat_bundle
from tests.fixtures.model_made import model_over, write_bundle
from tests.fixtures.toy_engine import ToyEngine
from tests.server.page.browsing import browser, open_page, relay
from tests.server.served import PATIENCE_S, Served, serving

__all__ = ["browser", "open_page", "relay"]

CHAT_OPTIONS = ("tools", "thinking", "template_options", "continue_final")


@pytest.fixture(scope="session")
def served_model(reference_bundle: Path) -> Iterator[Model]:
    """The model behind `served`, for direct calls."""
    with ondevice.load(reference_bundle, engine="simd", threads=1) as model:
        yield model


@pytest.fixture(scope="session")
def served(reference_bundle: Path, served_model: Model) -> Iterator[Served]:
    """The reference bundle, served."""
    with serving(reference_bundle, lambda: served_model) as server:
        yield server
        server.wait_until_idle()  # fails if a request leaked its slot or its place in the queue


class Scripted(NamedTuple):
    """A server whose model generates the text that a test sets, in Gemma 4's chat format."""

    served: Served
    model: Model
    says: Callable[[str], None]


@pytest.fixture(scope="session")
def chatting_model(reference_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Model]]:
    """A bundle with Gemma 4's chat format, and its model."""
    bundle = write_chat_bundle(reference_bundle, tmp_path_factory.mktemp("chat") / "chat", do_sample=True)
    with ondevice.load(bundle, engine="simd", threads=1) as model:
        yield bundle, model


@pytest.fixture(scope="session")
def chatting(chatting_model: tuple[Path, Model]) -> Iterator[Served]:
    """A server of that bundle. Its texts are noise."""
    bundle, model = chatting_model
    with serving(bundle, lambda: model) as served:
        yield served
        served.wait_until_idle()


@pytest.fixture
def scripted(chatting: Served, chatting_model: tuple[Path, Model], monkeypatch: pytest.MonkeyPatch) -> Scripted:
    _, model = chatting_model
    text = ["<turn|>"]
    stream = model.stream

    def say(prompt: Prompt, **options: Any) -> Generation:
        chat = {name: options[name] for name in CHAT_OPTIONS if name in options}
        script = Script(text[0], len(model.encode(prompt, **chat)))
        return stream(prompt, logits_processors=[script], **options)

    monkeypatch.setattr(model, "stream", say)
    return Scripted(chatting, model, lambda wanted: text.__setitem__(0, wanted))


class Gate:
    """Lets forwards of the toy engine pass, or blocks them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._passes: int | None = None
        """Number of forwards that may pass; None for all."""
        self.arrived = 0

    def close(self, *, behind: int = 0) -> None:
        """Block forwards after `behind` more have passed."""
        with self._changed:
            self._passes = behind

    def open(self) -> None:
        """Let all forwards pass."""
        with self._changed:
            self._passes = None
            self._changed.notify_all()

    def step(self) -> None:
        """Let one more pass."""
        with self._changed:
            self._passes = 1 if self._passes is None else self._passes + 1
            self._changed.notify_all()

    def __call__(self, batch: Sequence[Rows]) -> None:
        with self._changed:
            self.arrived += 1
            assert self._changed.wait_for(lambda: self._passes is None or self._passes > 0, PATIENCE_S)
            if self._passes is not None:
                self._passes -= 1


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def toy_bundle(tmp_path: Path) -> Path:
    return write_bundle(tmp_path / "toy")


@pytest.fixture
def serve_toy(toy_bundle: Path, gate: Gate) -> Callable[..., AbstractContextManager[Served]]:
    """Serves the toy engine, whose forwards pass the gate. Its texts do not end by themselves."""

    @contextmanager
    def start(*, context_length: int = 400, max_sequences: int = 2, **setup: Any) -> Iterator[Served]:
        def load() -> Model:
            return model_over(ToyEngine(context_length, chunk=16, before=gate), toy_bundle, max_sequences=max_sequences)

        with serving(toy_bundle, load, max_sequences=max_sequences, **setup) as served:
            try:
                yield served
            finally:
                gate.open()

    return start
