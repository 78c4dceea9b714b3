"""Bundles that many tests share, each exported once per run; and which tests are left out where something is missing.

Nothing is skipped because it is missing: it has to be named, with `--without`.
"""

from __future__ import annotations

import importlib.metadata
import shutil
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pytest

import ondevice
from ondevice import Model
from ondevice_export import export
from tests.tiny_models import save_pair
from tests.trained_models import TRAINED, save_trained_pair

ROOT = Path(__file__).parent.parent
REFERENCE = ROOT / "models" / "reference"

PARTS = {
    "oracle": ("export", "recipe"),
    "onnxruntime": (
        "engines/test_exactness.py",
        "engines/test_ort.py",
        "engines/test_ort_sessions.py",
    ),
    "mypy": (),
    "clients": ("server/test_anthropic.py", "server/test_openai.py", "server/test_page.py", "server/test_responses.py"),
    "llguidance": ("grammar",),
    "ray": ("terminal/batch/test_cluster.py",),
    "pyside6": ("examples/test_desktop.py",),
}
"""What a run can do without, and the tests that cannot even be imported then; others say `needs`.

oracle : torch, transformers and optimum, which results are compared with
clients : of OpenAI and Anthropic, and a browser's
ray : which has no wheels for Intel Macs and the newest Pythons
"""

ENGINES = ("simd", pytest.param("ort", marks=pytest.mark.needs("onnxruntime")))
"""For tests that both engines pass."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ondevice")
    group.addoption("--without", action="append", default=[], choices=list(PARTS), help="leave out its tests")
    group.addoption("--tiny-models", metavar="DIR", help="made by `python -m tests.tiny_models DIR`, with the oracle")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes longer than 20 s by itself; `make slow` runs only these")
    config.addinivalue_line("markers", f"needs(*parts): what a run can be `--without`: {', '.join(PARTS)}")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    missing = [name for part in config.getoption("--without") for name in PARTS[part]]
    return True if any(collection_path == ROOT / "tests" / name for name in missing) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    missing = set(config.getoption("--without"))
    left_out = [item for item in items if any(missing.intersection(mark.args) for mark in item.iter_markers("needs"))]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


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
    """What a busy machine measured yesterday decides nothing about today's drafts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ondevice.loading._costs_file", lambda *about: None)
        yield


MakePair = Callable[[str], Path]


@pytest.fixture(scope="session")
def make_pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> MakePair:
    """Makes a new directory with a family's tiny target, drafter and heads, or copies those of `--tiny-models`."""
    saved: str | None = request.config.getoption("--tiny-models")

    def make(family: str) -> Path:
        directory = tmp_path_factory.mktemp(family)
        if saved:
            shutil.copytree(Path(saved, family), directory, dirs_exist_ok=True)
        else:
            (save_trained_pair if family in TRAINED else save_pair)(directory, family)
        return directory

    return make


@pytest.fixture(scope="session")
def reference_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pair that ships with the repository, as `make demo` exports it: int4 weights, int8 head."""
    return export(REFERENCE / "target", tmp_path_factory.mktemp("bundles") / "reference")


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of ondevice-runtime."""
    return build_wheel(ROOT, tmp_path_factory.mktemp("wheel"))


def build_wheel(project: Path, directory: Path) -> Path:
    """Build without a network, so the build backend must be installed: it comes with the extra `[test]`."""
    backend = import_module("hatchling.build")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(project)
        return directory / str(backend.build_wheel(str(directory)))


@pytest.fixture(scope="session", params=ENGINES)
def reference_model(request: pytest.FixtureRequest, reference_bundle: Path) -> Iterator[Model]:
    with ondevice.load(reference_bundle, engine=request.param, threads=2) as model:
        yield model
