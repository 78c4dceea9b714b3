"""Pairs and bundles are made once per family and shared: a test must not change them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from ondevice_export import export
from tests.tiny_models import FAMILIES, save_drafter, save_target


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
    directory = tmp_path_factory.mktemp(request.param)
    target = save_target(directory / "target", request.param)
    drafter = save_drafter(directory / "drafter", request.param)
    bundle = export(directory / "target", directory / "bundle", quantize="none")
    return Pair(request.param, directory, target, drafter, bundle)
