"""Checkpoints in MXFP4: weights as transformers dequantises them, kept codes, interleaved experts, and damaged ones."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from safetensors.numpy import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from ondevice.bundle import Bundle
from ondevice.bundle_format.manifest import Quantization
from ondevice.bundle_format.tensor_table import Tensor, is_plain
from ondevice.bundle_format.weight_format import MXFP4
from ondevice.engines.choice import EngineName
from ondevice.errors import CheckpointError
from ondevice_export import export
from ondevice_export.bit_budget import choose_formats
from ondevice_export.checkpoint.directory import SafetensorsCheckpoint
from ondevice_export.checkpoint.models import open_target
from ondevice_export.checkpoint.safetensors_file import SafetensorsFile, TensorEntry
from ondevice_export.checkpoint.source import locate
from ondevice_export.checkpoint.stacks import Taken
from ondevice_export.families.family import RowsOf
from ondevice_export.verify import tolerance_of, verify
from tests.conftest import ENGINES, REFERENCE
from tests.export.logits import logits_of_both
from tests.fixtures.mxfp4 import save_in_mxfp4, to_mxfp4, write_checkpoint

EXPERTS, INNER, GROUPS = 3, 5, 4
WIDTH = 32 * GROUPS
X = "model.layers.0.mlp.experts.gate_up_proj"


def random_blocks() -> dict[str, NDArray[np.uint8]]:
    """A tensor of experts with all codes and all scales but NaN."""
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (EXPERTS, 2 * INNER, GROUPS, 16), np.uint8)
    scales = rng.integers(0, 255, (EXPERTS, 2 * INNER, GROUPS), np.uint8)
    return {f"{X}_blocks": blocks, f"{X}_scales": scales}


def dequantised(tensors: Mapping[str, NDArray[np.uint8]]) -> NDArray[np.float32]:
    """The weights [experts, rows, width] of `tensors`, by transformers, which has rows and width exchanged."""
    blocks, scales = (torch.tensor(tensors[f"{X}_{part}"]) for part in ("blocks", "scales"))
    weights = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    return np.asarray(weights.transpose(1, 2).numpy())


def weights_of(codes: NDArray[np.uint8], scales: NDArray[np.float32]) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):
        blocks = MXFP4.levels[codes].reshape(*scales.shape, 32) * scales[..., None]
    return np.asarray(blocks.reshape(len(codes), -1))


def test_weights_are_those_of_transformers(tmp_path: Path) -> None:
    tensors = random_blocks()
    with SafetensorsCheckpoint(write_checkpoint(tmp_path, {}, tensors)) as checkpoint:
        assert checkpoint.names == [X]
        assert checkpoint.shape(X) == (EXPERTS, 2 * INNER, WIDTH)
        assert checkpoint.kept_format(X) == MXFP4
        np.testing.assert_array_equal(checkpoint.read(X), dequantised(tensors))
        flat = dequantised(tensors).reshape(-1, WIDTH)
        for start, stop in ((0, len(flat)), (3, 4), (7, 23)):
            codes, scales, minimums = checkpoint.kept_blocks(X, start, stop)
            assert codes.dtype == np.uint8
            assert (int(codes.max()), minimums) == (15, None)
            np.testing.assert_array_equal(weights_of(codes, scales), flat[start:stop])


def in_bundle_order(index: int = 0, experts: int = EXPERTS, inner: int = INNER) -> dict[str, RowsOf]:
    """The rows of gate and then those of up of every expert, which alternate in the checkpoint."""
    starts = [(2 * inner * expert, first) for expert in range(experts) for first in (0, 1)]
    return {"experts.gate_up_proj": (X, [Taken(start + first, start + 2 * inner, step=2) for start, first in starts])}


@pytest.mark.parametrize("quantised", [True, False], ids=["mxfp4", "float32"])
def test_rows_of_gate_and_up_that_alternate(quantised: bool, tmp_path: Path) -> None:
    tensors: dict[str, Any] = random_blocks()
    weights = dequantised(tensors)
    if not quantised:
        tensors = {X: weights}
    expected = np.concatenate([weights[:, ::2], weights[:, 1::2]], axis=1)
    flat = expected.reshape(-1, WIDTH)
    with SafetensorsCheckpoint(write_checkpoint(tmp_path, {}, tensors)) as checkpoint:
        checkpoint.split("", in_bundle_order())
        assert checkpoint.names == ["experts.gate_up_proj"]
        assert checkpoint.shape("experts.gate_up_proj") == expected.shape
        np.testing.assert_array_equal(checkpoint.read("experts.gate_up_proj"), expected)
        for start in range(len(flat)):
            for stop in range(start + 1, len(flat) + 1):
                np.testing.assert_array_equal(checkpoint.rows("experts.gate_up_proj", start, stop), flat[start:stop])
        if quantised:
            codes, scales, _ = checkpoint.kept_blocks("experts.gate_up_proj", 3, 27)
            np.testing.assert_array_equal(weights_of(codes, scales), flat[3:27])


def test_a_tensor_may_be_its_own_rows_in_another_order(tmp_path: Path) -> None:
    tensors = random_blocks()
    weights = dequantised(tensors)
    with SafetensorsCheckpoint(write_checkpoint(tmp_path, {}, tensors)) as checkpoint:
        checkpoint.split("", {X: in_bundle_order()["experts.gate_up_proj"]})
        assert checkpoint.names == [X]
        expected = np.concatenate([weights[:, ::2], weights[:, 1::2]], axis=1)
        np.testing.assert_array_equal(checkpoint.read(X), expected)


def test_rows_that_alternate_are_read_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With those between them, and no others: a seek for codes and one for scales."""
    read = list[tuple[str, int]]()
    with SafetensorsCheckpoint(write_checkpoint(tmp_path, {}, random_blocks())) as checkpoint:
        checkpoint.split("", in_bundle_order())
        original = SafetensorsFile.read

        def note(self: SafetensorsFile, entry: TensorEntry, start: int, nbytes: int) -> bytearray:
            read.append((entry.name, nbytes))
            return original(self, entry, start, nbytes)

        monkeypatch.setattr(SafetensorsFile, "read", note)
        checkpoint.kept_blocks("experts.gate_up_proj", 2 * INNER + 1, 2 * INNER + 4)
    assert read == [(f"{X}_blocks", 5 * GROUPS * 16), (f"{X}_scales", 5 * GROUPS)]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({f"{X}_scales": None}, "gate_up_proj_blocks without .*gate_up_proj_scales$"),
        ({f"{X}_blocks": None}, "gate_up_proj_scales without .*gate_up_proj_blocks$"),
        (
            {f"{X}_scales": np.zeros((EXPERTS, 2 * INNER, GROUPS + 1), np.uint8)},
            r"is U8 \[3, 10, 5\]: no codes",
        ),
        ({f"{X}_blocks": np.zeros((EXPERTS, 2 * INNER, GROUPS, 8), np.uint8)}, r"_blocks is U8 \[3, 10, 4, 8\]"),
        ({f"{X}_scales": np.zeros((EXPERTS, 2 * INNER, GROUPS), np.float16)}, r"is F16 \[3, 10, 4\]"),
        ({f"{X}_{part}": np.zeros(1, np.uint8) for part in ("blocks", "scales")}, r"is U8 \[1\]"),
        ({f"{X}_scales": np.zeros(0, np.uint8), f"{X}_blocks": np.zeros((0, 16), np.uint8)}, r"is U8 \[0\]"),
        ({X: np.zeros((EXPERTS, 2 * INNER, WIDTH), np.float32)}, "gate_up_proj beside .*gate_up_proj_blocks$"),
    ],
)
def test_damaged_tensors_are_named(changed: dict[str, Any], said: str, tmp_path: Path) -> None:
    tensors = {name: values for name, values in {**random_blocks(), **changed}.items() if values is not None}
    with pytest.raises(CheckpointError, match=said) as caught:
        SafetensorsCheckpoint(write_checkpoint(tmp_path, {}, tensors))
    assert "\n" not in str(caught.value)


def test_names_mean_nothing_without_the_configuration(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {}, random_blocks())
    (tmp_path / "config.json").write_text("{}")
    with SafetensorsCheckpoint(tmp_path) as checkpoint:
        assert set(checkpoint.names) == set(random_blocks())


# Whole models.

LAYER, SIZES = "model.layers.0.mlp.experts", (6, 64, 128)
"""Experts, the numbers between their matrices, and the hidden size."""


@pytest.fixture
def mixture(tmp_path: Path) -> tuple[Path, Any]:
    """A checkpoint of gpt-oss, whose experts are in MXFP4; and the model with its weights."""
    experts, inner, hidden = SIZES
    fields = {"vocab_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": inner}
    fields |= {"hidden_size": hidden, "num_hidden_layers": 2, "head_dim": 32, "num_local_experts": experts}
    config = transformers.GptOssConfig(**fields, num_experts_per_tok=2, sliding_window=16)
    torch.manual_seed(0)
    model = transformers.GptOssForCausalLM(config).eval()
    state: dict[str, Any] = {}
    with torch.no_grad():
        for name, value in model.named_parameters():
            if value.ndim > 1:
                value.normal_(0.0, 1.0 if name.endswith("mlp.router.weight") else 0.1)
            elif not name.endswith("norm.weight"):
                value.normal_(0.0, 0.3)
            if name.endswith(("gate_up_proj", "down_proj")):
                blocks, scales = to_mxfp4(value.numpy().swapaxes(1, 2))
                value.copy_(convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales)))
                state[f"{name}_blocks"], state[f"{name}_scales"] = blocks, scales
            else:
                state[name] = value.numpy()
    config.architectures = ["GptOssForCausalLM"]
    return write_checkpoint(tmp_path / "model", json.loads(config.to_json_string()), state), model


def expert_weights(model: Any, name: str) -> NDArray[np.float32]:
    """The weights of the experts of layer 1 in the order of a bundle: gate above up."""
    weights: NDArray[np.float32] = model.state_dict()[f"model.layers.1.mlp.experts.{name}"].numpy().swapaxes(1, 2)
    return np.concatenate([weights[:, ::2], weights[:, 1::2]], axis=1) if name == "gate_up_proj" else weights


def stored(bundle: Bundle, name: str) -> tuple[Tensor, NDArray[np.float32]]:
    """A tensor of experts as the bundle has it."""
    table = bundle.manifest.tensors["target.onnx"]
    tensor, data = table.tensors[name], np.fromfile(bundle.path / table.file, np.uint8)
    assert tensor.scales is not None
    scales = data[tensor.scales.offset : tensor.scales.offset + tensor.scales.bytes].view(np.float32)
    packed = data[tensor.offset : tensor.offset + tensor.bytes].reshape(tensor.scale_shape[0], -1)
    return tensor, weights_of(MXFP4.unpack(packed), scales.reshape(tensor.scale_shape)).reshape(tensor.shape)


@pytest.mark.parametrize("options", [{}, {"quantize": "int8"}, {"bits_per_weight": 6.0}, {"calibrate": "imatrix"}])
def test_experts_are_kept(mixture: tuple[Path, Any], options: dict[str, Any], tmp_path: Path) -> None:
    """Whatever format the other matrices get."""
    checkpoint, model = mixture
    if "calibrate" in options:
        options = {"calibrate": str(importance_matrix(tmp_path / "imatrix.gguf"))}
    notes = list[str]()
    bundle = Bundle.open(export(checkpoint, tmp_path / "bundle", note=notes.append, **options))
    assert [note.partition(" stay")[0] for note in notes if "MXFP4" in note] == ["4 of 14 matrices"]
    own = options.get("quantize", "mixed" if "bits_per_weight" in options else "int4")
    assert bundle.manifest.quantization.weights == f"mxfp4+{own}"
    for name in ("gate_up_proj", "down_proj"):
        tensor, weights = stored(bundle, f"layers.1.experts.{name}")
        assert tensor.format == "mxfp4"
        np.testing.assert_array_equal(weights, expert_weights(model, name))
    formats = {each.format for name, each in bundle.manifest.tensors["target.onnx"].tensors.items() if "_proj" in name}
    assert formats >= {"mxfp4", "int8" if "quantize" in options or "bits_per_weight" in options else "int4"}


def importance_matrix(path: Path) -> Path:
    """One that knows the inputs of attention in both layers."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type("imatrix")
    for layer in range(2):
        for name in ("attn_q", "attn_k", "attn_v"):
            squares = np.random.default_rng(layer).uniform(0.5, 2.0, (1, SIZES[2])).astype(np.float32)
            writer.add_tensor(f"blk.{layer}.{name}.weight.in_sum2", squares)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("engine", ENGINES)
def test_both_engines_run_it(mixture: tuple[Path, Any], engine: EngineName, tmp_path: Path, kernels: None) -> None:
    bundle = Bundle.open(export(mixture[0], tmp_path / "bundle", quantize="int8"))
    expected, found = logits_of_both(mixture[1], bundle, engine)
    near = np.abs(found - expected).max(-1) < 0.12 * np.abs(expected).max()
    assert near.mean() > 0.9, "of all rows but those where rounding chooses another expert"


@pytest.mark.needs("onnxruntime")
def test_float32_equals_transformers(mixture: tuple[Path, Any], tmp_path: Path) -> None:
    bundle = Bundle.open(export(mixture[0], tmp_path / "bundle", quantize="none"))
    np.testing.assert_allclose(*logits_of_both(mixture[1], bundle, "ort"), atol=1e-4)


@pytest.mark.needs("onnxruntime")
def test_a_bundle_is_verified_against_its_original(mixture: tuple[Path, Any], tmp_path: Path) -> None:
    """By transformers, with the weights that it makes of codes and scales."""
    bundle = export(mixture[0], tmp_path / "bundle", quantize="none")
    found = verify(bundle, mixture[0], None, [list(range(5, 45))], threads=1)
    assert found.passes
    assert found.largest_logit_error < 1e-4


@pytest.mark.parametrize("rounded", ["int8", "int4", "mixed"])
def test_a_verification_allows_what_the_other_matrices_may_lose(rounded: str) -> None:
    assert tolerance_of(Quantization(f"mxfp4+{rounded}", 32, 8)) == tolerance_of(Quantization(rounded, 32, 8))


@pytest.mark.parametrize(
    ("exponent", "options", "said"),
    [
        (255, {}, "has scales or minimums that are NaN, infinite or beyond fp16"),
        (255, {"quantize": "none"}, "holds NaN or infinite weights"),
        (144, {}, "beyond fp16"),
    ],
)
def test_a_scale_that_a_bundle_does_not_hold(
    mixture: tuple[Path, Any], exponent: int, options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    """2**16 and NaN; 2**15 is kept, and one below 2**-24 becomes 0, as products of scales of GGUF files do."""
    path = mixture[0] / "model-00002-of-00002.safetensors"
    file = SafetensorsFile(path)
    names = {
        name: np.frombuffer(file.read(entry, 0, entry.nbytes), np.uint8).reshape(entry.shape).copy()
        for name, entry in file.entries.items()
    }
    file.close()
    scales = names[f"{LAYER}.down_proj_scales"]
    scales[1, 2, 0], scales[0, 0, 0] = 143, 103
    save_file(names, path)
    kept = Bundle.open(export(mixture[0], tmp_path / "kept"))
    weights = stored(kept, "layers.0.experts.down_proj")[1]
    assert not weights[0, 0, :32].any()
    assert np.abs(weights[1, 2, :32]).max() >= 2.0**15 * 8
    scales[1, 2, 1] = exponent
    save_file(names, path)
    with pytest.raises(CheckpointError, match=said):
        export(mixture[0], tmp_path / "bundle", **options)


@pytest.mark.parametrize("bits", [4.5, 5.5, 8.5])
def test_a_budget_counts_what_is_kept(bits: float, tmp_path: Path) -> None:
    """Its share of the bits goes to the other matrices, which all get 8 bits where that is allowed."""
    target = save_in_mxfp4(REFERENCE / "target", tmp_path / "target", lambda name: ".mlp." in name)
    with open_target(locate(str(target)), lambda _: None) as opened:
        matrices = {name for name, shape in opened.shapes.items() if not is_plain(name, shape)}
        chosen = choose_formats(opened, bits)
        assert set(chosen) == {name for name in matrices if ".mlp." not in name}
        counts = {name: math.prod(opened.shapes[name]) for name in matrices}
        used = sum(counts[name] * chosen.get(name, MXFP4).stored_bits for name in matrices)
    assert used <= (bits + 1e-9) * sum(counts.values())
    assert {form.name for form in chosen.values()} == {4.5: {"int4-table"}, 8.5: {"int8"}}.get(
        bits, {form.name for form in chosen.values()}
    )


def test_a_norm_before_kept_matrices_is_not_rescaled(tmp_path: Path) -> None:
    """Their columns cannot be multiplied."""
    target = save_in_mxfp4(REFERENCE / "target", tmp_path / "target", lambda name: "q_proj" in name)
    text = tmp_path / "text.txt"
    text.write_text("def f(x):\n    return x + 1\n" * 100)
    names = ("layers.0.input_layernorm.weight", "layers.0.pre_feedforward_layernorm.weight")
    bundles = [
        Bundle.open(export(each, tmp_path / str(number), drafter="none", heads="none", calibrate=calibrate))
        for number, (each, calibrate) in enumerate([(target, None), (target, str(text))])
    ]
    found = []
    for bundle in bundles:
        table = bundle.manifest.tensors["target.onnx"]
        data = (bundle.path / table.file).read_bytes()
        places = [table.tensors[name] for name in names]
        found.append([data[place.offset : place.offset + place.bytes] for place in places])
        assert table.tensors["layers.0.self_attn.q_proj.weight"].format == "mxfp4"
    assert [before == after for before, after in zip(*found, strict=True)] == [True, False]
