import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import ondevice
from ondevice import Generation, Model, Prompt
from ondevice.engines.protocol import Rows
from tests.chat_bundle import Script, write_chat_bundle
from tests.model_made import model_over, write_bundle
from tests.server.served import PATIENCE_S, Served, serving
from tests.toy_engine import ToyEngine


@pytest.fixture(scope="session")
def served_model(reference_bundle: Path) -> Iterator[Model]:
    """The model behind `served`, to ask it directly."""
    with ondevice.load(reference_bundle, engine="simd", threads=1) as model:
        yield model


@pytest.fixture(scope="session")
def served(reference_bundle: Path, served_model: Model) -> Iterator[Served]:
    """The reference bundle, served."""
    with serving(reference_bundle, lambda: served_model) as server:
        yield server
        server.wait_until_idle()  # no request left anything behind, whatever became of it


class Scripted(NamedTuple):
    """A server whose model says what a test wants, in Gemma 4's chat format."""

    served: Served
    model: Model
    says: Callable[[str], None]


@pytest.fixture(scope="session")
def chatting_model(reference_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Model]]:
    """A bundle that speaks Gemma 4's chat format, and its model."""
    bundle = write_chat_bundle(reference_bundle, tmp_path_factory.mktemp("chat") / "chat", do_sample=True)
    with ondevice.load(bundle, engine="simd", threads=1) as model:
        yield bundle, model


@pytest.fixture(scope="session")
def chatting(chatting_model: tuple[Path, Model]) -> Iterator[Served]:
    """That bundle, served; what it says is noise."""
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
        chat = {name: options[name] for name in ("tools", "thinking", "template_options") if name in options}
        script = Script(text[0], len(model.encode(prompt, **chat)))
        return stream(prompt, logits_processors=[script], **options)

    monkeypatch.setattr(model, "stream", say)
    return Scripted(chatting, model, lambda wanted: text.__setitem__(0, wanted))


class Gate:
    """Lets forwards of the toy engine pass, or holds them up."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._places: int | None = None
        """How many may pass; None for all."""
        self.arrived = 0

    def close(self, *, behind: int = 0) -> None:
        """After some more have passed."""
        with self._changed:
            self._places = behind

    def open(self) -> None:
        with self._changed:
            self._places = None
            self._changed.notify_all()

    def step(self) -> None:
        """One more may pass."""
        with self._changed:
            self._places = 1 if self._places is None else self._places + 1
            self._changed.notify_all()

    def __call__(self, batch: Sequence[Rows]) -> None:
        with self._changed:
            self.arrived += 1
            assert self._changed.wait_for(lambda: self._places is None or self._places > 0, PATIENCE_S)
            if self._places is not None:
                self._places -= 1


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def toy_bundle(tmp_path: Path) -> Path:
    return write_bundle(tmp_path / "toy")


@pytest.fixture
def serve_toy(toy_bundle: Path, gate: Gate) -> Callable[..., AbstractContextManager[Served]]:
    """Serves the toy engine, whose forwards pass the gate; its texts have no end."""

    @contextmanager
    def start(*, context_length: int = 400, places: int = 2, **setup: Any) -> Iterator[Served]:
        def load() -> Model:
            return model_over(ToyEngine(context_length, chunk=16, before=gate), toy_bundle, max_sequences=places)

        with serving(toy_bundle, load, places=places, **setup) as served:
            try:
                yield served
            finally:
                gate.open()

    return start
