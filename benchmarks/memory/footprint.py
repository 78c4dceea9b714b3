"""How large are Gemma 4's models on disk and in memory? Worked out from their published shapes, not measured.

    python -m benchmarks.memory.footprint

The text models, their assistants and their towers; nothing is downloaded. `benchmarks.memory.start` measures the
memory that a process really uses, `benchmarks.speed.media` that of towers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from benchmarks.bundles.gemma4 import AUDIO, E2B_AUDIO, E2B_VISION, TARGETS, VISION, read_shapes
from benchmarks.command import command_line, run_command
from ondevice.bundle_format.audio import audio_shapes
from ondevice.bundle_format.tensor_table import Shapes
from ondevice.bundle_format.vision import vision_shapes
from ondevice.cli.bench.tables import table
from ondevice_export.export_options import ExportOptions, Formats
from ondevice_export.graph_files import estimate_bytes

CHECKPOINT_BYTES = 2
"""Bytes of a weight in bf16."""
CACHE_BYTES = 2
"""Bytes of a number in the fp16 KV cache."""


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
        own = config.layers[index].mixer
        per_token[own.kind] += 2 * CACHE_BYTES * own.kv_width
    return Footprint(
        weights,
        CHECKPOINT_BYTES * (weights + _count(drafter)),
        exported,
        packed_bytes(target, options.target_formats) + packed_bytes(drafter, options.drafter_formats),
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


def packed_bytes(shapes: Shapes, formats: Formats) -> int:
    """Matrices with an fp16 scale per block; the tables whose rows are read one by one stay in the bundle."""
    ordered = any(name.endswith("token_ordering") for name in shapes)  # so a drafter scores a few rows of its table
    total = 0.0
    for name, shape in shapes.items():
        by_row = "embed_tokens_per_layer" in name or (ordered and name.endswith("embed_tokens.weight"))
        if len(shape) > 1 and not by_row and not name.endswith("router.proj.weight"):
            form = formats.head if name.endswith("embed_tokens.weight") else formats.layers
            total += math.prod(shape) * form.stored_bits / 8
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
    graphs, rows = (E2B_VISION.graph, E2B_AUDIO.graph), []
    for name in TARGETS:
        sizes = [tower_bytes(name, quantize) for quantize in ("none", "int4")]
        cells = [f"{each[graph] / 1e6:.0f}" if graph in each else "none" for graph in graphs for each in sizes]
        rows.append([name, *cells])
    titles = [f"{graph} {form} MB" for graph in graphs for form in ("float32", "int8")]
    return table(["model", *titles], rows, left={"model"})


def main() -> None:
    command_line(__doc__).parse_args()
    print(f"{report()}\n\n{towers_report()}")


if __name__ == "__main__":
    run_command(main)
