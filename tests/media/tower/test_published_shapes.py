"""The vision tower of 26B-A4B and 31B at its published widths, with random weights, against transformers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from benchmarks.bundles.gemma4 import LARGE_VISION
from benchmarks.bundles.random_checkpoints import RandomTower
from benchmarks.bundles.shape import target_model, with_towers
from ondevice.bundle_format import graph_io
from ondevice.bundle_format.vision import PROJECTION, VisionEntry
from ondevice.media.images import Pixels
from ondevice_export.checkpoint.models import TargetCheckpoint
from ondevice_export.checkpoint.towers import PREFIX
from ondevice_export.export_options import ExportOptions
from ondevice_export.graph_files import GraphFiles
from tests.media.pictures_made import noise

SIZE = "26B-A4B"
pytestmark = pytest.mark.needs("oracle", "onnxruntime")


def expected_rows(target: TargetCheckpoint, vision: VisionEntry, picture: Pixels) -> Any:
    """float32[S, H], the soft rows by transformers' model with the weights of the target's tower."""
    import torch
    import transformers
    from transformers.models.gemma4.modeling_gemma4 import Gemma4MultimodalEmbedder, Gemma4VisionModel

    config = transformers.Gemma4VisionConfig(
        hidden_size=vision.hidden_size,
        intermediate_size=vision.intermediate_size,
        num_hidden_layers=vision.layers,
        num_attention_heads=vision.query_heads,
        num_key_value_heads=vision.query_heads,
        head_dim=vision.head_dim,
        standardize=True,
        use_clipped_linears=False,
    )
    tower, weights = cast(RandomTower, target.checkpoint), dict[str, torch.Tensor]()
    for name, shape in tower._shapes.items():
        rows = tower.read(name) if len(shape) == 1 else tower.rows(name, 0, int(np.prod(shape[:-1])))
        weights[name.removeprefix(PREFIX)] = torch.tensor(rows).reshape(shape)
    projector = Gemma4MultimodalEmbedder(config, transformers.Gemma4TextConfig(hidden_size=target.config.hidden_size))
    projector.load_state_dict({"embedding_projection.weight": weights.pop(PROJECTION)})
    model = Gemma4VisionModel(config)
    model.load_state_dict({name.removeprefix("vision_tower."): weight for name, weight in weights.items()})
    feeds = picture.feeds()
    patches, column, row = (feeds[name] for name in (graph_io.PATCHES, graph_io.COLUMN, graph_io.ROW))
    order = np.lexsort((column, row))
    places = torch.tensor(np.stack([column, row], -1)[order])[None]
    with torch.no_grad():
        pooled = model.eval()(torch.tensor(patches[order])[None], places).last_hidden_state
        return projector(pooled).numpy().reshape(picture.tokens, -1)


@pytest.mark.parametrize("layers", [1, pytest.param(27, marks=pytest.mark.slow)])
def test_the_large_tower(tmp_path: Path, layers: int) -> None:
    """Rows of the layers are 1,152 and 4,304 weights wide, heads 72: the last two are not multiples of 32."""
    import onnxruntime

    vision = dataclasses.replace(LARGE_VISION, layers=layers)
    target = with_towers(target_model(SIZE, tmp_path), vision, None, clipped=False)
    picture = Pixels(noise(3 * vision.side, 4 * vision.side), vision.patch, vision.pool)
    expected = expected_rows(target, vision, picture)
    assert expected.shape == (12, 2816)
    found = {}
    for quantize in ("none", "int8"):
        (directory := tmp_path / quantize).mkdir()
        GraphFiles(directory, ExportOptions(quantize=quantize), lambda _: None).write_vision(vision, target)
        session = onnxruntime.InferenceSession(directory / vision.graph)
        (found[quantize],) = session.run([graph_io.SOFT_ROWS], dict(picture.feeds()))
    np.testing.assert_allclose(found["none"], expected, atol=1e-4 * np.abs(expected).max(), rtol=0)
    norms = np.linalg.norm(found["int8"], axis=1) * np.linalg.norm(expected, axis=1)
    cosines = (found["int8"] * expected).sum(axis=1) / norms
    assert 0.99 < cosines.min() <= cosines.max() < 1 - 1e-6
