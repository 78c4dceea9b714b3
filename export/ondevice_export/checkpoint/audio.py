"""The audio tower of a target's checkpoint: its configuration, and the check of its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ondevice.bundle_format.audio import (
    DEPTHWISE,
    FRAME,
    HOP,
    LINEARS,
    QUERY_SCALE,
    RATE,
    RELATIVE_KEYS,
    AudioEntry,
    audio_shapes,
    layer_prefix,
)
from ondevice.bundle_format.model_config import Target
from ondevice.bundle_format.tensor_table import AUDIO, Shapes
from ondevice.errors import CheckpointError
from ondevice_export.checkpoint.directory import Checkpoint
from ondevice_export.checkpoint.json_fields import JsonFields, read_json
from ondevice_export.checkpoint.source import Note
from ondevice_export.checkpoint.towers import PREFIX, find_tower, has_tensors, range_shapes

AUDIO_GRAPH = "audio.onnx"

TOWER = tuple(PREFIX + name for name in AUDIO)
"""How the names of the tower's tensors begin in a checkpoint."""

RELATIVE, PER_DIM_SCALE = "self_attn.relative_k_proj.weight", "self_attn.per_dim_scale"
"""Tensors of a layer from which a bundle's relative keys and query scale are computed."""

FAR = 1e6
"""A limit of activations, and a score of masked keys, as far from 0 as this change no sum; defaults: 1e10, -1e9."""

NORM_EPS = 1e-6
"""Some norms of the reference have this constant whatever the configuration says."""

_PROCESSOR = {
    "sampling_rate": RATE,
    "frame_length_ms": 1000 * FRAME / RATE,
    "hop_length_ms": 1000 * HOP / RATE,
    "min_frequency": 0.0,
    "max_frequency": RATE / 2,
    "preemphasis": 0.0,
    "fft_overdrive": False,
    "dither": 0.0,
    "input_scale_factor": 1.0,
    "mel_floor": 0.001,
    "per_bin_mean": None,
    "per_bin_stddev": None,
}
"""The settings of the feature extractor that the runtime computes with, for a tower with layers."""


def read_audio(
    directory: Path, checkpoint: Checkpoint, target: Target, note: Note, *, quantised: bool
) -> AudioEntry | None:
    """Read the configuration of a checkpoint's audio tower and check its tensors.

    The arguments are those of `read_vision`.

    Returns:
        The configuration; None if there is no tower, or one that bundles cannot have yet, for which `note` is called.

    Raises:
        CheckpointError: the configuration is damaged or not supported, a tensor is missing or has a wrong shape, or
            the tower has a tensor that the configuration does not name.
    """
    found = find_tower(checkpoint, "audio", TOWER, tuple(_ENTRIES))
    if found is None:
        return None
    outer, fields, kind = found
    end = "eoa_token_id" if "eoa_token_id" in outer.data else "eoa_token_index"
    tokens = {
        "begin_token_id": outer.integer("boa_token_id", 256_000, minimum=0),
        "audio_token_id": outer.integer("audio_token_id", 258_881, minimum=0),
        "end_token_id": outer.integer(end, 258_883, minimum=0),
    }
    audio = _ENTRIES[kind](fields, tokens)
    _check_processor(directory, audio)
    shapes = checkpoint_shapes(audio, target, clipped=fields.flag("use_clipped_linears", audio.layers > 0))
    if not has_tensors(checkpoint, "audio", TOWER, shapes, quantised=quantised):
        note("the audio tower is left out: audio towers that were trained quantised are not supported")
        return None
    return audio


def checkpoint_shapes(audio: AudioEntry, target: Target, *, clipped: bool) -> Shapes:
    """The shapes of the tower's tensors by their names in a checkpoint; `clipped` if linear layers have ranges."""
    linears = [f"{layer_prefix(index)}{name}" for index in range(audio.layers) for name in LINEARS]
    shapes = audio_shapes(audio, target) | range_shapes(linears if clipped else ())
    for index in range(audio.layers):
        prefix, hidden = layer_prefix(index), audio.hidden_size
        del shapes[prefix + RELATIVE_KEYS], shapes[prefix + QUERY_SCALE]
        shapes[prefix + RELATIVE] = (hidden, hidden)
        shapes[prefix + PER_DIM_SCALE] = (audio.head_dim,)
        shapes[prefix + DEPTHWISE] = (hidden, 1, audio.kernel)
    return {PREFIX + name: shape for name, shape in shapes.items()}


def _conformer(fields: JsonFields, tokens: Mapping[str, int]) -> AudioEntry:
    """A tower with layers."""
    for name, only in (("hidden_act", "silu"), ("attention_context_right", 0), ("rms_norm_eps", NORM_EPS)):
        if (value := fields.data.get(name, only)) != only:
            raise CheckpointError(f"{fields.origin}: {name} {value!r:.99} is not supported")
    for name in ("gradient_clipping", "attention_invalid_logits_value"):
        value = fields.data.get(name, 1e10)
        if not isinstance(value, int | float) or abs(value) < FAR:
            raise CheckpointError(
                f"{fields.origin}: {name} {value!r:.99} is not supported, only as far from 0 as {FAR:.0f}: "
                "--text-only exports the text model alone"
            )
    channels = fields.data.get("subsampling_conv_channels", [128, 32])
    if not (isinstance(channels, list) and len(channels) == 2 and all(type(each) is int for each in channels)):
        raise CheckpointError(f"{fields.origin}: subsampling_conv_channels {channels!r:.99} is not supported")
    # As many rows before a row's own block as the block has, or the distances of the reference are not these.
    keys = fields.integer("attention_context_left", 13) - 1
    if (block := fields.integer("attention_chunk_size", 12)) != keys:
        raise CheckpointError(f"{fields.origin}: blocks of {block} rows that see {keys} are not supported")
    return AudioEntry(
        graph=AUDIO_GRAPH,
        layers=fields.integer("num_hidden_layers", 12),
        hidden_size=fields.integer("hidden_size", 1024),
        query_heads=fields.integer("num_attention_heads", 8),
        output_size=fields.integer("output_proj_dims", 1536),
        mel_bins=channels[0],
        channels=channels[1],
        kernel=fields.integer("conv_kernel_size", 5),
        keys=keys,
        logit_cap=fields.number("attention_logit_cap", 50.0),
        residual_weight=fields.number("residual_weight", 0.5),
        norm_eps=NORM_EPS,
        **tokens,
    )


def _embedder(fields: JsonFields, tokens: Mapping[str, int]) -> AudioEntry:
    """A tower without layers."""
    return AudioEntry(
        graph=AUDIO_GRAPH,
        layers=0,
        hidden_size=0,
        query_heads=0,
        output_size=fields.integer("audio_embed_dim", 640),
        mel_bins=0,
        channels=0,
        kernel=0,
        keys=0,
        logit_cap=0.0,
        residual_weight=0.0,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        **tokens,
    )


_ENTRIES = {"gemma4_audio": _conformer, "gemma4_unified_audio": _embedder}
"""Readers of a tower's configuration, by its type."""


def _check_processor(directory: Path, audio: AudioEntry) -> None:
    """Check the settings of the feature extractor, where the checkpoint has them."""
    expected: dict[str, Any] = {"sampling_rate": RATE, "audio_samples_per_token": audio.output_size}
    if audio.layers:
        expected = {**_PROCESSOR, "feature_size": audio.mel_bins}
    path = directory / "processor_config.json"
    if not path.is_file():
        return
    settings = JsonFields(read_json(path), str(path)).mapping("feature_extractor", {})
    for name, only in expected.items():
        if (value := settings.data.get(name, only)) != only:
            raise CheckpointError(f"{path}: sounds are prepared with {name} {only}, not {value!r:.99}")
