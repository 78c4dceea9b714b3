"""Checkpoints that were trained quantised: both engines against transformers, and codes and scales bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ondevice.bundle import Bundle
from ondevice.engines.ort import OrtEngine
from ondevice.engines.protocol import Engine, Rows, TokenTree
from ondevice.engines.simd.engine import SimdEngine
from ondevice.engines.simd.program import BundleModels
from ondevice.engines.simd.tensor_files import Matrix
from ondevice.errors import CheckpointError, UsageError
from ondevice_export import export
from ondevice_export.checkpoint.json_fields import read_json
from ondevice_export.checkpoint.quantized.gemma import read_quantization
from ondevice_export.original import Original
from tests.conftest import ROOT
from tests.fixtures.tiny_models import VOCAB
from tests.fixtures.trained_models import MIXES, save_trained, save_trained_pair
from tests.fixtures.trained_oracle import IDS, logits

ENGINES: dict[str, tuple[Callable[[Bundle], Engine], bool]] = {
    "simd": (lambda bundle: SimdEngine(bundle, threads=2), True),
    "ort": (lambda bundle: OrtEngine(bundle, threads=1), False),
}
"""By name, with whether its cache is of fp16."""


@pytest.fixture(scope="module", params=[*((mix, "BF16") for mix in MIXES), ("half", "F32")], ids="-".join)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The name of a mix, and a directory with checkpoints, `target` and `drafter`, and their `bundle`."""
    mix, numbers = request.param
    directory = tmp_path_factory.mktemp(mix)
    save_trained_pair(directory, mix, numbers)
    export(directory / "target", directory / "bundle")
    return mix, directory


def run(engine: Engine, chunks: list[list[int]]) -> np.ndarray:
    """Logits [T, V] of the tokens of some chunks, one forward for each."""
    session, found = engine.open_session(), []
    for chunk in chunks:
        rows = Rows(session, TokenTree.chain(chunk), range(len(chunk)))
        found.append(engine.forward([rows])[0].logits[:, :VOCAB].copy())
        session.commit(range(len(chunk)))
    return np.concatenate(found)


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    """All rows to float rounding. A sum that lies between two steps of an activation may fall to the other side of it,
    and then what follows is another number: seldom enough for nearly all rows.
    """
    off = np.abs(found - expected).max(axis=1) > 1e-5
    assert off.mean() <= 0.15, np.abs(found - expected).max(axis=1)


@pytest.mark.parametrize("name", ENGINES)
def test_logits_are_those_of_the_documented_arithmetic(pair: tuple[str, Path], name: str) -> None:
    make, half = ENGINES[name]
    _, directory = pair
    engine = make(Bundle.open(directory / "bundle"))
    assert_close(run(engine, [IDS]), logits(directory / "target", half=half))
    engine.close()


def test_verification_says_which_transformers_it_needs(pair: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    _, directory = pair
    monkeypatch.setattr("transformers.__version__", "5.22.2")
    with pytest.raises(UsageError, match=r"transformers 5\.22\.2 .* 5\.23 or newer"):
        Original(directory / "target", None)


def test_logits_are_those_of_the_loader_in_transformers(pair: tuple[str, Path], tmp_path: Path) -> None:
    """See `tests.fixtures.trained_oracle` for what this needs."""
    place = os.environ.get("ONDEVICE_TRANSFORMERS")
    if not place:
        pytest.skip("ONDEVICE_TRANSFORMERS names no directory with transformers 5.23")
    _, directory = pair
    command = [
        sys.executable,
        "-m",
        "tests.fixtures.trained_oracle",
        str(directory / "target"),
        str(tmp_path / "logits.npy"),
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([place, str(ROOT), str(ROOT / "export")])}
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    np.testing.assert_allclose(np.load(tmp_path / "logits.npy"), logits(directory / "target"), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ENGINES)
def test_rows_do_not_depend_on_those_beside_them(pair: tuple[str, Path], name: str) -> None:
    mix, directory = pair
    engine = ENGINES[name][0](Bundle.open(directory / "bundle"))
    whole = run(engine, [IDS])
    if name == "ort" and MIXES[mix].calibrated < 1:  # whose products of numbers that are not whole are not exact
        assert_close(run(engine, [[token] for token in IDS]), whole)
        return
    np.testing.assert_array_equal(run(engine, [[token] for token in IDS]), whole)
    np.testing.assert_array_equal(run(engine, [IDS[:3], IDS[3:11], IDS[11:]]), whole)
    engine.close()


def test_codes_and_scales_are_those_of_the_checkpoint(pair: tuple[str, Path]) -> None:
    from safetensors.numpy import load_file

    _, directory = pair
    quantization = read_quantization(read_json(directory / "target" / "config.json"), "config.json")
    assert quantization is not None
    names = json.loads((directory / "target" / "config.json").read_text())
    prefix = "model.language_model." if "Unified" in names["architectures"][0] else "model."
    tensors = load_float(directory / "target" / "model.safetensors", load_file)
    model = BundleModels(Bundle.open(directory / "bundle")).target
    modules: dict[str, Matrix] = {"lm_head": model.head, f"{prefix}embed_tokens": model.table}
    for index, layer in enumerate(model.layers):
        modules |= {f"{prefix}layers.{index}.{name}": matrix for name, matrix in layer.matrices.items()}
    if model.per_layer is not None:
        modules[f"{prefix}embed_tokens_per_layer"] = model.per_layer.table
    for name, module in modules.items():
        codes = tensors.get(f"{name}.embedding_quantized", tensors.get(f"{name}.weight"))
        assert codes is not None
        if codes.dtype not in (np.uint8, np.int8):
            assert not module.format.quantised
            np.testing.assert_array_equal(module.codes, codes.view(np.uint8).reshape(len(codes), -1))
            continue
        flip = 128 if codes.dtype == np.int8 else 0
        np.testing.assert_array_equal(module.codes, codes.view(np.uint8) ^ flip)
        kept = module.scales.reshape(len(codes), -1)
        np.testing.assert_array_equal(kept, tensors.get(f"{name}.embedding_scale", tensors.get(f"{name}.weight_scale")))
        if f"{name}.input_activation_scale" in tensors:
            assert module.input_step == tensors[f"{name}.input_activation_scale"]
            assert module.output_step == tensors[f"{name}.output_activation_scale"]


def load_float(path: Path, load_file: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """Tensors by name; those that numpy has no type for as their bits."""
    try:
        return load_file(path)
    except (TypeError, KeyError, AttributeError):
        import torch
        from safetensors.torch import load_file as load_torch

        found = load_torch(path)
        return {
            name: (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
            for name, tensor in found.items()
        }


def test_bundle_json_tells_how_the_weights_were_made(pair: tuple[str, Path]) -> None:
    mix, directory = pair
    found = Bundle.open(directory / "bundle").manifest.quantization
    assert (found.weights, found.block_size) == ("trained", 0)
    assert found.head_bits == {"like-e2b": 2, "each-its-own": 8, "all-of-two": 2}.get(mix, found.head_bits)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"quant_method": "fp8"}, "quantised by 'fp8'"),
        ({"num_bits": 3}, "num_bits is 3"),
        ({"module_quant_configs": {"mlp": {"num_bits": 8}}}, "weights of 8 bits"),
        ({"module_quant_configs": {"(": {}}}, "not a regular expression"),
        ({"module_quant_configs": {"mlp": {"group_size": 32}}}, "group_size"),
        ({"module_quant_configs": ["mlp"]}, "expected an object"),
        ({"modules_to_not_convert": "lm_head"}, "not a list of names"),
        ({"modules_to_not_convert": ["lm_head"]}, "lm_head.weight"),
        ({"modules_to_not_convert": ["(?i)x"]}, "is not a regular expression"),
        ({"modules_to_not_convert": [r"(\w+\.?)+!"]}, "could take for ever"),
        ({"module_quant_configs": {r"(?:a|aa)*!": {}}}, "could take for ever"),
        ({"module_quant_configs": {r".*.*.*.*.*!": {}}}, "could take for ever"),
        ({"quantize_embeddings": 1}, "expected true or false"),
    ],
)
def test_a_configuration_that_cannot_be(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    save_trained(tmp_path / "target", MIXES["all-of-two"])
    path = tmp_path / "target" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= changes
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=said):
        export(tmp_path / "target", tmp_path / "bundle", drafter="none")


@pytest.mark.parametrize("option", [{"calibrate": ""}, {"bits_per_weight": 5.0}])
def test_an_option_that_could_only_change_other_weights(tmp_path: Path, option: dict[str, Any]) -> None:
    save_trained(tmp_path / "target", MIXES["all-of-two"])
    with pytest.raises(UsageError, match="stay as they were trained: leave --calibrate and --bits-per-weight out"):
        export(tmp_path / "target", tmp_path / "bundle", drafter="none", **option)
    assert not (tmp_path / "bundle").exists()


def test_a_pattern_counts_that_fits_the_tensors(tmp_path: Path) -> None:
    """By the documentation the first that is found, by the loader the leftmost: `mlp` or `layers.0` here."""
    patterns = {r"mlp": {"num_bits": 2}, r"layers\.0": {"num_bits": 8}}
    mix = replace_quantization("all-of-two", {"num_bits": 4, "module_quant_configs": patterns})
    save_trained(tmp_path / "target", mix)
    quantization = read_quantization(read_json(tmp_path / "target" / "config.json"), "config.json")
    assert quantization is not None
    assert quantization.candidates("model.layers.0.mlp.up_proj") == (2, 8)
    model = BundleModels(Bundle.open(export(tmp_path / "target", tmp_path / "bundle", drafter="none"))).target
    assert [layer.matrices["mlp.up_proj"].format.bits for layer in model.layers] == [8, 2, 2]
    assert [layer.matrices["self_attn.q_proj"].format.bits for layer in model.layers] == [8, 4, 4]


def replace_quantization(name: str, quantization: dict[str, Any]) -> Any:
    return MIXES[name]._replace(quantization={"modules_to_not_convert": [], **quantization})
