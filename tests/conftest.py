"""Bundles that many tests share, each exported once per run."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from pathlib import Path

import pytest

import ondevice
from ondevice import Model
from ondevice_export import export

ROOT = Path(__file__).parent.parent
REFERENCE = ROOT / "models" / "reference"


def pytest_report_header() -> str:
    names = ("numpy", "numba", "onnxruntime", "tokenizers", "onnx-ir", "transformers", "torch")
    return "with " + ", ".join(f"{name} {_version(name)}" for name in names)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


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
    backend = pytest.importorskip("hatchling.build")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(project)
        return directory / str(backend.build_wheel(str(directory)))


@pytest.fixture(scope="session", params=["simd", "ort"])
def reference_model(request: pytest.FixtureRequest, reference_bundle: Path) -> Iterator[Model]:
    with ondevice.load(reference_bundle, engine=request.param, threads=2) as model:
        yield model
