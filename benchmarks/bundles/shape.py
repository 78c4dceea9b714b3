"""Write a random bundle of a Gemma 4's exact shapes, with its assistant, to measure speed without the real weights.

    python -m benchmarks.bundles.shape SIZE DIRECTORY [--head-bits 4 | --mobile] [--quantize int4-table] [--heads]
        [--towers] [--no-drafter] [--layers N]

It goes through the exporter, matrix by matrix, so its graphs are the real ones, and it takes no more memory than an
export does; E2B's has 2.8 GB and takes less than a minute. `--mobile` and `--heads` are for E2B: the form of Google's
mobile checkpoint (2, 4 and 8 bits, a scale for each row, static activations), and heads for drafts of every kind.
`--towers --layers 2 --no-drafter` writes whole towers and little else, for `benchmarks.speed.media --towers-only`.
Models of other families (`benchmarks.bundles.other_families`), which have no assistant and no towers, are sizes too;
those of Qwen3.5 have an MTP layer, which `--no-drafter` leaves out.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from benchmarks.bundles import gemma4, other_families
from benchmarks.bundles.gemma4 import E2B_AUDIO, E2B_VISION, TARGETS, drafter_fields, target_fields
from benchmarks.bundles.random_checkpoints import (
    QUANTIZATION,
    MobileCheckpoint,
    RandomCheckpoint,
    RandomMxfp4,
    RandomTower,
)
from benchmarks.command import command_line, run_command, whole
from ondevice.bundle_format.audio import AudioEntry
from ondevice.bundle_format.model_config import Target
from ondevice.bundle_format.tensor_table import MTP, Shapes, drafter_shapes
from ondevice.bundle_format.vision import VisionEntry
from ondevice_export.bundle_writer import BundleWriter
from ondevice_export.checkpoint import audio as audio_towers
from ondevice_export.checkpoint import vision as vision_towers
from ondevice_export.checkpoint.directory import Checkpoint
from ondevice_export.checkpoint.heads import HeadsCheckpoint, all_shapes
from ondevice_export.checkpoint.models import DrafterCheckpoint, MtpLayer, TargetCheckpoint, checkpoint_shapes
from ondevice_export.checkpoint.named_tensors import NamedTensors, TensorNames
from ondevice_export.checkpoint.quantized.gemma import read_quantization
from ondevice_export.checkpoint.quantized.gemma_modules import QuantizedModules
from ondevice_export.checkpoint.source import Checkout
from ondevice_export.export_options import WEIGHT_FORMATS, ExportOptions
from ondevice_export.families import read_target
from ondevice_export.families.gemma4_assistant import read_drafter
from ondevice_export.families.mtp import LISTED, with_mtp_layer
from ondevice_export.graph_files import GraphFiles
from ondevice_export.manifest import make_manifest

E2B = "E2B"


def write_bundle(
    size: str,
    out: Path,
    head_bits: int = 8,
    *,
    quantize: str = "int4",
    with_drafter: bool = True,
    heads: bool = False,
    mobile: bool = False,
    towers: bool = False,
    layers: int | None = None,
) -> None:
    """Write the bundle, optionally with heads or towers, or only the last layers; an older one there is replaced.

    Args:
        heads: E2B's, of every kind.
        mobile: E2B as a checkpoint that was trained quantised.
    """
    options = ExportOptions(quantize=quantize, head_bits=head_bits)
    with tempfile.TemporaryDirectory() as name, BundleWriter(out) as bundle:
        directory = Path(name)
        target = mobile_model(directory) if mobile else target_model(size, directory, layers)
        vision, audio = (gemma4.VISION[size], gemma4.AUDIO.get(size)) if towers else (None, None)
        target = replace(target, vision=vision, audio=audio)
        drafter = None
        if with_drafter and target.mtp is not None:
            target, drafter = target.mtp.beside(target)
        elif with_drafter and size in TARGETS:
            drafter = drafter_model(size, directory, target.config)
        graphs = GraphFiles(bundle.directory, options, lambda _weights: None)
        table = graphs.write_target(target)
        if drafter is not None:
            graphs.write_drafter(drafter, target.config, table)
        trained = _heads(target) if heads else None
        if trained is not None:
            graphs.write_heads(trained, target.config, table)
        if vision is not None:
            seeing = with_towers(target, vision, audio, clipped=size in (E2B, "E4B"))
            graphs.write_vision(vision, seeing)
            if audio is not None:
                graphs.write_audio(audio, seeing)
        bundle.commit(make_manifest(target, drafter, options, trained), graphs.tensors)


def target_model(size: str, directory: Path, layers: int | None = None) -> TargetCheckpoint:
    """The target as the exporter sees it, or its last `layers` layers; its `config.json` goes below the directory."""
    made = RandomMxfp4 if size in other_families.IN_MXFP4 else RandomCheckpoint
    # the mean of a clamped SwiGLU is not 0: rows would drift together
    larger = 32.0 if size in other_families.IN_MXFP4 else 1.0
    if size in TARGETS:
        name, fields, factor = f"gemma-4-{size}-shape", target_fields(size), 1.0
    else:  # without Gemma's factor of embeddings, in the weights
        fields = dict(other_families.FIELDS[size])
        name, factor = f"{size}-shape", larger * math.sqrt(fields["hidden_size"])
    if layers is not None:
        changed: dict[str, Any] = {"num_hidden_layers": layers}
        if "layer_types" in fields:
            changed["layer_types"] = fields["layer_types"][-layers:]
        if "num_dense_layers" in fields:
            changed["num_dense_layers"] = max(0, fields["num_dense_layers"] + layers - fields["num_hidden_layers"])
        fields |= changed
    checkout = _config(directory / name, fields)
    return described_target(checkout, fields, lambda shapes: cast(Checkpoint, made(shapes, factor)))


def described_target(
    checkout: Checkout, fields: Mapping[str, Any], make: Callable[[Shapes], Checkpoint]
) -> TargetCheckpoint:
    """A target as the exporter sees it, with the tensors that `make` makes of their shapes."""
    family, config, target = read_target(fields, checkout.id)
    names, mtp = TensorNames("model."), None
    shapes = checkpoint_shapes(target, names)
    every = dict(shapes)
    if fields.get("mtp_num_hidden_layers"):
        listed = np.arange(LISTED)
        written, drafter = with_mtp_layer(family, config, target, len(listed))
        mtp = MtpLayer(written, drafter, TensorNames(MTP, own_prefix="model."), listed, {})
        every |= checkpoint_shapes(written, names) | mtp.shapes
    tensors = NamedTensors(make(every), names)
    return TargetCheckpoint(checkout, tensors, family.name, target, shapes, config.token_ids, mtp=mtp)


def mobile_model(directory: Path) -> TargetCheckpoint:
    """E2B of a checkpoint that was trained quantised."""
    fields = {**target_fields(E2B), "tie_word_embeddings": False, "quantization_config": QUANTIZATION}
    checkout = _config(directory / "gemma-4-E2B-mobile-shape", fields)
    layers, quantization = fields["num_hidden_layers"], read_quantization(fields, checkout.id)
    assert quantization is not None
    target = described_target(checkout, fields, lambda shapes: cast(Checkpoint, MobileCheckpoint(shapes, layers)))
    return replace(target, modules=QuantizedModules(target.checkpoint, quantization, target.shapes))


def drafter_model(size: str, directory: Path, target: Target) -> DrafterCheckpoint:
    """The assistant as the exporter sees it."""
    fields = drafter_fields(size)
    checkout = _config(directory / f"gemma-4-{size}-shape-assistant", fields)
    config = read_drafter(fields, checkout.id, target)
    shapes = drafter_shapes(config, target)
    return DrafterCheckpoint(checkout, NamedTensors(cast(Checkpoint, RandomCheckpoint(shapes))), config, shapes)


def with_towers(
    target: TargetCheckpoint,
    vision: VisionEntry = E2B_VISION,
    audio: AudioEntry | None = E2B_AUDIO,
    *,
    clipped: bool = True,
) -> TargetCheckpoint:
    """The target with towers, E2B's if not others, for `GraphFiles.write_vision` and `write_audio` alone."""
    shapes = vision_towers.checkpoint_shapes(vision, target.config, clipped=clipped)
    if audio is not None:
        shapes |= audio_towers.checkpoint_shapes(audio, target.config, clipped=clipped)
    tensors = NamedTensors(cast(Checkpoint, RandomTower(shapes)))
    return replace(target, tensors=tensors, vision=vision, audio=audio)


def _heads(target: TargetCheckpoint) -> HeadsCheckpoint:
    shapes = all_shapes(gemma4.HEADS, target.config)
    return HeadsCheckpoint(target.checkout, cast(Checkpoint, RandomCheckpoint(shapes)), gemma4.HEADS, shapes)


def _config(directory: Path, fields: Mapping[str, Any]) -> Checkout:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(fields), "utf-8")
    return Checkout(directory, directory.name, None)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("size", choices=[*TARGETS, *other_families.FIELDS])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--head-bits", type=int, choices=(4, 8), default=8)
    parser.add_argument("--quantize", choices=WEIGHT_FORMATS, default="int4")
    parser.add_argument("--no-drafter", action="store_true")
    parser.add_argument("--heads", action="store_true", help="with heads of every kind (E2B)")
    parser.add_argument("--mobile", action="store_true", help="as Google's mobile checkpoint: 2, 4 and 8 bits (E2B)")
    parser.add_argument(
        "--towers", action="store_true", help="with the vision tower, and the audio tower if it has one"
    )
    parser.add_argument("--layers", type=whole(1), help="only the last so many layers of the language model")
    arguments = parser.parse_args()
    if arguments.size != E2B and (arguments.heads or arguments.mobile):
        parser.error("--heads and --mobile are for E2B")
    if arguments.size not in TARGETS and arguments.towers:
        parser.error("--towers is for Gemma 4")
    write_bundle(
        arguments.size,
        arguments.directory,
        arguments.head_bits,
        quantize=arguments.quantize,
        with_drafter=not arguments.no_drafter,
        heads=arguments.heads,
        mobile=arguments.mobile,
        towers=arguments.towers,
        layers=arguments.layers,
    )


if __name__ == "__main__":
    run_command(main)
