"""The audio tower's graph against transformers, layer by layer, and how long its output is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ondevice.bundle import Bundle
from ondevice.bundle_format import graph_io
from ondevice.errors import CheckpointError
from ondevice.media.sounds import Samples
from ondevice_export import export
from tests.fixtures.tiny_models import AUDIO_KEYS, AUDIO_LAYERS, MEL_BINS
from tests.media.sounds_made import tone
from tests.media.towers import audio_tower, encoded, reference_model

pytestmark = pytest.mark.needs("oracle", "onnxruntime")

FAMILY = "seeing"


@pytest.fixture(scope="module")
def model(checkpoints: dict[str, Path]) -> Any:
    return reference_model(checkpoints[FAMILY], FAMILY)


@pytest.mark.parametrize("frames", [1, 2, 3, 4, 5, 8 * AUDIO_KEYS, 8 * AUDIO_KEYS + 1, 131])
def test_every_layer(seeing: dict[tuple[str, str], Bundle], model: Any, tmp_path: Path, frames: int) -> None:
    """All peculiarities are randomised: ranges of linear layers, scales of queries, norms."""
    import onnx
    import onnxruntime
    import torch

    directory = Path(shutil.copytree(seeing[FAMILY, "none"].path, tmp_path / "bundle"))
    graph = onnx.load(directory / "audio.onnx", load_external_data=False)
    ends = []
    for index in range(AUDIO_LAYERS):
        ends.append([node.output[0] for node in graph.graph.node if node.name.startswith(f"layers.{index}/")][-1])
        graph.graph.output.append(onnx.helper.make_tensor_value_info(ends[-1], onnx.TensorProto.FLOAT, None))
    onnx.save(graph, directory / "audio.onnx")
    mel = np.random.default_rng(frames).normal(-2, 2, (frames, MEL_BINS)).astype(np.float32)
    session = onnxruntime.InferenceSession(directory / "audio.onnx")
    rows, *layers = session.run([graph_io.SOFT_ROWS, *ends], {graph_io.SOUND: mel})

    found: list[Any] = []
    hooks = [
        each.register_forward_hook(lambda module, arguments, output: found.append(output[0].numpy()))
        for each in model.model.audio_tower.layers
    ]
    with torch.no_grad():
        mask = torch.ones(1, frames, dtype=torch.bool)
        expected = model.model.get_audio_features(torch.tensor(mel)[None], mask).pooler_output[0].numpy()
    for hook in hooks:
        hook.remove()
    count = -(-frames // 4)
    assert len(found) == len(layers) == AUDIO_LAYERS
    for layer, each in zip(layers, found, strict=True):
        np.testing.assert_allclose(layer[:count], each, atol=1e-4, rtol=0)
    np.testing.assert_allclose(rows, expected, atol=1e-4, rtol=0)
    assert rows.shape == (count, 64)
    assert np.abs(rows).max() > 0.1


def test_what_comes_later_changes_nothing(seeing: dict[tuple[str, str], Bundle]) -> None:
    bundle, sound = seeing[FAMILY, "none"], tone(1.5)
    tower, entry = audio_tower(bundle), bundle.manifest.audio
    assert entry is not None
    whole = encoded(tower, Samples(sound, entry))
    begun = encoded(tower, Samples(sound[:16_000], entry))
    np.testing.assert_allclose(begun[:-1], whole[: len(begun) - 1], atol=1e-5)  # the last row hears the end
    assert len(whole) == 38


def test_a_checkpoint_without_tower(seeing: dict[tuple[str, str], Bundle]) -> None:
    manifest = seeing["seeing-e4b", "none"].manifest
    assert manifest.audio is None
    assert "audio" not in json.loads((seeing["seeing-e4b", "none"].path / "bundle.json").read_text())


def test_text_only_leaves_both_towers_out(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    notes: list[str] = []
    path = export(checkpoints[FAMILY] / "target", tmp_path / "b", quantize="none", text_only=True, note=notes.append)
    assert not Bundle.open(path).manifest.reads_media
    assert any("vision and audio tensors" in note for note in notes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
        ({"attention_context_right": 1}, "attention_context_right 1 is not supported"),
        ({"gradient_clipping": 0.5}, "gradient_clipping 0.5 is not supported.*--text-only"),
        ({"attention_invalid_logits_value": -5.0}, "attention_invalid_logits_value -5.0 is not supported"),
        ({"attention_chunk_size": 5}, "blocks of 5 rows that see 4"),
        ({"subsampling_conv_channels": [16]}, "subsampling_conv_channels"),
        ({"num_hidden_layers": 1}, "has no place in the audio tower"),
        ({"num_hidden_layers": 3}, "is missing|has no tensor|lacks"),
        ({"hidden_size": 36}, "shape"),
    ],
)
def test_configurations_that_are_refused(
    checkpoints: dict[str, Path], tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    directory = Path(shutil.copytree(checkpoints[FAMILY] / "target", tmp_path / "target"))
    config = json.loads((directory / "config.json").read_text())
    config["audio_config"] |= change
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        export(directory, tmp_path / "bundle", quantize="none", drafter="none")


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        (FAMILY, {"sampling_rate": 8000}, "sampling_rate 16000, not 8000"),
        (FAMILY, {"feature_size": MEL_BINS + 4}, f"feature_size {MEL_BINS}, not {MEL_BINS + 4}"),
        ("seeing-12b", {"sampling_rate": 8000}, "sampling_rate 16000, not 8000"),
        ("seeing-12b", {"audio_samples_per_token": 32}, "audio_samples_per_token 64, not 32"),
    ],
)
def test_a_processor_with_other_settings_is_refused(
    checkpoints: dict[str, Path], tmp_path: Path, family: str, settings: dict[str, int], message: str
) -> None:
    directory = Path(shutil.copytree(checkpoints[family] / "target", tmp_path / "target"))
    (directory / "processor_config.json").write_text(json.dumps({"feature_extractor": settings}))
    with pytest.raises(CheckpointError, match=message):
        export(directory, tmp_path / "bundle", quantize="none", drafter="none")


def test_linear_layers_have_ranges_unless_the_configuration_says_otherwise(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """The default of transformers' audio towers is not that of its vision towers."""
    directory = Path(shutil.copytree(checkpoints[FAMILY] / "target", tmp_path / "target"))
    config = json.loads((directory / "config.json").read_text())
    assert config["audio_config"].pop("use_clipped_linears")
    (directory / "config.json").write_text(json.dumps(config))
    assert Bundle.open(export(directory, tmp_path / "bundle", quantize="none", drafter="none")).manifest.audio
