"""Write a random bundle of Gemma 4 E2B's exact shapes, with its assistant, to measure speed without the real weights.

    python -m benchmarks.e2b_shape DIRECTORY [--head-bits 4 | --mobile] [--heads] [--towers]

It goes through the exporter, so its graphs are the real ones; about 2.8 GB, in under a minute. With `--mobile` its
target has the form of Google's mobile checkpoint: 2, 4 and 8 bits, a scale for each row, static activations. With
`--towers` it reads media: see `benchmarks.media`. `python -m benchmarks.rows DIRECTORY --beside OTHER` compares two
of them in one run, and so does `benchmarks.start`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from benchmarks.mobile_checkpoint import QUANTIZATION, MobileCheckpoint
from ondevice.bundle_format.audio import AudioEntry
from ondevice.bundle_format.model_config import HeadsEntry, ShortlistEntry, Target
from ondevice.bundle_format.tensor_table import Shapes, drafter_shapes
from ondevice.bundle_format.vision import VisionEntry
from ondevice_export.bundle_writer import BundleWriter
from ondevice_export.checkpoint import audio as audio_towers
from ondevice_export.checkpoint import vision as vision_towers
from ondevice_export.checkpoint.directory import Checkpoint
from ondevice_export.checkpoint.gemma_quantization import read_quantization
from ondevice_export.checkpoint.heads import HeadsCheckpoint, all_shapes
from ondevice_export.checkpoint.models import DrafterCheckpoint, TargetCheckpoint, checkpoint_shapes
from ondevice_export.checkpoint.named_tensors import NamedTensors, TensorNames
from ondevice_export.checkpoint.quantized_modules import QuantizedModules
from ondevice_export.checkpoint.source import Checkout
from ondevice_export.export_options import ExportOptions
from ondevice_export.families import read_target
from ondevice_export.families.gemma4_assistant import read_drafter
from ondevice_export.graph_files import GraphFiles
from ondevice_export.manifest import make_manifest

FloatArray = npt.NDArray[np.float32]

VOCABULARY = 262_144

TARGET: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"],
    "hidden_size": 1536,
    "num_hidden_layers": 35,
    "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "global_head_dim": 512,
    "intermediate_size": 6144,
    "use_double_wide_mlp": True,
    "num_kv_shared_layers": 20,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": VOCABULARY,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 131_072,
    "final_logit_softcapping": 30.0,
    "rms_norm_eps": 1e-6,
}

DRAFTER: dict[str, Any] = {
    "architectures": ["Gemma4AssistantForCausalLM"],
    "backbone_hidden_size": 1536,
    "use_ordered_embeddings": True,
    "num_centroids": 2048,
    "centroid_intermediate_top_k": 32,
    "text_config": {
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 4,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "global_head_dim": 512,
        "intermediate_size": 2048,
        "sliding_window": 512,
        "hidden_size_per_layer_input": 0,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
    },
}


def noise() -> FloatArray:
    """float32[N]: values that fill matrices repeatedly."""
    return np.random.default_rng(0).standard_normal(1 << 22, np.float32) * np.float32(0.02)


class RandomCheckpoint:
    """Stands in for `Checkpoint`: matrices are one random block over and over, norms and scalars are ones."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes = shapes
        self._noise = noise()
        self._twice = np.concatenate([self._noise, self._noise])

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(self, name: str) -> FloatArray:
        shape = self._shapes[name]
        return np.ones(shape, np.float32) if len(shape) == 1 else self.rows(name, 0, shape[0])

    def rows(self, name: str, start: int, stop: int) -> FloatArray:
        width = self._shapes[name][-1]
        first, count = start * width % len(self._noise), (stop - start) * width
        part = self._twice[first : first + min(count, len(self._noise))]  # a part of no more than the noise is no copy
        return np.resize(part, (stop - start, width)) if len(part) < count else part.reshape(-1, width)

    def picked_rows(self, name: str, indices: npt.NDArray[np.int64]) -> FloatArray:
        return self.rows(name, 0, len(indices))

    def integers(self, name: str) -> npt.NDArray[np.int64]:
        return np.random.default_rng(1).permutation(self._shapes[name][0])


VISION = VisionEntry(
    graph=vision_towers.VISION_GRAPH, layers=16, hidden_size=768, intermediate_size=3072, query_heads=12, head_dim=64,
    norm_eps=1e-6, theta=100.0, patch=16, pool=3, positions=10_240, standardize=False, tokens=280,
    begin_token_id=255_999, image_token_id=258_880, end_token_id=258_882,
)  # fmt: skip


AUDIO = AudioEntry(
    graph=audio_towers.AUDIO_GRAPH, layers=12, hidden_size=1024, query_heads=8, output_size=1536, mel_bins=128,
    channels=32, kernel=5, keys=12, logit_cap=50.0, residual_weight=0.5, norm_eps=1e-6, begin_token_id=256_000,
    audio_token_id=258_881, end_token_id=258_883,
)  # fmt: skip


class RandomTower(RandomCheckpoint):
    """The same for a tower, whose matrices all differ: ONNX Runtime keeps equal ones once.

    Linear layers have ranges that hold nearly all numbers. Norms spread log-normally, so that channels differ in size;
    those of queries and keys are smaller, because attention has the scale 1: with large scores it would be chaotic.
    """

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def read(self, name: str) -> FloatArray:
        if name.endswith(("_min", "_max")):
            return np.array(20.0 if name.endswith("_max") else -20.0, np.float32)
        shape = self._shapes[name]
        if len(shape) > 1 and name.startswith(audio_towers.TOWER):
            first = zlib.crc32(name.encode()) % len(self._noise)
            return np.resize(self._twice[first : first + len(self._noise)], shape)
        own = np.random.default_rng(zlib.crc32(name.encode()))
        spread = np.exp(own.standard_normal(self._shapes[name]) / 2).astype(np.float32)
        return spread * np.float32(VISION.head_dim**-0.25 if name.endswith(("q_norm.weight", "k_norm.weight")) else 1)

    def rows(self, name: str, start: int, stop: int) -> FloatArray:
        *_, width = self._shapes[name]
        first = (zlib.crc32(name.encode()) + start * width) % len(self._noise)
        count = (stop - start) * width
        return np.resize(self._twice[first : first + len(self._noise)], count).reshape(-1, width)

    def picked_rows(self, name: str, indices: npt.NDArray[np.int64]) -> FloatArray:
        return self.rows(name, 0, self._shapes[name][0])[indices]


def with_towers(
    target: TargetCheckpoint, vision: VisionEntry = VISION, audio: AudioEntry | None = AUDIO, *, clipped: bool = True
) -> TargetCheckpoint:
    """The target with towers, E2B's if not others, for `GraphFiles.write_vision` and `write_audio` alone."""
    shapes = vision_towers.checkpoint_shapes(vision, target.config, clipped=clipped)
    if audio is not None:
        shapes |= audio_towers.checkpoint_shapes(audio, target.config, clipped=clipped)
    tensors = NamedTensors(cast(Checkpoint, RandomTower(shapes)))
    return dataclasses.replace(target, tensors=tensors, vision=vision, audio=audio)


SHORTLIST = ShortlistEntry(DRAFTER["num_centroids"], DRAFTER["centroid_intermediate_top_k"])
CANDIDATES = SHORTLIST.candidates(VOCABULARY)

HEADS = (
    HeadsEntry("medusa", "heads.medusa.onnx", 4, CANDIDATES, shortlist=SHORTLIST),
    HeadsEntry(
        "blockwise", "heads.blockwise.onnx", 4, CANDIDATES, width=2 * TARGET["hidden_size"], shortlist=SHORTLIST
    ),
    HeadsEntry("exit", "heads.exit.onnx", 1, CANDIDATES, 14, shortlist=SHORTLIST),
)


def write_bundle(
    out: Path, head_bits: int = 8, heads: bool = False, mobile: bool = False, towers: bool = False
) -> None:
    """Write the bundle, optionally with heads of every kind and with towers; an older one there is replaced."""
    options = ExportOptions(drafter="auto", quantize="int4", head_bits=head_bits, revision=None)
    with tempfile.TemporaryDirectory() as directory, BundleWriter(out) as bundle:
        target = mobile_model(Path(directory)) if mobile else target_model(Path(directory))
        drafter = _drafter(_config(Path(directory) / "gemma-4-E2B-shape-assistant", DRAFTER), target.config)
        if towers:
            target = dataclasses.replace(target, vision=VISION, audio=AUDIO)
        graphs = GraphFiles(bundle.directory, options, lambda _weights: None)
        table = graphs.write_target(target)
        graphs.write_drafter(drafter, target.config, table)
        trained = _heads(target) if heads else None
        if trained is not None:
            graphs.write_heads(trained, target.config, table)
        if towers:
            graphs.write_vision(VISION, with_towers(target))
            graphs.write_audio(AUDIO, with_towers(target))
        bundle.commit(make_manifest(target, drafter, options, trained), graphs.tensors)


def _config(directory: Path, fields: Mapping[str, Any]) -> Checkout:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(fields), "utf-8")
    return Checkout(directory, directory.name, None)


def target_model(directory: Path) -> TargetCheckpoint:
    """The target as the exporter sees it; its `config.json` goes below the directory."""
    checkout = _config(directory / "gemma-4-E2B-shape", TARGET)
    return described_target(checkout, TARGET, lambda shapes: cast(Checkpoint, RandomCheckpoint(shapes)))


def described_target(
    checkout: Checkout, fields: Mapping[str, Any], make: Callable[[Shapes], Checkpoint]
) -> TargetCheckpoint:
    """A target as the exporter sees it, with the tensors that `make` makes of their shapes."""
    family, config, target = read_target(fields, checkout.id)
    names = TensorNames("model.")
    shapes = checkpoint_shapes(target, names)
    tensors = NamedTensors(make(shapes), names)
    return TargetCheckpoint(checkout, tensors, family.name, target, shapes, config.token_ids)


def mobile_model(directory: Path) -> TargetCheckpoint:
    """The same of a checkpoint that was trained quantised."""
    fields = {**TARGET, "tie_word_embeddings": False, "quantization_config": QUANTIZATION}
    checkout = _config(directory / "gemma-4-E2B-mobile-shape", fields)
    layers, quantization = fields["num_hidden_layers"], read_quantization(fields, checkout.id)
    assert quantization is not None
    target = described_target(checkout, fields, lambda shapes: cast(Checkpoint, MobileCheckpoint(shapes, layers)))
    return dataclasses.replace(target, modules=QuantizedModules(target.checkpoint, quantization, target.shapes))


def _drafter(checkout: Checkout, target: Target) -> DrafterCheckpoint:
    config = read_drafter(DRAFTER, checkout.id, target)
    shapes = drafter_shapes(config, target)
    return DrafterCheckpoint(checkout, cast(Checkpoint, RandomCheckpoint(shapes)), config, shapes)


def _heads(target: TargetCheckpoint) -> HeadsCheckpoint:
    shapes = all_shapes(HEADS, target.config)
    return HeadsCheckpoint(target.checkout, cast(Checkpoint, RandomCheckpoint(shapes)), HEADS, shapes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--head-bits", type=int, choices=(4, 8), default=8)
    parser.add_argument("--heads", action="store_true", help="with heads of every kind")
    parser.add_argument("--mobile", action="store_true", help="as Google's mobile checkpoint: 2, 4 and 8 bits")
    parser.add_argument("--towers", action="store_true", help="with the vision and audio towers")
    arguments = parser.parse_args()
    write_bundle(arguments.directory, arguments.head_bits, arguments.heads, arguments.mobile, arguments.towers)


if __name__ == "__main__":
    main()
