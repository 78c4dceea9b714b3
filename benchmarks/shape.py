"""A random bundle of the exact shapes of any Gemma 4, with its assistant, as `e2b_shape` writes E2B's.

    python -m benchmarks.shape SIZE DIRECTORY [--quantize int4-table] [--head-bits 4] [--no-drafter] [--towers]
        [--layers N]

It goes through the exporter, matrix by matrix, so it takes no more memory than an export does. `--towers --layers 2
--no-drafter` writes whole towers and little else, for `benchmarks.media --towers-only`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from benchmarks.e2b_shape import RandomCheckpoint, described_target, with_towers
from benchmarks.footprint import AUDIO, TARGETS, VISION, drafter_fields, target_fields
from ondevice.bundle_format.model_config import Target
from ondevice.bundle_format.tensor_table import drafter_shapes
from ondevice_export.bundle_writer import BundleWriter
from ondevice_export.checkpoint.directory import Checkpoint
from ondevice_export.checkpoint.models import DrafterCheckpoint, TargetCheckpoint
from ondevice_export.checkpoint.source import Checkout
from ondevice_export.export_options import WEIGHT_FORMATS, ExportOptions
from ondevice_export.families.gemma4_assistant import read_drafter
from ondevice_export.graph_files import GraphFiles
from ondevice_export.manifest import make_manifest


def target_model(size: str, directory: Path, layers: int | None = None) -> TargetCheckpoint:
    """The target as the exporter sees it, or its last `layers` layers; its `config.json` goes below the directory."""
    fields = target_fields(size)
    if layers is not None:
        fields |= {"num_hidden_layers": layers, "layer_types": fields["layer_types"][-layers:]}
    checkout = _config(directory / f"gemma-4-{size}-shape", fields)
    return described_target(checkout, fields, lambda shapes: cast(Checkpoint, RandomCheckpoint(shapes)))


def drafter_model(size: str, directory: Path, target: Target) -> DrafterCheckpoint:
    """The same of its assistant."""
    fields = drafter_fields(size)
    checkout = _config(directory / f"gemma-4-{size}-shape-assistant", fields)
    config = read_drafter(fields, checkout.id, target)
    shapes = drafter_shapes(config, target)
    return DrafterCheckpoint(checkout, cast(Checkpoint, RandomCheckpoint(shapes)), config, shapes)


def write_bundle(
    size: str,
    out: Path,
    head_bits: int = 8,
    *,
    quantize: str = "int4",
    with_drafter: bool = True,
    towers: bool = False,
    layers: int | None = None,
) -> None:
    """Write the bundle, optionally with towers or only the last layers; an older one there is replaced."""
    drafted = "auto" if with_drafter else "none"
    options = ExportOptions(drafter=drafted, quantize=quantize, head_bits=head_bits)
    with tempfile.TemporaryDirectory() as name, BundleWriter(out) as bundle:
        target = target_model(size, Path(name), layers)
        vision, audio = (VISION[size], AUDIO.get(size)) if towers else (None, None)
        target = replace(target, vision=vision, audio=audio)
        drafter = drafter_model(size, Path(name), target.config) if with_drafter else None
        graphs = GraphFiles(bundle.directory, options, lambda _weights: None)
        table = graphs.write_target(target)
        if drafter is not None:
            graphs.write_drafter(drafter, target.config, table)
        if vision is not None:
            seeing = with_towers(target, vision, audio, clipped=size in ("E2B", "E4B"))
            graphs.write_vision(vision, seeing)
            if audio is not None:
                graphs.write_audio(audio, seeing)
        bundle.commit(make_manifest(target, drafter, options), graphs.tensors)


def _config(directory: Path, fields: Mapping[str, Any]) -> Checkout:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(fields), "utf-8")
    return Checkout(directory, directory.name, None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=TARGETS)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--head-bits", type=int, choices=(4, 8), default=8)
    parser.add_argument("--quantize", choices=WEIGHT_FORMATS, default="int4")
    parser.add_argument("--no-drafter", action="store_true")
    parser.add_argument(
        "--towers", action="store_true", help="with the vision tower, and the audio tower if it has one"
    )
    parser.add_argument("--layers", type=int, help="only the last so many layers of the language model")
    arguments = parser.parse_args()
    write_bundle(
        arguments.size,
        arguments.directory,
        arguments.head_bits,
        quantize=arguments.quantize,
        with_drafter=not arguments.no_drafter,
        towers=arguments.towers,
        layers=arguments.layers,
    )


if __name__ == "__main__":
    main()
