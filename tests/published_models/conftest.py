"""The two published models, exported from their GGUF files, and transformers' reading of the same files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import ondevice
from ondevice import Model
from ondevice_export import export
from tests.conftest import Once
from tests.fixtures.published import published

MODELS = ("smollm2", "gemma3")

MakeBundle = Callable[[str, str], Path]
LoadModel = Callable[..., Model]


@pytest.fixture(scope="session")
def published_bundle(once: Once, kernels: None) -> MakeBundle:
    """A function: (name of the model, weights) -> its bundle; each is exported once per run of the tests."""

    def make(name: str, weights: str) -> Path:
        gguf = published(name)
        return once(f"{name}-{weights}", lambda place: export(gguf, place / name, quantize=weights)) / name

    return make


@pytest.fixture(scope="module")
def loaded(published_bundle: MakeBundle) -> Iterator[LoadModel]:
    """A function: (name, weights, options of `ondevice.load`) -> the model, loaded where it is first asked for.

    With one thread, as `reference_model`.
    """
    with ExitStack() as models:

        @cache
        def load(name: str, weights: str = "keep", engine: str = "simd", **options: Any) -> Model:
            return models.enter_context(
                ondevice.load(published_bundle(name, weights), engine=engine, threads=1, **options)  # type: ignore[arg-type]
            )

        yield load


@pytest.fixture(scope="module")
def oracle(in_transformers: Callable[[str], Any]) -> Callable[[str], Any]:
    """`in_transformers`, where each model is loaded once."""
    return cache(in_transformers)
