"""The tower's graph against transformers, layer by layer, and exports of towers that are not as they should be."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ondevice
from ondevice.bundle import Bundle
from ondevice.bundle_format import graph_io
from ondevice.bundle_format.interfaces import vision_interface
from ondevice.engines.graph_check import check_graph
from ondevice.errors import BundleCorruptError, CheckpointError
from ondevice.media.images import Pixels
from ondevice_export import export
from ondevice_export.matrices import MAX_ACTIVATION
from tests.fixtures.tiny_models import PATCH, POOL, TOWER_HIDDEN, TOWER_LAYERS
from tests.media.pictures_made import noise
from tests.media.towers import encoded, vision_tower

PICTURE = Pixels(noise(5 * PATCH * POOL, 3 * PATCH * POOL), PATCH, POOL)
pytestmark = pytest.mark.needs("oracle", "onnxruntime")


def test_every_layer(seeing: dict[tuple[str, str], Bundle], family: str, oracle: Any, tmp_path: Path) -> None:
    """All peculiarities are randomised: ranges of linear layers, positions, norms, shift and scale."""
    import onnx
    import onnxruntime
    import torch

    bundle = seeing[family, "none"]
    directory = Path(shutil.copytree(bundle.path, tmp_path / "bundle"))
    graph = onnx.load(directory / "vision.onnx", load_external_data=False)
    ends = []
    for index in range(TOWER_LAYERS):
        ends.append([node.output[0] for node in graph.graph.node if node.name.startswith(f"layers.{index}/")][-1])
        graph.graph.output.append(onnx.helper.make_tensor_value_info(ends[-1], onnx.TensorProto.FLOAT, None))
    onnx.save(graph, directory / "vision.onnx")
    feeds = dict(PICTURE.feeds())
    patches, column, row = (feeds[name] for name in (graph_io.PATCHES, graph_io.COLUMN, graph_io.ROW))
    session = onnxruntime.InferenceSession(directory / "vision.onnx")
    rows, *layers = session.run([graph_io.SOFT_ROWS, *ends], feeds)

    order = np.lexsort((column, row))
    places = torch.tensor(np.stack([column, row], -1)[order])[None]
    found: list[Any] = []
    for each in oracle.model.vision_tower.encoder.layers:
        each.register_forward_hook(lambda module, arguments, output: found.append(output[0].numpy()))
    with torch.no_grad():
        expected = oracle.model.get_image_features(torch.tensor(patches[order])[None], places).pooler_output[0]
    assert len(found) == len(layers) == TOWER_LAYERS
    for layer, each in zip(layers, found, strict=True):
        np.testing.assert_allclose(layer[order], each, atol=1e-4, rtol=0)
    np.testing.assert_allclose(rows, expected.numpy(), atol=1e-4, rtol=0)
    assert np.abs(rows).max() > 0.1


def test_the_ranges_of_linear_layers_count(seeing: dict[tuple[str, str], Bundle]) -> None:
    import onnx

    graphs = {
        family: onnx.load(seeing[family, "none"].path / "vision.onnx", load_external_data=False)
        for family in ("seeing", "seeing-e4b")
    }
    clips = {family: sum(node.op_type == "Clip" for node in graph.graph.node) for family, graph in graphs.items()}
    assert clips == {"seeing": 14 * TOWER_LAYERS, "seeing-e4b": 0}


@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_a_picture_alone_as_among_others(seeing: dict[tuple[str, str], Bundle], family: str, quantize: str) -> None:
    tower = vision_tower(seeing[family, quantize])
    first = encoded(tower, PICTURE)
    encoded(tower, Pixels(noise(24, 60, seed=4), PATCH, POOL))
    np.testing.assert_array_equal(encoded(tower, PICTURE), first)
    assert first.shape == (PICTURE.tokens, 64)


def test_int8_layers_are_near_float32(seeing: dict[tuple[str, str], Bundle], family: str) -> None:
    """The cosine of each soft row with that of the float32 tower."""
    exact, found = (encoded(vision_tower(seeing[family, quantize]), PICTURE) for quantize in ("none", "int8"))
    norms = np.linalg.norm(exact, axis=1) * np.linalg.norm(found, axis=1)
    assert ((exact * found).sum(axis=1) / norms).min() > 0.995
    assert np.abs(exact - found).max() > 0


def test_codes_of_layers_fit_16_bit_sums_of_two_products(seeing: dict[tuple[str, str], Bundle], family: str) -> None:
    bundle = seeing[family, "int8"]
    table = bundle.manifest.tensors["vision.onnx"]
    data = np.fromfile(bundle.path / table.file, np.uint8)
    layers = {name: each for name, each in table.tensors.items() if ".linear." in name}
    assert len(layers) == 7 * TOWER_LAYERS
    for name, each in layers.items():
        codes = data[each.offset : each.offset + each.bytes].view(np.int8).astype(int)
        assert each.format == "int8", name
        assert 2 * (2 * MAX_ACTIVATION) * np.abs(codes).max() <= 32767, name


def changed(checkpoint: Path, directory: Path, **tensors: Any) -> Path:
    """A copy of a checkpoint with other tensors; None removes one."""
    from safetensors.numpy import load_file, save_file

    copy = Path(shutil.copytree(checkpoint, directory / "target"))
    found = load_file(copy / "model.safetensors")
    for name, value in tensors.items():
        full = f"model.vision_tower.{name.replace('__', '.')}"
        if value is None:
            del found[full]
        else:
            found[full] = value
    save_file(found, copy / "model.safetensors")
    return copy


def test_text_only(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    target = checkpoints["seeing"] / "target"
    notes: list[str] = []
    bundle = export(target, tmp_path / "bundle", quantize="int8", text_only=True, note=notes.append)
    manifest = json.loads((bundle / "bundle.json").read_text("utf-8"))
    assert "vision" not in manifest
    assert not any("vision" in name for name in manifest["files"])
    assert any("vision and audio tensors" in note for note in notes)
    with ondevice.load(bundle, engine="ort", threads=1) as model:
        assert model.generate([2, 40, 50], max_new_tokens=2).token_ids


def test_every_tensor_of_a_tower_is_known_and_there(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    target = checkpoints["seeing"] / "target"
    name = "encoder__layers__1__mlp__up_proj__input_min"
    with pytest.raises(CheckpointError, match=r"layers.1.mlp.up_proj.input_min is missing"):
        export(changed(target, tmp_path / "a", **{name: None}), tmp_path / "bundle")
    extra = changed(target, tmp_path / "b", encoder__layers__1__surprise=np.zeros(3, np.float32))
    with pytest.raises(CheckpointError, match=r"surprise has no place in the vision tower.*--text-only"):
        export(extra, tmp_path / "bundle")
    export(extra, tmp_path / "bundle", text_only=True)
    wrong = changed(target, tmp_path / "c", encoder__layers__1__self_attn__q_norm__weight=np.zeros(3, np.float32))
    with pytest.raises(CheckpointError, match=r"q_norm.weight has shape \[3\]"):
        export(wrong, tmp_path / "bundle2")
    nan = changed(target, tmp_path / "d", **{name: np.array(np.nan, np.float32)})
    with pytest.raises(CheckpointError, match="has the range nan"):
        export(nan, tmp_path / "bundle3")
    weights = {"encoder__layers__1__mlp__up_proj__linear__weight": np.full((80, TOWER_HIDDEN), np.inf, np.float32)}
    infinite = changed(target, tmp_path / "e", **weights)
    for number, quantize in enumerate(("none", "int8")):
        with pytest.raises(CheckpointError, match=r"up_proj.linear.weight holds NaN or infinite weights"):
            export(infinite, tmp_path / f"bundle4{number}", quantize=quantize)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_key_value_heads", 1, "share 1 KV heads"),
        ("hidden_activation", "relu", "activation 'relu'"),
        ("head_dim", 6, "no multiple of 4"),
        ("patch_size", 4096, "patch of the vision tower"),
        ("num_hidden_layers", -1, "num_hidden_layers"),
    ],
)
def test_configurations_that_are_not_supported(
    checkpoints: dict[str, Path], tmp_path: Path, field: str, value: Any, message: str
) -> None:
    copy = Path(shutil.copytree(checkpoints["seeing"] / "target", tmp_path / "target"))
    config = json.loads((copy / "config.json").read_text("utf-8"))
    config["vision_config"][field] = value
    (copy / "config.json").write_text(json.dumps(config), "utf-8")
    with pytest.raises(CheckpointError, match=f"{message}|has shape") as caught:
        export(copy, tmp_path / "bundle")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text_config": {"use_bidirectional_attention": "all"}}, "bidirectional attention is not"),
        ({"vision_config": {"model_type": "siglip"}}, "a vision tower of the type 'siglip' is not supported"),
    ],
)
def test_towers_that_are_not_supported(
    checkpoints: dict[str, Path], tmp_path: Path, change: dict[str, dict[str, str]], message: str
) -> None:
    copy = Path(shutil.copytree(checkpoints["seeing"] / "target", tmp_path / "target"))
    config = json.loads((copy / "config.json").read_text("utf-8"))
    for part, fields in change.items():
        config[part] |= fields
    (copy / "config.json").write_text(json.dumps(config), "utf-8")
    with pytest.raises(CheckpointError, match=message):
        export(copy, tmp_path / "bundle", drafter="none")


def test_the_processors_settings(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    copy = Path(shutil.copytree(checkpoints["seeing"] / "target", tmp_path / "target"))
    (copy / "processor_config.json").write_text(json.dumps({"image_processor": {"max_soft_tokens": 140}}), "utf-8")
    vision = Bundle.open(export(copy, tmp_path / "bundle")).manifest.vision
    assert vision is not None
    assert (vision.tokens, vision.patch, vision.pool) == (140, PATCH, POOL)
    (copy / "processor_config.json").write_text(json.dumps({"image_processor": {"max_soft_tokens": 141}}), "utf-8")
    with pytest.raises(CheckpointError, match="max_soft_tokens is 141"):
        export(copy, tmp_path / "bundle")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"do_normalize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}, "do_normalize False, not True"),
        ({"rescale_factor": 1 / 127.5}, "rescale_factor 0.0039"),
        ({"do_rescale": False}, "do_rescale True, not False"),
        ({"do_resize": False}, "do_resize True, not False"),
        ({"resample": 2}, "resample 3, not 2"),
        ({"patch_size": PATCH + 1}, f"patch_size {PATCH}, not {PATCH + 1}"),
        ({"pooling_kernel_size": POOL + 1}, f"pooling_kernel_size {POOL}, not {POOL + 1}"),
    ],
)
@pytest.mark.parametrize("file", ["processor_config.json", "preprocessor_config.json"])
def test_a_processor_with_other_settings_is_refused(
    checkpoints: dict[str, Path], tmp_path: Path, file: str, settings: dict[str, Any], message: str
) -> None:
    copy = Path(shutil.copytree(checkpoints["seeing"] / "target", tmp_path / "target"))
    whole = {"image_processor": settings} if file == "processor_config.json" else settings
    (copy / file).write_text(json.dumps(whole), "utf-8")
    with pytest.raises(CheckpointError, match=f"{message}.*--text-only"):
        export(copy, tmp_path / "bundle", quantize="none", drafter="none")
    export(copy, tmp_path / "bundle", quantize="none", drafter="none", text_only=True)


@pytest.mark.parametrize("family", ["seeing", "seeing-12b"])
def test_the_settings_that_transformers_saves(checkpoints: dict[str, Path], tmp_path: Path, family: str) -> None:
    from transformers import Gemma4ImageProcessorPil

    copy = Path(shutil.copytree(checkpoints[family] / "target", tmp_path / "target"))
    Gemma4ImageProcessorPil(patch_size=PATCH, pooling_kernel_size=POOL, max_soft_tokens=140).save_pretrained(copy)
    assert json.loads((copy / "preprocessor_config.json").read_text("utf-8"))["do_normalize"] is False
    vision = Bundle.open(export(copy, tmp_path / "bundle", quantize="none", drafter="none")).manifest.vision
    assert vision is not None
    assert vision.tokens == 140


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_a_damaged_tower(seeing: dict[tuple[str, str], Bundle], tmp_path: Path) -> None:
    import onnx

    vision = seeing["seeing", "int8"].manifest.vision
    assert vision is not None

    copy = Path(shutil.copytree(seeing["seeing", "int8"].path, tmp_path / "bundle"))
    graph = (copy / "vision.onnx").read_bytes()
    (copy / "vision.onnx").write_bytes(graph.replace(b"MultiHeadAttention", b"MultiHeadAttentiom"))
    with pytest.raises(BundleCorruptError, match="not an operator of exported graphs"):
        encoded(vision_tower(Bundle.open(copy)), PICTURE)
    (copy / "vision.onnx").write_bytes(graph)
    encoded(vision_tower(Bundle.open(copy)), PICTURE)
    without_heads = onnx.load_from_string(graph)
    [attention, *_] = (node for node in without_heads.graph.node if node.op_type == "MultiHeadAttention")
    next(each for each in attention.attribute if each.name == "num_heads").i = 0
    with pytest.raises(BundleCorruptError, match="num_heads of MultiHeadAttention is 0"):
        check_graph(
            write(tmp_path / "vision.onnx", without_heads.SerializeToString()),
            seeing["seeing", "int8"].manifest,
            vision_interface(vision, seeing["seeing", "int8"].manifest.target),
        )
    manifest = json.loads((copy / "bundle.json").read_text("utf-8"))
    for field, value in (("head_dim", 25), ("image_token_id", 1 << 20), ("tokens", 5), ("pool", 0), ("layers", 2)):
        broken = {**manifest, "vision": {**manifest["vision"], field: value}}
        (copy / "bundle.json").write_text(json.dumps(broken), "utf-8")
        with pytest.raises(BundleCorruptError):
            encoded(vision_tower(Bundle.open(copy)), PICTURE)
    layer = manifest["tensors"]["vision.onnx"]["tensors"]["vision_tower.encoder.layers.1.mlp.up_proj.linear.weight"]
    layer["block"] = 16
    (copy / "bundle.json").write_text(json.dumps(manifest), "utf-8")
    with pytest.raises(BundleCorruptError, match="is int8 in blocks of 16"):
        encoded(vision_tower(Bundle.open(copy)), PICTURE)


def test_a_lack_of_memory_is_told_from_a_damaged_tower(
    seeing: dict[tuple[str, str], Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("Non-zero status code returned while running Add node. Status Message: std::bad_alloc")

    monkeypatch.setattr("ondevice.engines.ort.run_graph", fail)
    with pytest.raises(MemoryError, match=r"not enough memory for onnxruntime to run this bundle's vision\.onnx"):
        encoded(vision_tower(seeing["seeing", "int8"]), PICTURE)
