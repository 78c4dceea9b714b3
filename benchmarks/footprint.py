"""Size of Gemma 4's models on disk and in memory: `python -m benchmarks.footprint`.

Worked out from the published shapes of the text models, their assistants and their towers; nothing is downloaded or
measured. `benchmarks.start` measures the memory that a process really uses, `benchmarks.media` that of towers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from benchmarks import e2b_shape
from ondevice.bundle_format.audio import AudioEntry, audio_shapes
from ondevice.bundle_format.model_config import Target
from ondevice.bundle_format.tensor_table import Shapes, drafter_shapes
from ondevice.bundle_format.vision import VisionEntry, vision_shapes
from ondevice.cli.bench.tables import table
from ondevice_export.checkpoint.models import checkpoint_shapes
from ondevice_export.checkpoint.named_tensors import TensorNames
from ondevice_export.export_options import ExportOptions, Formats
from ondevice_export.families import read_target
from ondevice_export.families.gemma4_assistant import read_drafter
from ondevice_export.graph_files import estimate_bytes

Fields = Mapping[str, Any]

CHECKPOINT_BYTES = 2
"""Bytes of a weight in bf16."""
CACHE_BYTES = 2
"""Bytes of a number in the fp16 KV cache."""

FIVE_TO_ONE = ["sliding_attention"] * 5 + ["full_attention"]
NO_PLE = {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "use_double_wide_mlp": False}
LARGE = {**NO_PLE, "attention_k_eq_v": True, "sliding_window": 1024, "max_position_embeddings": 262_144}
LARGE_DRAFTER = {"hidden_size": 1024, "intermediate_size": 8192, "num_attention_heads": 16, "sliding_window": 1024}

TARGETS: dict[str, Fields] = {
    "E2B": {},
    "E4B": {
        "hidden_size": 2560,
        "num_hidden_layers": 42,
        "layer_types": FIVE_TO_ONE * 7,
        "num_key_value_heads": 2,
        "intermediate_size": 10240,
        "use_double_wide_mlp": False,
        "num_kv_shared_layers": 18,
    },
    "12B": {
        **LARGE,
        "hidden_size": 3840,
        "num_hidden_layers": 48,
        "layer_types": FIVE_TO_ONE * 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 1,
        "intermediate_size": 15360,
    },
    "26B-A4B": {
        **LARGE,
        "hidden_size": 2816,
        "num_hidden_layers": 30,
        "layer_types": FIVE_TO_ONE * 5,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 2,
        "intermediate_size": 2112,
        "enable_moe_block": True,
        "num_experts": 128,
        "top_k_experts": 8,
        "moe_intermediate_size": 704,
    },
    "31B": {
        **LARGE,
        "hidden_size": 5376,
        "num_hidden_layers": 60,
        "layer_types": FIVE_TO_ONE * 10,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "num_global_key_value_heads": 4,
        "intermediate_size": 21504,
    },
}
"""Published sizes, where they differ from E2B's."""

DRAFTERS: dict[str, Fields] = {
    "E2B": {},
    "E4B": {"num_key_value_heads": 2},
    "12B": {**LARGE_DRAFTER, "num_key_value_heads": 8, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
    "26B-A4B": {**LARGE_DRAFTER, "num_key_value_heads": 8, "num_global_key_value_heads": 2, "attention_k_eq_v": True},
    "31B": {**LARGE_DRAFTER, "num_key_value_heads": 16, "num_global_key_value_heads": 4, "attention_k_eq_v": True},
}

LARGE_VISION = replace(
    e2b_shape.VISION, layers=27, hidden_size=1152, intermediate_size=4304, query_heads=16, head_dim=72,
    standardize=True, bidirectional=True,
)  # fmt: skip

VISION: dict[str, VisionEntry] = {
    "E2B": e2b_shape.VISION,
    "E4B": e2b_shape.VISION,
    "12B": replace(
        e2b_shape.VISION, layers=0, hidden_size=3840, intermediate_size=0, query_heads=0, head_dim=0, patch=48, pool=1,
        positions=1120, bidirectional=True,
    ),
    "26B-A4B": LARGE_VISION,
    "31B": LARGE_VISION,
}  # fmt: skip
"""The vision towers of `TARGETS`."""

AUDIO: dict[str, AudioEntry] = {
    "E2B": e2b_shape.AUDIO,
    "E4B": e2b_shape.AUDIO,
    "12B": replace(
        e2b_shape.AUDIO, layers=0, hidden_size=0, query_heads=0, output_size=640, mel_bins=0, channels=0, kernel=0,
        keys=0, logit_cap=0.0, residual_weight=0.0,
    ),
}  # fmt: skip
"""The audio towers of those that have one."""


@dataclass(frozen=True)
class Footprint:
    """
    weights : of the target's text model
    checkpoint_bytes : target and drafter as published, in bf16
    bundle_bytes : the same as exported by default, at most
    pack_bytes : the copy of the matrices that the `simd` engine keeps in the cache directory and reads for every token
    cache_bytes_per_token : keys and values of the layers that keep every token
    window_bytes : keys and values of sliding layers, once their window is full
    """

    weights: int
    checkpoint_bytes: int
    bundle_bytes: int
    pack_bytes: int
    cache_bytes_per_token: int
    window_bytes: int


def footprint(name: str) -> Footprint:
    """The sizes of one of `TARGETS` with its drafter."""
    config, target, drafter = read_shapes(name)
    options = ExportOptions()
    weights = _count(target)
    exported = estimate_bytes(target, options.target_formats) + estimate_bytes(drafter, options.drafter_formats)
    per_token = {"full": 0, "sliding": 0}
    for index in config.kv_layers():
        own = config.layers[index].attention
        per_token[own.kind] += 2 * CACHE_BYTES * own.kv_width
    return Footprint(
        weights,
        CHECKPOINT_BYTES * (weights + _count(drafter)),
        exported,
        _packed(target, options.target_formats) + _packed(drafter, options.drafter_formats),
        per_token["full"],
        per_token["sliding"] * (config.window or 0),
    )


def tower_bytes(name: str, quantize: str) -> dict[str, int]:
    """Bytes of the towers' weights in a bundle, by graph.

    Args:
        name: one of `TARGETS`.
        quantize: `none` for float32, another name for 8 bits: see `ExportOptions`.
    """
    target, formats = read_shapes(name)[0], ExportOptions(quantize=quantize).tower_formats
    found = {VISION[name].graph: estimate_bytes(vision_shapes(VISION[name], target), formats)}
    if name in AUDIO:
        found[AUDIO[name].graph] = estimate_bytes(audio_shapes(AUDIO[name], target), formats)
    return found


def target_fields(name: str) -> dict[str, Any]:
    """The `config.json` of one of `TARGETS`, as far as its text model goes."""
    return {**e2b_shape.TARGET, **TARGETS[name]}


def drafter_fields(name: str) -> dict[str, Any]:
    """The same of its assistant."""
    return {
        **e2b_shape.DRAFTER,
        "backbone_hidden_size": target_fields(name)["hidden_size"],
        "use_ordered_embeddings": "num_global_key_value_heads" not in DRAFTERS[name],
        "text_config": {**e2b_shape.DRAFTER["text_config"], **DRAFTERS[name]},
    }


def read_shapes(name: str) -> tuple[Target, Shapes, Shapes]:
    """The target's configuration, and the tensors of target and drafter."""
    target = read_target(target_fields(name), name).target
    drafter = read_drafter(drafter_fields(name), name, target)
    return target, checkpoint_shapes(target, TensorNames("model.")), drafter_shapes(drafter, target)


def _packed(shapes: Shapes, formats: Formats) -> int:
    """Matrices with an fp16 scale per block; the tables whose rows are read one by one stay in the bundle."""
    ordered = any(name.endswith("token_ordering") for name in shapes)  # so a drafter scores a few rows of its table
    total = 0.0
    for name, shape in shapes.items():
        by_row = "embed_tokens_per_layer" in name or (ordered and name.endswith("embed_tokens.weight"))
        if len(shape) > 1 and not by_row and not name.endswith("router.proj.weight"):
            form = formats.head if name.endswith("embed_tokens.weight") else formats.layers
            total += math.prod(shape) * form.stored_bits(scale_bits=16) / 8
    return int(total)


def _count(shapes: Shapes) -> int:
    return sum(map(math.prod, shapes.values()))


def report() -> str:
    titles = ["model", "weights G", "checkpoint GB", "bundle GB", "pack GB", "KV MB per 1,000 tokens", "sliding MB"]
    rows = []
    for name in TARGETS:
        found = footprint(name)
        rows.append(
            [
                name,
                f"{found.weights / 1e9:.2f}",
                f"{found.checkpoint_bytes / 1e9:.1f}",
                f"{found.bundle_bytes / 1e9:.1f}",
                f"{found.pack_bytes / 1e9:.1f}",
                f"{found.cache_bytes_per_token / 1e3:.1f}",
                f"{found.window_bytes / 1e6:.1f}",
            ]
        )
    return table(titles, rows, left={"model"})


def towers_report() -> str:
    """The sizes of all towers in float32, as `--quantize none` writes them, and as exported by default."""
    graphs, rows = (e2b_shape.VISION.graph, e2b_shape.AUDIO.graph), []
    for name in TARGETS:
        sizes = [tower_bytes(name, quantize) for quantize in ("none", "int4")]
        cells = [f"{each[graph] / 1e6:.0f}" if graph in each else "none" for graph in graphs for each in sizes]
        rows.append([name, *cells])
    titles = [f"{graph} {form} MB" for graph in graphs for form in ("float32", "int8")]
    return table(["model", *titles], rows, left={"model"})


if __name__ == "__main__":
    print(f"{report()}\n\n{towers_report()}")
