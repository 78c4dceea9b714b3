"""Opens and checks the checkpoint of heads that were trained for a target."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np

from ondevice.bundle_format.model_config import MAX_OFFSETS, HeadsEntry, HeadsKind, ShortlistEntry, Target
from ondevice.bundle_format.tensor_table import Shapes, heads_shapes
from ondevice.errors import CheckpointError, PairMismatchError
from ondevice_export.checkpoint.directory import Checkpoint, SafetensorsCheckpoint
from ondevice_export.checkpoint.json_fields import JsonFields, read_json
from ondevice_export.checkpoint.models import TargetCheckpoint
from ondevice_export.checkpoint.source import Checkout, default_name

MODEL_TYPE = "ondevice_heads"
KINDS: tuple[HeadsKind, ...] = get_args(HeadsKind)


@dataclass(frozen=True)
class HeadsCheckpoint:
    """An open checkpoint with heads of one or more kinds, and the shapes of all tensors that an export reads."""

    checkout: Checkout
    checkpoint: Checkpoint
    heads: tuple[HeadsEntry, ...]
    shapes: Shapes


@contextmanager
def open_heads(checkout: Checkout, target: TargetCheckpoint) -> Iterator[HeadsCheckpoint]:
    """Open heads and check that they were trained for the target and that every tensor to be read has its shape.

    Raises:
        PairMismatchError: the heads were trained for other weights.
        CheckpointError: the directory holds no heads, or a tensor is missing or has a wrong shape.
    """
    if not target.config.tied or target.modules is not None:
        raise PairMismatchError(f"{checkout.directory}: heads score with the rows of a plain, tied token embedding")
    heads = read_heads(checkout.directory, target)
    with SafetensorsCheckpoint(checkout.directory) as checkpoint:
        shapes = all_shapes(heads, target.config)
        checkpoint.check(shapes)
        yield HeadsCheckpoint(checkout, checkpoint, heads, shapes)


def all_shapes(heads: tuple[HeadsEntry, ...], target: Target) -> Shapes:
    """The shapes of all tensors that the graphs of `heads` read, by name."""
    return {name: shape for each in heads for name, shape in heads_shapes(each, target).items()}


def read_heads(directory: Path, target: TargetCheckpoint) -> tuple[HeadsEntry, ...]:
    """Read the heads that `config.json` lists and check that they were trained for this target."""
    path = directory / "config.json"
    fields = JsonFields(read_json(path), str(path))
    if fields.data.get("model_type") != MODEL_TYPE:
        raise CheckpointError(f"{path}: model_type is {fields.data.get('model_type')!r:.99}, expected {MODEL_TYPE!r}")
    _check_target(fields.mapping("target", {}), target)
    shortlist = _shortlist(fields, target.config)
    kinds = fields.mapping("kinds", {})
    if unknown := set(kinds.data) - set(KINDS):
        raise CheckpointError(f"{path}: kinds has {min(unknown)!r:.99}, known are {', '.join(KINDS)}")
    if not kinds.data:
        raise CheckpointError(f"{path}: kinds is empty")
    return tuple(_heads(kind, kinds.mapping(kind, {}), shortlist, target) for kind in KINDS if kind in kinds.data)


def weights_sha256(target: TargetCheckpoint) -> str:
    """SHA-256 of the target's final norm and last down projection as float32.

    It identifies the weights that heads were trained for, among models of the same shapes.
    """
    last = len(target.config.layers) - 1
    digest = hashlib.sha256()
    for name in ("norm.weight", f"layers.{last}.mlp.down_proj.weight"):
        digest.update(np.ascontiguousarray(target.tensors.read(name)).tobytes())
    return digest.hexdigest()


def _check_target(made_for: JsonFields, target: TargetCheckpoint) -> None:
    name, own = made_for.data.get("name"), default_name(target.checkout)
    sizes = {
        "hidden_size": target.config.hidden_size,
        "vocab_size": target.config.vocab_size,
        "layers": len(target.config.layers),
    }
    for field, size in sizes.items():
        if (found := made_for.integer(field, 0, 0)) != size:
            raise PairMismatchError(
                f"the heads were trained for {name!r:.99} ({field} {found}), not for {own!r} ({size})"
            )
    if made_for.data.get("weights_sha256") != weights_sha256(target):
        raise PairMismatchError(
            f"the heads were trained for {name!r:.99}, whose weights are not those of {own!r}: train them again"
        )


def _shortlist(fields: JsonFields, target: Target) -> ShortlistEntry | None:
    if fields.data.get("shortlist") is None:
        return None
    own = fields.mapping("shortlist", {})
    clusters = own.integer("clusters", 0, 1, target.vocab_size)
    if target.vocab_size % clusters:
        raise CheckpointError(f"{own.origin}: {clusters} clusters do not divide a vocabulary of {target.vocab_size}")
    return ShortlistEntry(clusters, own.integer("top", 0, 1, clusters))


def _heads(
    kind: HeadsKind, fields: JsonFields, shortlist: ShortlistEntry | None, target: TargetCheckpoint
) -> HeadsEntry:
    size = target.config.vocab_size
    candidates = size if shortlist is None else shortlist.candidates(size)
    graph = f"heads.{kind}.onnx"
    if kind == "exit":
        layer = fields.integer("layer", -1, 0, len(target.config.layers) - 1)
        return HeadsEntry(kind, graph, 1, candidates, layer, shortlist=shortlist)
    width = fields.integer("width", 0) if kind == "blockwise" else 0
    offsets = fields.integer("offsets", 0, 1, MAX_OFFSETS)
    return HeadsEntry(kind, graph, offsets, candidates, width=width, shortlist=shortlist)
