"""Fixtures for the bundles and kernels that many tests share, and the options that leave tests out.

Bundles are exported once per run, also if several processes of pytest-xdist share the tests. A missing package does not
skip tests by itself: it has to be named with `--without`.
"""

from __future__ import annotations

import gc
import importlib.metadata
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import ondevice
from ondevice import Model
from ondevice.native.sets import PARTS as PARTS_OF_KERNELS
from ondevice.preparation import Preparation
from ondevice_export import export
from tests.fixtures.guards import Guards
from tests.fixtures.tiny_models import save
from tests.fixtures.toy_engine import Clock

ROOT = Path(__file__).parent.parent
REFERENCE = ROOT / "models" / "reference"

PARTS = {
    "oracle": (
        "engines/test_drafters_of_families.py",
        "export",
        "published_models/test_against_llama.py",
        "published_models/test_against_transformers.py",
        "recipe",
    ),
    "onnxruntime": (
        "engines/test_exactness.py",
        "engines/test_ort.py",
        "engines/test_ort_sessions.py",
    ),
    "mypy": (),
    "clients": (
        "media/entrances/test_page.py",
        "media/entrances/test_server.py",
        "server/apis/test_anthropic.py",
        "server/test_background.py",
        "server/apis/test_ollama.py",
        "server/apis/test_openai_client.py",
        "server/page/test_page.py",
        "server/page/test_page_reading.py",
        "server/page/test_page_replies.py",
        "server/apis/test_responses.py",
    ),
    "llguidance": ("grammar",),
    "ray": ("cli/batch/test_cluster.py",),
    "rich": ("cli/terminal/test_markdown_view.py",),
    "pyside6": ("examples/test_desktop.py",),
}
"""The parts that `--without` accepts, and the test files that cannot be imported without each part.

Tests in other files have the marker `needs`.

oracle : torch, transformers, optimum, gguf and llama.cpp, whose results ours are compared with
clients : the clients of OpenAI and Anthropic, and a browser's
ray : ray, which has no wheels for Intel Macs and the newest Python versions
"""

ENGINES = ("simd", pytest.param("ort", marks=pytest.mark.needs("onnxruntime")))
"""Parameters for tests that run on both engines."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ondevice")
    group.addoption("--without", action="append", default=[], choices=list(PARTS), help="leave out its tests")
    group.addoption("--tiny-models", metavar="DIR", help="made by tests.fixtures.tiny_models, with the oracle")
    group.addoption("--shuffle", metavar="SEED", help="run the files, and the tests of each, in a random order")
    group.addoption("--slow-page", metavar="RATE", type=float, default=1.0, help="slow the browser down so many times")
    group.addoption("--pictures", action="store_true", help="write the page's pictures to docs/images")


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a shell's background job; child processes inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line("markers", "slow: takes longer than 20 s by itself; `make slow` runs only these")
    config.addinivalue_line("markers", f"needs(*parts): what a run can be `--without`: {', '.join(PARTS)}")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect tests without the garbage collector, which would visit a million objects, torch's and the tests', again
    and again: 3 of 13 s in every process.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    missing = [name for part in config.getoption("--without") for name in PARTS[part]]
    return True if any(collection_path == ROOT / "tests" / name for name in missing) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out and shuffle tests, before pytest groups those that share a parameter of a module's fixture."""
    missing = set(config.getoption("--without"))
    left_out = [item for item in items if any(missing.intersection(mark.args) for mark in item.iter_markers("needs"))]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    if seed := config.getoption("--shuffle"):
        chance = random.Random(seed)
        places = {path: chance.random() for path in sorted({item.path for item in items})}
        chance.shuffle(items)
        items.sort(key=lambda item: places[item.path])


def pytest_report_header(config: pytest.Config) -> str:
    names = ("numpy", "numba", "onnxruntime", "tokenizers", "llguidance", "onnx-ir", "transformers", "torch")
    found = "with " + ", ".join(f"{name} {_version(name)}" for name in names)
    missing = config.getoption("--without")
    return f"{found}; tests left out that need: {', '.join(missing)}" if missing else found


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


@pytest.fixture(autouse=True, scope="session")
def no_costs_of_other_runs() -> Iterator[None]:
    """Disable the costs file, so that costs measured in earlier runs do not change how much tests draft."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ondevice.model._costs_file", lambda *about: None)
        yield


@pytest.fixture
def guards() -> Iterator[Guards]:
    """Arrays between guard bytes, which are checked when the test ends."""
    made = Guards()
    yield made
    made.check()


@contextmanager
def only_one(lock: Path) -> Iterator[None]:
    """Hold a lock file for the block: other processes of this run wait for it."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        yield
        return
    import fcntl

    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], object]], Path]:
    """A function `once(name, make)`: it calls `make(directory)` once per run and name, and returns the directory."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def make_once(name: str, make: Callable[[Path], object]) -> Path:
        directory, done = shared / name, shared / f"{name}.done"
        with only_one(shared / f"{name}.lock"):
            if not done.exists():
                directory.mkdir()
                make(directory)
                done.touch()
        return directory

    return make_once


MakePair = Callable[[str], Path]


@pytest.fixture(scope="session")
def make_pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> MakePair:
    """A function that makes a directory with a family's tiny target, and for Gemma 4 its drafter and heads; or copies
    `--tiny-models`.
    """
    saved: str | None = request.config.getoption("--tiny-models")

    def make(family: str) -> Path:
        directory = tmp_path_factory.mktemp(family)
        if saved:
            shutil.copytree(Path(saved, family), directory, dirs_exist_ok=True)
        else:
            save(family, directory)
        return directory

    return make


Once = Callable[[str, Callable[[Path], object]], Path]


@pytest.fixture(scope="session")
def in_transformers(once: Once) -> Callable[[str], Any]:
    """A function: name of a published GGUF file -> the model in float32 as transformers reads it from the file.

    It is read once per run, which takes 20 s for SmolLM2, and then loaded as PyTorch saved it.
    """

    def load(name: str) -> Any:
        import torch
        from transformers import AutoModelForCausalLM

        from tests.fixtures.published import published

        gguf = published(name)

        def read(directory: Path) -> None:
            model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
            torch.save(model.eval(), directory / "model.pt")

        return torch.load(once(f"{name}-in-transformers", read) / "model.pt", weights_only=False, mmap=True)

    return load


@pytest.fixture(scope="session")
def reference_export(once: Once) -> Path:
    """The bundle of the repository's reference pair, exported as by `make pair`: int4 weights, int8 head."""
    return once("bundles", lambda directory: export(REFERENCE / "target", directory / "reference")) / "reference"


@pytest.fixture(scope="session")
def first_preparation(once: Once, reference_export: Path) -> Path:
    """A cache directory, filled by `ondevice export` and then `prepare` from empty; what both commands wrote to their
    standard errors is in `export` and `prepare`.
    """

    def prepare(directory: Path) -> None:
        environment = {**os.environ, "ONDEVICE_CACHE": str(directory / "cache")}
        target, out = str(REFERENCE / "target"), str(directory / "reference")
        for words in (["export", target, "--out", out], ["prepare", str(reference_export)]):
            command = [sys.executable, "-m", "ondevice", *words]
            ended = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
            (directory / words[0]).write_text(ended.stderr, "utf-8")

    return once("prepared", prepare)


@pytest.fixture(scope="session")
def kernels(once: Once) -> None:
    """Make sure that this machine has all kernels."""

    def build(_: Path) -> None:
        with Preparation() as preparation:
            preparation.compile(PARTS_OF_KERNELS)
            preparation.finish()

    once("kernels", build)


@pytest.fixture(scope="session")
def reference_bundle(reference_export: Path, kernels: None) -> Path:
    """`reference_export`, with compiled kernels in the cache."""
    return reference_export


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of generations on the toy engine in this test."""
    return Clock(monkeypatch)


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The path of the built wheel of ondevice-runtime."""
    return build_wheel(ROOT, tmp_path_factory.mktemp("wheel"))


def build_wheel(project: Path, directory: Path) -> Path:
    """Build a project's wheel offline; the build backend has to be installed, which the extra `[test]` does."""
    backend = import_module("hatchling.build")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(project)
        return directory / str(backend.build_wheel(str(directory)))


@pytest.fixture(scope="session", params=ENGINES)
def reference_model(request: pytest.FixtureRequest, reference_bundle: Path) -> Iterator[Model]:
    """With one thread: several would wait at every barrier for a core that another process of the tests has."""
    with ondevice.load(reference_bundle, engine=request.param, threads=1) as model:
        yield model
