"""Pairs and bundles are made once per family and shared: a test must not change them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from ondevice_export import export
from tests.fixtures.tiny_models import FAMILIES, save_drafter, save_heads, save_target

torch.set_num_threads(1)  # the models are too small to share


@dataclass(frozen=True)
class Pair:
    family: str
    directory: Path
    target: PreTrainedModel
    drafter: PreTrainedModel
    bundle: Path
    """Exported as float32."""


@pytest.fixture(scope="session", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Every family in turn."""
    return _make(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="session")
def e2b(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """For what does not depend on the family."""
    return _make("e2b", tmp_path_factory.mktemp("e2b"))


def _make(family: str, directory: Path) -> Pair:
    target = save_target(directory / "target", family)
    drafter = save_drafter(directory / "drafter", family)
    save_heads(directory / "heads", directory / "target", family)
    bundle = export(directory / "target", directory / "bundle", quantize="none")
    return Pair(family, directory, target, drafter, bundle)
