"""The common part of a checkpoint's vision and audio towers: the search for one, the check of its tensors."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, NamedTuple

from ondevice.bundle_format.tensor_table import Shapes
from ondevice.errors import CheckpointError
from ondevice_export.checkpoint.directory import Checkpoint
from ondevice_export.checkpoint.json_fields import JsonFields

PREFIX = "model."
"""Prefix of the towers' tensor names in a checkpoint."""


class TowerConfig(NamedTuple):
    """A tower's part of `config.json`.

    outer : the whole file
    fields : the tower's own part
    kind : its type
    """

    outer: JsonFields
    fields: JsonFields
    kind: str


def find_tower(
    checkpoint: Checkpoint,
    name: Literal["vision", "audio"],
    tensors: tuple[str, ...],
    kinds: Collection[str],
) -> TowerConfig | None:
    """The configuration of a tower; None if the checkpoint has none.

    Args:
        checkpoint: the checkpoint.
        name: which tower.
        tensors: how the names of its tensors begin.
        kinds: the types that are supported.

    Raises:
        CheckpointError: the configuration is damaged, or of another type.
    """
    outer = JsonFields(checkpoint.config, checkpoint.origin)
    if outer.data.get(f"{name}_config") is None or not any(own.startswith(tensors) for own in checkpoint.names):
        return None
    fields = outer.mapping(f"{name}_config", {})
    kind = fields.data.get("model_type", f"gemma4_{name}")
    if kind not in kinds:
        article = "an" if name == "audio" else "a"
        raise CheckpointError(f"{fields.origin}: {article} {name} tower of the type {kind!r:.99} is not supported")
    return TowerConfig(outer, fields, kind)


def has_tensors(
    checkpoint: Checkpoint, name: str, tensors: tuple[str, ...], shapes: Shapes, *, quantised: bool
) -> bool:
    """Check the tensors of a tower.

    Args:
        checkpoint, name, tensors: as in `find_tower`.
        shapes: the tensors that the configuration names, as the checkpoint names them.
        quantised: whether the checkpoint was trained quantised, and so perhaps the tower too.

    Returns:
        False if the tower was trained quantised, which bundles cannot have yet.

    Raises:
        CheckpointError: a tensor is missing or has a wrong shape, or one has no place in the configuration.
    """
    if quantised and not all(each in checkpoint for each in shapes):
        return False
    if unknown := [own for own in checkpoint.names if own.startswith(tensors) and own not in shapes]:
        raise CheckpointError(
            f"tensor {unknown[0]} has no place in the {name} tower that config.json describes ({len(unknown)} such): "
            "--text-only exports the text model alone"
        )
    checkpoint.check(shapes)
    return True


def range_shapes(linears: Collection[str]) -> Shapes:
    """Names and shapes of the limits of linear layers, which a bundle has in its graph."""
    return {
        f"{linear}.{end}": () for linear in linears for end in ("input_min", "input_max", "output_min", "output_max")
    }
