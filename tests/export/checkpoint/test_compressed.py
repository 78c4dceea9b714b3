"""Checkpoints that compressed-tensors has packed: kept codes, weights of other groups, mixtures, and damaged ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

import ondevice
from ondevice.bundle import Bundle
from ondevice.bundle_format.weight_format import INT4, INT4_AFFINE, INT8
from ondevice.engines.choice import EngineName
from ondevice.errors import CheckpointError, UsageError
from ondevice_export import export
from ondevice_export.checkpoint.directory import SafetensorsCheckpoint
from ondevice_export.verify import verify
from tests.conftest import ENGINES
from tests.export.logits import logits_of_both
from tests.fixtures.packed_models import packed_rows, quantise, saved

Q = "model.layers.0.self_attn.q_proj"
CASES = {"symmetric": (4, 32, True), "zeros": (4, 64, False), "channel": (4, 0, True), "bytes": (8, 32, True)}
"""Bits, weights of a group or 0 for whole rows, and whether weights are symmetric."""


def pack(
    weight: NDArray[np.float32], bits: int, group: int, symmetric: bool
) -> tuple[dict[str, torch.Tensor], NDArray[np.float32]]:
    """The tensors of a matrix, without its name, and its weights as they are read."""
    rows, width = weight.shape
    groups = weight.reshape(rows, -1, group or width)
    low, high, top = groups.min(-1, keepdims=True), groups.max(-1, keepdims=True), (1 << bits) - 1
    scales = torch.from_numpy(2 * np.abs(groups).max(-1, keepdims=True) / top if symmetric else (high - low) / top)
    scales = scales.to(torch.bfloat16)
    found = scales.float().numpy()
    zeros = np.full(found.shape, 1 << bits - 1) if symmetric else np.rint(-low / found).clip(0, top).astype(np.int64)
    codes = np.rint(groups / found + zeros).clip(0, top).astype(np.int64)
    tensors = {
        "weight_packed": packed_rows(codes.reshape(rows, width), bits),
        "weight_scale": scales.squeeze(-1),
        "weight_shape": torch.tensor([rows, width]),
    }
    if not symmetric:
        tensors["weight_zero_point"] = packed_rows(zeros.squeeze(-1).T, bits).T.contiguous()
    return tensors, ((codes - zeros) * found).astype(np.float32).reshape(rows, width)


def compress(directory: Path, model: Any, bits: int, group: int, symmetric: bool) -> Any:
    """Replace the matrices of a saved model's layers by packed ones; the model with the weights that these have."""
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "group_size": group or None}
    weights |= {"strategy": "group" if group else "channel", "dynamic": False}
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": None,
                "output_activations": None,
            }
        },
    }
    return quantise(directory, model, lambda weight: pack(weight, bits, group, symmetric), config)


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def packed(case: str, tmp_path: Path) -> Any:
    """The model of the packed checkpoint `tmp_path / "model"`."""
    return compress(tmp_path / "model", saved(tmp_path / "model"), *CASES[case])


def test_weights_are_read_whole_and_in_parts(case: str, packed: Any, tmp_path: Path) -> None:
    expected = packed.state_dict()[f"{Q}.weight"].numpy()
    with SafetensorsCheckpoint(tmp_path / "model") as checkpoint:
        found = {"symmetric": INT4, "zeros": INT4_AFFINE, "channel": INT4, "bytes": INT8}[case]
        assert checkpoint.shape(f"{Q}.weight") == expected.shape
        assert checkpoint.kept_format(f"{Q}.weight") == found
        assert not [name for name in checkpoint.names if "weight_" in name]
        np.testing.assert_allclose(checkpoint.read(f"{Q}.weight"), expected, rtol=1e-6)
        np.testing.assert_allclose(checkpoint.rows(f"{Q}.weight", 5, 12), expected[5:12], rtol=1e-6)
        codes, scales, minimums = checkpoint.kept_blocks(f"{Q}.weight", 5, 12)
        blocks = found.levels[codes].reshape(*scales.shape, 32) * scales[..., None]
        blocks = blocks if minimums is None else blocks + minimums[..., None]
        np.testing.assert_allclose(blocks.reshape(codes.shape), expected[5:12], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("engine", ENGINES)
def test_both_engines_run_weights_that_are_kept(packed: Any, engine: EngineName, tmp_path: Path, kernels: None) -> None:
    bundle = Bundle.open(export(tmp_path / "model", tmp_path / "bundle"))
    expected, own = logits_of_both(packed, bundle, engine)
    assert bundle.manifest.quantization.weights == "keep"
    np.testing.assert_allclose(own, expected, atol=0.05 * np.abs(expected).max())


def test_float32_equals_transformers(packed: Any, tmp_path: Path) -> None:
    bundle = Bundle.open(export(tmp_path / "model", tmp_path / "bundle", quantize="none"))
    expected, own = logits_of_both(packed, bundle, "ort")
    np.testing.assert_allclose(own, expected, atol=1e-4)


def test_groups_that_no_bundle_has_are_rounded_again(tmp_path: Path) -> None:
    model = compress(tmp_path / "model", saved(tmp_path / "model"), 8, 64, False)
    with SafetensorsCheckpoint(tmp_path / "model") as checkpoint:
        assert checkpoint.kept_format(f"{Q}.weight") is None
    bundle = Bundle.open(export(tmp_path / "model", tmp_path / "bundle"))
    expected, own = logits_of_both(model, bundle, "ort")
    np.testing.assert_allclose(own, expected, atol=0.05 * np.abs(expected).max())


def test_experts_are_kept(tmp_path: Path) -> None:
    model = compress(tmp_path / "model", saved(tmp_path / "model", mixture=True), 4, 32, True)
    bundle = Bundle.open(export(tmp_path / "model", tmp_path / "bundle"))
    tensors = bundle.manifest.tensors["target.onnx"].tensors
    assert tensors["layers.0.experts.gate_up_proj"].weight_format == INT4
    expected, own = logits_of_both(
        model, Bundle.open(export(tmp_path / "model", tmp_path / "f", quantize="none")), "ort"
    )
    np.testing.assert_allclose(own, expected, atol=1e-4)


def change(directory: Path, weights: dict[str, Any] | None = None, **fields: Any) -> None:
    """Change the fields of the group of a `quantization_config`, of its weights, or of itself."""
    file = directory / "config.json"
    config = json.loads(file.read_text())
    group = config["quantization_config"]["config_groups"]["group_0"]
    group["weights"] |= weights or {}
    config["quantization_config"] |= {name: value for name, value in fields.items() if name not in group}
    group |= {name: value for name, value in fields.items() if name in group}
    file.write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("weights", "fields", "said"),
    [
        ({"num_bits": 3}, {}, "weights of the type 'int' of 3 bits is not supported: export the original"),
        ({"type": "float"}, {}, "weights of the type 'float' of 4 bits is not supported"),
        ({}, {"format": "int-quantized"}, "the format 'int-quantized' is not supported"),
        ({}, {"input_activations": {"num_bits": 8}}, "quantisation of activations is not supported"),
        ({}, {"transform_config": {"R1": {}}}, "transform_config is not supported"),
        ({}, {"sparsity_config": {"format": "sparse-24-bitmask"}}, "the sparsity 'sparse-24-bitmask' is not supported"),
        ({}, {"config_groups": {}}, "a quantization_config without config_groups is not supported"),
        ({}, {"config_groups": 3}, "config_groups is 3"),
        ({}, {"quant_method": "fp8"}, "weights quantised by 'fp8' are not supported"),
    ],
)
def test_what_is_not_supported_is_named(
    weights: dict[str, Any], fields: dict[str, Any], said: str, tmp_path: Path
) -> None:
    compress(tmp_path / "model", saved(tmp_path / "model"), 4, 32, True)
    change(tmp_path / "model", weights, **fields)
    with pytest.raises(CheckpointError) as caught:
        export(tmp_path / "model", tmp_path / "bundle")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


DAMAGES: dict[str, tuple[str, torch.Tensor | None, str]] = {
    "order": ("weight_g_idx", torch.zeros(128, dtype=torch.int32), "lie in another order"),
    "no scales": ("weight_scale", None, "without"),
    "both": ("weight", torch.zeros(128, 128), "beside"),
    "rows": ("weight_scale", torch.ones(5, 4), "do not fit"),
    "groups": ("weight_scale", torch.ones(128, 3), "do not fit"),
    "type": ("weight_packed", torch.zeros(128, 16), "do not fit"),
    "ranks": ("weight_packed", torch.zeros(16, dtype=torch.int32), "do not fit"),
    "empty": ("weight_packed", torch.zeros(0, 16, dtype=torch.int32), "do not fit"),
    "zeros": ("weight_zero_point", torch.zeros(3, 4, dtype=torch.int32), "do not fit"),
    "scales": ("weight_scale", torch.ones(128, 4, dtype=torch.int32), "weights must be BF16, F16 or F32"),
    "infinite": ("weight_scale", torch.full((128, 4), torch.inf), "NaN, infinite or beyond fp16"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_tensors(damage: str, tmp_path: Path) -> None:
    compress(tmp_path / "model", saved(tmp_path / "model"), 4, 32, True)
    part, tensor, said = DAMAGES[damage]
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors.pop(f"{Q}.{part}", None)
    save_file(tensors if tensor is None else {**tensors, f"{Q}.{part}": tensor}, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=said):
        export(tmp_path / "model", tmp_path / "bundle")


def test_a_comparison_with_the_original_is_refused(tmp_path: Path) -> None:
    compress(tmp_path / "model", saved(tmp_path / "model"), 4, 32, True)
    bundle = export(tmp_path / "model", tmp_path / "bundle")
    with pytest.raises(UsageError, match="quantised by compressed-tensors are not loaded to compare with"):
        verify(bundle, tmp_path / "model", None, [[3, 5, 7]])


def test_drafts_change_no_token(tmp_path: Path, kernels: None) -> None:
    compress(tmp_path / "model", saved(tmp_path / "model"), 4, 64, False)
    with ondevice.load(export(tmp_path / "model", tmp_path / "bundle"), engine="simd", threads=1) as model:
        options: dict[str, Any] = {"max_new_tokens": 24, "temperature": 1.0, "seed": 3}
        plain = model.generate([3, 5, 7, 3, 5, 7], drafter="none", **options)
        assert model.generate([3, 5, 7, 3, 5, 7], drafter="ngram", **options).token_ids == plain.token_ids
