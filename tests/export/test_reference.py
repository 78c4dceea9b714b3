"""A checkpoint as the reference of its bundles: the command over real graphs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ondevice.bundle import Bundle
from ondevice.cli.main import main
from ondevice_export import export
from ondevice_export.reference import reference_bundle
from tests.conftest import REFERENCE


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.py"
    path.write_text(Path(__file__).read_text("utf-8"), "utf-8")
    return path


def test_wider_weights_are_closer_to_the_checkpoint(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {}
    for quantize in ("none", "int8", "int4"):
        bundle = export(REFERENCE / "target", tmp_path / quantize, quantize=quantize, drafter="none", heads="none")
        words = ["check", bundle, "--against", REFERENCE / "target", "--text", text, "--json"]
        assert main([str(word) for word in words]) == 0
        found[quantize] = json.loads(capsys.readouterr().out)
    kl = {quantize: each["kl"]["value"] for quantize, each in found.items()}
    assert abs(kl["none"]) < 1e-6
    assert found["none"]["same_top"]["value"] == 1
    assert 1e-5 < kl["int8"] < 0.02 < kl["int4"] < 0.5


def test_the_temporary_bundle_is_removed() -> None:
    with reference_bundle(str(REFERENCE / "target"), lambda done, total: None, 64) as bundle:
        assert Bundle.open(bundle.path).manifest.quantization.weights == "none"
        assert bundle.manifest.drafter is None
    assert not bundle.path.parent.exists()
