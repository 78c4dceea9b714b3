"""Bundles of tiny random models with a vision tower, exported once per run."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ondevice
from ondevice import Model
from ondevice.bundle import CHAT_TEMPLATE, MANIFEST, RESPONSE_TEMPLATE, TOKENIZER, Bundle, sha256
from ondevice.bundle_format.manifest import FileEntry
from ondevice_export import export
from ondevice_export.response_templates import GEMMA_4 as GEMMA_4_RESPONSES
from tests.conftest import MakePair, Once
from tests.fixtures.tiny_models import SEEING
from tests.media.towers import reference_model
from tests.server.page.browsing import browser, open_page
from tests.text.templates import GEMMA_4_SEEING
from tests.text.tokenizers_made import gemma_seeing

__all__ = ["browser", "open_page"]


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


@pytest.fixture(scope="session", params=SEEING[:2])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def oracle(checkpoints: dict[str, Path], family: str) -> Any:
    """The family's model in transformers."""
    return reference_model(checkpoints[family], family)


@pytest.fixture(scope="session")
def chat_bundle(seeing: dict[tuple[str, str], Bundle], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with room for conversations about pictures, which take 70 tokens if nothing else is asked for, and with
    Gemma 4's form of replies.
    """
    origin = seeing["seeing", "int8"]
    directory = tmp_path_factory.mktemp("chat") / "seeing"
    shutil.copytree(origin.path, directory)
    (directory / RESPONSE_TEMPLATE).write_text(json.dumps(GEMMA_4_RESPONSES), "utf-8")
    manifest = origin.manifest
    assert manifest.vision is not None
    size, digest = (directory / RESPONSE_TEMPLATE).stat().st_size, sha256(directory / RESPONSE_TEMPLATE)
    turn_end = gemma_seeing().encode("<turn|>", add_special_tokens=False)
    changed = dataclasses.replace(
        manifest,
        name="seeing",
        target=dataclasses.replace(manifest.target, context_length=4096),
        vision=dataclasses.replace(manifest.vision, tokens=70),
        files={**manifest.files, RESPONSE_TEMPLATE: FileEntry(size, digest)},
        eos_token_ids=(*manifest.eos_token_ids, *turn_end),
    )
    (directory / MANIFEST).write_text(changed.to_json(), "utf-8")
    return directory


@pytest.fixture(scope="module")
def chat_model(chat_bundle: Path) -> Iterator[Model]:
    """Its model, which a server of the same module closes in the end."""
    with ondevice.load(chat_bundle, engine="simd", threads=1) as model:
        yield model
