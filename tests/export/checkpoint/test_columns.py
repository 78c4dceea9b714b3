"""Checkpoints that AutoGPTQ or AutoAWQ has packed: kept codes, columns in another order, mixtures, and damaged ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

import ondevice
from ondevice.bundle import Bundle
from ondevice.bundle_format.weight_format import INT4, INT4_AFFINE, INT8, WeightFormat
from ondevice.engines.choice import EngineName
from ondevice.errors import CheckpointError, UsageError
from ondevice_export import export
from ondevice_export.checkpoint.directory import SafetensorsCheckpoint
from ondevice_export.verify import verify
from tests.conftest import ENGINES
from tests.export.logits import logits_of_both
from tests.fixtures.packed_models import packed_rows, quantise, saved

Q = "model.layers.0.self_attn.q_proj"
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
"""The rows whose codes follow each other in a word."""


class Case(NamedTuple):
    """How a checkpoint is packed, and the format that a bundle keeps it in, or None."""

    method: str
    bits: int = 4
    group: int = 64
    symmetric: bool = False
    format: str = "gptq"
    ordered: bool = False
    """Whether the columns of a group are not neighbours."""
    kept: WeightFormat | None = INT4_AFFINE


CASES = {
    "awq": Case("awq"),
    "awq rows": Case("awq", group=0),
    "gptq": Case("gptq", group=32, symmetric=True, kept=INT4),
    "gptq zeros": Case("gptq"),
    "gptq v2": Case("gptq", format="gptq_v2"),
    "gptq bytes": Case("gptq", 8, symmetric=True, kept=INT8),
    "gptq bytes with zeros": Case("gptq", 8, kept=None),
    "gptq order": Case("gptq", ordered=True, kept=None),
}


def pack(weight: NDArray[np.float32], case: Case) -> tuple[dict[str, torch.Tensor], NDArray[np.float32]]:
    """The tensors of a matrix, without its name, and its weights as they are read."""
    (rows, width), top = weight.shape, (1 << case.bits) - 1
    group = case.group or width
    order = np.random.default_rng(0).permutation(width) if case.ordered else np.arange(width)
    of_column = np.empty(width, np.int64)
    of_column[order] = np.arange(width) // group
    sorted_groups = weight[:, order].reshape(rows, -1, group)
    low, high = sorted_groups.min(-1), sorted_groups.max(-1)
    scales = (2 * np.abs(sorted_groups).max(-1) / top if case.symmetric else (high - low) / top).astype(np.float16)
    found = scales.astype(np.float32)
    zeros = np.full(found.shape, 1 << case.bits - 1) if case.symmetric else np.rint(-low / found).clip(0, top)
    zeros = zeros.astype(np.int64)
    codes = np.rint(weight / found[:, of_column] + zeros[:, of_column]).clip(0, top).astype(np.int64)
    weights = ((codes - zeros[:, of_column]) * found[:, of_column]).astype(np.float32)
    tensors = {"scales": torch.from_numpy(scales.T.copy())}
    if case.method == "awq":
        places = np.arange(rows).reshape(-1, 8)[:, AWQ_ORDER].reshape(-1)
        tensors["qweight"] = packed_rows(codes.T[:, places], 4)
        tensors["qzeros"] = packed_rows(zeros.T[:, places], 4)
    else:
        words = packed_rows(zeros.T, case.bits)
        ones = sum(1 << place for place in range(0, 32, case.bits))
        tensors["qweight"] = packed_rows(codes, case.bits).T.contiguous()
        tensors["qzeros"] = words if case.format == "gptq_v2" else words - ones
        tensors["g_idx"] = torch.from_numpy(of_column.astype(np.int32))
        tensors["bias"] = torch.zeros(rows)
    return tensors, weights


def packed_model(directory: Path, case: Case, mixture: bool = False) -> Any:
    """A packed checkpoint, and the model with its weights."""
    config: dict[str, Any] = {"quant_method": case.method, "bits": case.bits, "group_size": case.group or -1}
    if case.method == "awq":
        config |= {"version": "gemm", "zero_point": True, "modules_to_not_convert": None}
    else:
        config |= {"checkpoint_format": case.format, "desc_act": case.ordered, "sym": case.symmetric}
    return quantise(directory, saved(directory, mixture), lambda weight: pack(weight, case), config)


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture
def packed(case: Case, tmp_path: Path) -> Any:
    """The model of the packed checkpoint `tmp_path / "model"`."""
    return packed_model(tmp_path / "model", case)


def test_weights_are_read_whole_and_in_parts(case: Case, packed: Any, tmp_path: Path) -> None:
    expected = packed.state_dict()[f"{Q}.weight"].numpy()
    with SafetensorsCheckpoint(tmp_path / "model") as checkpoint:
        assert checkpoint.shape(f"{Q}.weight") == expected.shape
        assert checkpoint.kept_format(f"{Q}.weight") == case.kept
        assert not [name for name in checkpoint.names if name.endswith(("qweight", "qzeros", "scales", "g_idx"))]
        np.testing.assert_allclose(checkpoint.read(f"{Q}.weight"), expected, rtol=1e-6)
        np.testing.assert_allclose(checkpoint.rows(f"{Q}.weight", 5, 20), expected[5:20], rtol=1e-6)
        if case.kept is None:
            return
        codes, scales, minimums = checkpoint.kept_blocks(f"{Q}.weight", 5, 20)
        blocks = case.kept.levels[codes].reshape(*scales.shape, 32) * scales[..., None]
        blocks = blocks if minimums is None else blocks + minimums[..., None]
        np.testing.assert_allclose(blocks.reshape(codes.shape), expected[5:20], rtol=1e-5, atol=1e-6)


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


@pytest.mark.parametrize("name", ["awq", "gptq"])
def test_experts_are_kept(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model = packed_model(tmp_path / "model", case, mixture=True)
    bundle = Bundle.open(export(tmp_path / "model", tmp_path / "bundle"))
    tensors = bundle.manifest.tensors["target.onnx"].tensors
    assert tensors["layers.0.experts.gate_up_proj"].weight_format == case.kept
    plain = Bundle.open(export(tmp_path / "model", tmp_path / "float", quantize="none"))
    expected, own = logits_of_both(model, plain, "ort")
    np.testing.assert_allclose(own, expected, atol=1e-4)


def test_a_bias_that_is_not_zero_is_refused(tmp_path: Path) -> None:
    packed_model(tmp_path / "model", CASES["gptq"])
    change_tensors(tmp_path / "model", {f"{Q}.bias": torch.ones(128)})
    with pytest.raises(CheckpointError, match="bias has no place"):
        export(tmp_path / "model", tmp_path / "bundle")


def change_tensors(directory: Path, changed: dict[str, torch.Tensor | None]) -> None:
    """Replace tensors of a checkpoint; those that are None are removed."""
    file = directory / "model.safetensors"
    tensors = load_file(file) | changed
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file, {"format": "pt"})


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        (
            "gptq",
            {"checkpoint_format": "marlin"},
            "the format 'marlin' of gptq is not supported, only gptq and",
        ),
        ("gptq", {"checkpoint_format": 2}, "the format 2 of gptq is not supported"),
        ("awq", {"version": "gemv"}, "the format 'gemv' of awq is not supported, only gemm: export the original"),
        ("awq", {"quant_method": ["awq"]}, "weights quantised by ['awq'] are not supported"),
    ],
)
def test_what_is_not_supported_is_named(name: str, fields: dict[str, Any], said: str, tmp_path: Path) -> None:
    packed_model(tmp_path / "model", CASES[name])
    file = tmp_path / "model" / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"] |= fields
    file.write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as caught:
        export(tmp_path / "model", tmp_path / "bundle")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


INT = torch.int32
DAMAGES: dict[str, tuple[str, str, torch.Tensor | None, str]] = {
    "no scales": ("awq", "scales", None, "without"),
    "no zeros": ("gptq", "qzeros", None, "without"),
    "both": ("awq", "weight", torch.zeros(128, 128), "beside"),
    "ranks": ("gptq", "qweight", torch.zeros(16, dtype=INT), "do not fit"),
    "empty": ("gptq", "qweight", torch.zeros(0, 128, dtype=INT), "do not fit"),
    "type": ("awq", "qweight", torch.zeros(128, 16), "do not fit"),
    "rows": ("gptq", "qweight", torch.zeros(16, 64, dtype=INT), "do not fit"),
    "rows of words": ("awq", "qweight", torch.zeros(128, 8, dtype=INT), "do not fit"),
    "zeros": ("awq", "qzeros", torch.zeros(2, 8, dtype=INT), "do not fit"),
    "groups of zeros": ("gptq", "qzeros", torch.zeros(3, 16, dtype=INT), "do not fit"),
    "three bits": ("gptq", "qzeros", torch.zeros(4, 12, dtype=INT), "weights of 3 bits"),
    "groups": ("awq", "scales", torch.ones(3, 128), "do not fit"),
    "order": ("gptq", "g_idx", torch.full((128,), 4, dtype=INT), "names a group that is not there"),
    "negative order": ("gptq", "g_idx", torch.full((128,), -1, dtype=INT), "names a group that is not there"),
    "short order": ("gptq", "g_idx", torch.zeros(64, dtype=INT), r"is I32 \[64\], expected I32 \[128\]"),
    "scales": ("gptq", "scales", torch.ones(4, 128, dtype=INT), "weights must be BF16, F16 or F32"),
    "infinite": ("gptq", "scales", torch.full((4, 128), torch.inf), "NaN, infinite or beyond fp16"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_tensors(damage: str, tmp_path: Path) -> None:
    name, part, tensor, said = DAMAGES[damage]
    packed_model(tmp_path / "model", CASES[name])
    change_tensors(tmp_path / "model", {f"{Q}.{part}": tensor})
    with pytest.raises(CheckpointError, match=said):
        export(tmp_path / "model", tmp_path / "bundle")


def test_groups_that_do_not_divide_the_columns(tmp_path: Path) -> None:
    """128 columns in two groups of 96 and 32, as AutoGPTQ makes them of a width that is not a multiple of a group."""
    case = CASES["gptq v2"]
    packed_model(tmp_path / "model", case)
    column_groups = torch.arange(128, dtype=INT) // 96
    change_tensors(tmp_path / "model", {f"{Q}.g_idx": column_groups})
    with SafetensorsCheckpoint(tmp_path / "model") as checkpoint:
        assert checkpoint.kept_format(f"{Q}.weight") is None
        weights = checkpoint.read(f"{Q}.weight")
    change_tensors(tmp_path / "model", {f"{Q}.g_idx": None})
    with SafetensorsCheckpoint(tmp_path / "model") as checkpoint:
        halves = checkpoint.read(f"{Q}.weight")
    same = np.arange(128) // 96 == np.arange(128) // 64
    np.testing.assert_array_equal(weights[:, same], halves[:, same])
    assert (weights[:, ~same] != halves[:, ~same]).any()


def test_a_comparison_with_the_original_is_refused(tmp_path: Path) -> None:
    packed_model(tmp_path / "model", CASES["awq"])
    bundle = export(tmp_path / "model", tmp_path / "bundle")
    with pytest.raises(UsageError, match="quantised by awq are not loaded to compare with"):
        verify(bundle, tmp_path / "model", None, [[3, 5, 7]])


def test_drafts_change_no_token(tmp_path: Path, kernels: None) -> None:
    packed_model(tmp_path / "model", CASES["awq"])
    with ondevice.load(export(tmp_path / "model", tmp_path / "bundle"), engine="simd", threads=1) as model:
        options: dict[str, Any] = {"max_new_tokens": 24, "temperature": 1.0, "seed": 3}
        plain = model.generate([3, 5, 7, 3, 5, 7], drafter="none", **options)
        assert model.generate([3, 5, 7, 3, 5, 7], drafter="ngram", **options).token_ids == plain.token_ids
