"""Tiny random checkpoints in the format of Google's mobile checkpoints, which were trained quantised.

They cover every mix of bits per weight.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tests.tiny_models import save_drafter, save_target

Floats = npt.NDArray[np.float32]


class Mix(NamedTuple):
    """A model family and its `quantization_config`, which gives the bits of each module."""

    family: str
    quantization: dict[str, Any]
    calibrated: float = 1.0
    """Share of the linear layers that have static scales for their inputs and outputs."""
    blocks: int = 1
    """Scales per row of the per-layer embedding table, as a multiple of the number of layers."""


_LIKE_E2B = {
    r"^lm_head$": {"num_bits": 2},
    r"embed_tokens$": {"num_bits": 2},
    r"embed_tokens_per_layer$": {"num_bits": 4},
    r"layers\.[0-2]\.mlp\.": {"num_bits": 4},
    r"layers\.\d+\.mlp\.": {"num_bits": 2},
    r"per_layer_input_gate$": {"num_bits": 8},
    r"per_layer_projection$": {"num_bits": 8},
    r"self_attn\.": {"num_bits": 4},
}
_PLAIN = ["per_layer_model_projection"]

MIXES = {
    "like-e2b": Mix("e2b", {"module_quant_configs": _LIKE_E2B, "modules_to_not_convert": _PLAIN}, blocks=6),
    # every projection of a layer has another number of bits, so that no two can share an input
    "each-its-own": Mix(
        "e4b",
        {
            "num_bits": 8,
            "module_quant_configs": {
                r"q_proj|gate_proj": {"num_bits": 2},
                r"k_proj|down_proj": {"num_bits": 4},
                r"layers\.[13]\.mlp\.up_proj|o_proj": {"num_bits": 2},
                r"embed_tokens$": {},
            },
            "modules_to_not_convert": [],
        },
    ),
    "all-of-two": Mix("12b", {"num_bits": 2, "modules_to_not_convert": []}),
    "all-of-eight": Mix("31b", {"num_bits": 8, "modules_to_not_convert": ["lm_head"]}),
    # unquantised tables and some unquantised layers, and layers without static activation scales
    "half": Mix(
        "e2b",
        {
            "num_bits": 4,
            "quantize_embeddings": False,
            "module_quant_configs": {r"mlp": {"num_bits": 2}},
            "modules_to_not_convert": ["lm_head", r"model.layers.1", r"model.layers.\d.self_attn.k_proj", "up_proj"],
        },
        calibrated=0.5,
    ),
}
"""Quantisation mixes by name."""

TRAINED = ("like-e2b", "half")
"""Names of the mixes that all tests of the simd engine run with."""


def save_trained_pair(directory: Path, mix: str, numbers: str = "BF16") -> None:
    """Save a target in `directory / "target"` and a drafter in `directory / "drafter"`.

    `numbers` is the dtype of unquantised tensors, BF16 or F32.
    """
    save_trained(directory / "target", MIXES[mix], numbers)
    save_drafter(directory / "drafter", MIXES[mix].family)


def save_trained(path: Path, mix: Mix, numbers: str = "BF16") -> None:
    """Save a target whose codes are the nearest to the weights of a tiny random model."""
    from ondevice_export.checkpoint.gemma_quantization import read_quantization
    from ondevice_export.checkpoint.safetensors_file import SafetensorsFile, to_float32

    save_target(path, mix.family)
    config = json.loads((path / "config.json").read_text())
    for each in (config, config.get("text_config", config)):
        each["tie_word_embeddings"] = False
    defaults = {"quant_method": "gemma", "num_bits": 4, "quantize_embeddings": True}
    config["quantization_config"] = defaults | mix.quantization
    (path / "config.json").write_text(json.dumps(config))
    quantization = read_quantization(config, str(path))
    assert quantization is not None
    file = SafetensorsFile(path / "model.safetensors")
    weights = {
        name: to_float32(file.read(entry, 0, entry.nbytes), entry.dtype, name).reshape(entry.shape)
        for name, entry in file.entries.items()
    }
    file.close()
    rng = np.random.default_rng(7)
    table = next(name for name in weights if name.endswith("embed_tokens.weight"))
    weights["lm_head.weight"] = rng.permuted(weights[table], axis=1)
    tensors: dict[str, npt.NDArray[Any]] = {}
    for name, weight in sorted(weights.items()):
        module = name.removesuffix(".weight")
        embedding = "embed_tokens" in name
        converted = weight.ndim == 2 and quantization.converts(module) and (quantization.embeddings or not embedding)
        if not converted:
            tensors[name] = weight
            continue
        bits = quantization.candidates(module)[-1]
        blocks = mix.blocks if "per_layer" in name and embedding else 1
        codes, scales = quantise(weight, bits, blocks)
        if embedding:
            tensors[f"{module}.embedding_quantized"], tensors[f"{module}.embedding_scale"] = codes, scales
            continue
        tensors[name], tensors[f"{module}.weight_scale"] = codes, scales
        for side, low, high in (("input", 0.01, 0.04), ("output", 0.005, 0.03)):
            wide = 4 if module == "lm_head" else 1  # a narrower range would clip many logits to the same value
            step = wide * rng.uniform(low, high) if rng.random() < mix.calibrated else 0.0
            tensors[f"{module}.{side}_activation_scale"] = np.array(step, np.float32)
        for side in "kv":
            if module.endswith("k_proj"):
                cache = module.removesuffix("k_proj")
                tensors[f"{cache}{side}_cache_scale"] = np.array(0.1, np.float32)
    _save(path / "model.safetensors", tensors, numbers)


def quantise(weight: Floats, bits: int, blocks: int) -> tuple[npt.NDArray[Any], Floats]:
    """Quantise a matrix: codes (packed uint8, low bits first, or int8 for 8 bits) and scales [rows, blocks]."""
    half = 1 << (bits - 1)
    split = weight.reshape(len(weight), blocks, -1)
    scales = (np.abs(split).max(axis=-1) / (half - 0.5)).astype(np.float32)
    codes = np.clip(np.rint(split / scales[..., None]), -half, half - 1).astype(np.int64).reshape(weight.shape)
    if bits == 8:
        return codes.astype(np.int8), scales
    fields = (codes + half).reshape(len(weight), -1, 8 // bits)
    return (fields << np.arange(0, 8, bits)).sum(axis=-1).astype(np.uint8), scales


def _save(path: Path, tensors: dict[str, npt.NDArray[Any]], numbers: str) -> None:
    """Write a safetensors file, with large float tensors as BF16 unless `numbers` is F32."""
    header, data = {}, bytearray()
    for name, tensor in tensors.items():
        dtype = {"float32": "F32", "uint8": "U8", "int8": "I8"}[tensor.dtype.name]
        stored = np.ascontiguousarray(tensor)
        if dtype == "F32" and tensor.ndim == 2 and not name.endswith("_scale") and numbers == "BF16":
            dtype, stored = "BF16", (stored.view(np.uint32) >> 16).astype(np.uint16)
        begin = len(data)
        data += stored.tobytes()
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [begin, len(data)]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
