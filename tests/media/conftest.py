"""Bundles of tiny random models with a vision tower, exported once per run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ondevice.bundle import CHAT_TEMPLATE, TOKENIZER, Bundle
from ondevice_export import export
from tests.conftest import MakePair, Once
from tests.text.templates import GEMMA_4_SEEING
from tests.text.tokenizers_made import gemma_seeing
from tests.tiny_models import SEEING


@pytest.fixture(scope="session")
def checkpoints(make_pair: MakePair) -> dict[str, Path]:
    """Directories with a target, a drafter and heads, by family. The target has a tokenizer and a chat template."""
    made = {family: make_pair(family) for family in SEEING}
    for directory in made.values():
        (directory / "target" / TOKENIZER).write_text(gemma_seeing()._backend.to_str(), "utf-8")
        (directory / "target" / CHAT_TEMPLATE).write_text(GEMMA_4_SEEING, "utf-8")
    return made


@pytest.fixture(scope="session")
def seeing(checkpoints: dict[str, Path], once: Once, kernels: None) -> dict[tuple[str, str], Bundle]:
    """Bundles by family and weight format, `none` (float32) or `int8`."""

    def export_all(directory: Path) -> None:
        for family in SEEING:
            for quantize in ("none", "int8"):
                export(checkpoints[family] / "target", directory / family / quantize, quantize=quantize)

    directory = once("seeing", export_all)
    return {
        (family, quantize): Bundle.open(directory / family / quantize)
        for family in SEEING
        for quantize in ("none", "int8")
    }


@pytest.fixture(scope="session", params=SEEING)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def oracle(checkpoints: dict[str, Path], family: str) -> Any:
    """The family's model in transformers."""
    import torch
    import transformers

    torch.set_num_threads(1)
    return transformers.Gemma4ForConditionalGeneration.from_pretrained(checkpoints[family] / "target").eval()
