"""The vision tower of a target's checkpoint: its configuration, and the check of its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ondevice.bundle_format.model_config import Target
from ondevice.bundle_format.tensor_table import VISION, Shapes
from ondevice.bundle_format.vision import BUDGETS, LINEARS, VisionEntry, layer_prefix, vision_shapes
from ondevice.errors import CheckpointError
from ondevice_export.checkpoint.directory import Checkpoint
from ondevice_export.checkpoint.json_fields import JsonFields, read_json
from ondevice_export.checkpoint.source import Note
from ondevice_export.checkpoint.towers import PREFIX, find_tower, has_tensors, range_shapes

VISION_GRAPH = "vision.onnx"

TOWER = tuple(PREFIX + name for name in VISION)
"""How the names of the tower's tensors begin in a checkpoint."""

_PROCESSORS = ("processor_config.json", "preprocessor_config.json")
"""Files with the settings of the image processor; the first one has them in a field of their own."""

_PROCESSOR: dict[str, Any] = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": False,
    "rescale_factor": 1 / 255,
    "resample": 3,  # bicubic
}
"""The settings of the image processor that the runtime computes with."""

_SIZES = {"patch_size": 16, "pooling_kernel_size": 3}
"""Fields that the tower and its image processor share, with their defaults."""


def read_vision(
    directory: Path, checkpoint: Checkpoint, target: Target, note: Note, *, quantised: bool
) -> VisionEntry | None:
    """Read the configuration of a checkpoint's vision tower and check its tensors.

    Args:
        directory: the checkpoint's directory.
        checkpoint: its tensors.
        target: the target that the tower is for.
        note: called with one line if there is a tower that is left out.
        quantised: whether the checkpoint was trained quantised, and so perhaps the tower too.

    Returns:
        The configuration; None if there is no tower, or one that bundles cannot have yet, for which `note` is called.

    Raises:
        CheckpointError: the configuration is damaged or not supported, a tensor is missing or has a wrong shape, or
            the tower has a tensor that the configuration does not name.
    """
    found = find_tower(checkpoint, "vision", TOWER, tuple(_ENTRIES))
    if found is None:
        return None
    outer, fields, kind = found
    text = outer.mapping("text_config", {})
    unsaid = "vision" if kind == "gemma4_unified_vision" else None
    attention = text.data.get("use_bidirectional_attention", unsaid)
    if attention not in (None, "vision"):
        raise CheckpointError(f"{text.origin}: use_bidirectional_attention {attention!r:.99} is not supported")
    common = {
        "tokens": _read_processor(directory, fields),
        "begin_token_id": outer.integer("boi_token_id", 255_999, minimum=0),
        "image_token_id": outer.integer("image_token_id", 258_880, minimum=0),
        "end_token_id": outer.integer("eoi_token_id", 258_882, minimum=0),
        "bidirectional": attention == "vision",
    }
    vision = _ENTRIES[kind](fields, common)
    shapes = checkpoint_shapes(vision, target, clipped=fields.flag("use_clipped_linears"))
    if not has_tensors(checkpoint, "vision", TOWER, shapes, quantised=quantised):
        note("the vision tower was trained quantised, which is not supported yet: the bundle reads text only")
        return None
    return vision


def checkpoint_shapes(vision: VisionEntry, target: Target, *, clipped: bool) -> Shapes:
    """The shapes of the tower's tensors by their names in a checkpoint; `clipped` if linear layers have ranges."""
    linears = [f"{layer_prefix(index)}{name}" for index in range(vision.layers) for name in LINEARS]
    shapes = vision_shapes(vision, target) | range_shapes(linears if clipped else ())
    return {PREFIX + name: shape for name, shape in shapes.items()}


def _tower(fields: JsonFields, common: Mapping[str, Any]) -> VisionEntry:
    """A tower with layers. common : fields that are read alike for both types"""
    if fields.flag("attention_bias"):
        raise CheckpointError(f"{fields.origin}: attention_bias is not supported")
    activation = fields.data.get("hidden_activation", "gelu_pytorch_tanh")
    if activation != "gelu_pytorch_tanh":
        raise CheckpointError(f"{fields.origin}: activation {activation!r:.99} is not supported")
    heads = fields.integer("num_attention_heads", 12)
    if (groups := fields.integer("num_key_value_heads", 12)) != heads:
        raise CheckpointError(f"{fields.origin}: {heads} query heads that share {groups} KV heads are not supported")
    return VisionEntry(
        graph=VISION_GRAPH,
        layers=fields.integer("num_hidden_layers", 16),
        hidden_size=fields.integer("hidden_size", 768),
        intermediate_size=fields.integer("intermediate_size", 3072),
        query_heads=heads,
        head_dim=fields.integer("head_dim", 64),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        theta=fields.mapping("rope_parameters", {}).number("rope_theta", 100.0),
        patch=fields.integer("patch_size", 16),
        pool=fields.integer("pooling_kernel_size", 3),
        positions=fields.integer("position_embedding_size", 10_240),
        standardize=fields.flag("standardize"),
        **common,
    )


def _embedder(fields: JsonFields, common: Mapping[str, Any]) -> VisionEntry:
    """A tower without layers; its patches are as large as a soft token."""
    hidden = fields.integer("mm_embed_dim", 3840)
    if (output := fields.integer("output_proj_dims", hidden)) != hidden:
        raise CheckpointError(f"{fields.origin}: mm_embed_dim {hidden} and output_proj_dims {output} differ")
    return VisionEntry(
        graph=VISION_GRAPH,
        layers=0,
        hidden_size=hidden,
        intermediate_size=0,
        query_heads=0,
        head_dim=0,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        theta=100.0,
        patch=fields.integer("patch_size", 16) * fields.integer("pooling_kernel_size", 3),
        pool=1,
        positions=fields.integer("mm_posemb_size", 1120),
        standardize=False,
        **common,
    )


_ENTRIES = {"gemma4_vision": _tower, "gemma4_unified_vision": _embedder}
"""Readers of a tower's configuration, by its type."""


def _read_processor(directory: Path, tower: JsonFields) -> int:
    """Check the settings of the image processor, where the checkpoint has them.

    tower : the tower's part of `config.json`

    Returns:
        The most soft tokens of a picture by these settings, 280 where the checkpoint has none.
    """
    path = next((directory / name for name in _PROCESSORS if (directory / name).is_file()), None)
    if path is None:
        return 280
    fields = JsonFields(read_json(path), str(path))
    settings = fields.mapping("image_processor", fields.data)
    expected = {**_PROCESSOR, **{name: tower.integer(name, size) for name, size in _SIZES.items()}}
    if settings.data.get("image_mean") == [0.0] * 3 and settings.data.get("image_std") == [1.0] * 3:
        del expected["do_normalize"]  # which changes nothing then
    for name, only in expected.items():
        if (value := settings.data.get(name)) not in (None, only):
            raise CheckpointError(
                f"{settings.origin}: pictures are prepared with {name} {only}, not {value!r:.99}: "
                "--text-only exports the text model alone"
            )
    tokens = settings.integer("max_soft_tokens", 280)
    if tokens not in BUDGETS:
        raise CheckpointError(f"{settings.origin}: max_soft_tokens is {tokens}, not one of {BUDGETS}")
    return tokens
