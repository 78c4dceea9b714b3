"""Heads that were trained for a target: their checkpoint, opened and checked."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np

from ondevice.errors import CheckpointError, PairMismatchError
from ondevice.manifest import MOST_OFFSETS, HeadsKind
from ondevice_export.checkpoint import Checkpoint
from ondevice_export.config import TextConfig
from ondevice_export.json_fields import Fields, read_json
from ondevice_export.models import TargetCheckpoint
from ondevice_export.source import Checkout, default_name
from ondevice_export.tensor_names import Shapes

MODEL_TYPE = "ondevice_heads"
CENTROIDS, ORDERING = "shortlist.centroids.weight", "shortlist.token_ordering"
KINDS: tuple[HeadsKind, ...] = get_args(HeadsKind)


@dataclass(frozen=True)
class Shortlist:
    """Clusters of the vocabulary, of which a head scores the tokens of the `top` whose centroids score best."""

    clusters: int
    top: int


@dataclass(frozen=True)
class HeadsConfig:
    """Heads of one kind.

    Attributes:
        offsets: tokens that are proposed.
        width: of blockwise's shared layer, else 0.
        layer: behind which exit reads the residual stream, else None.
        shortlist: None where the whole vocabulary is scored.
    """

    kind: HeadsKind
    offsets: int
    width: int
    layer: int | None
    shortlist: Shortlist | None

    def candidates(self, vocab_size: int) -> int:
        """Tokens scored for each proposal."""
        return vocab_size if self.shortlist is None else vocab_size // self.shortlist.clusters * self.shortlist.top

    def shapes(self, hidden: int) -> Shapes:
        """Every tensor that is read, but for the shortlist's."""
        if self.kind == "medusa":
            return {"medusa.blocks.weight": (self.offsets * hidden, hidden)}
        if self.kind == "exit":
            return {"exit.norm.weight": (hidden,), "exit.block.weight": (hidden, hidden)}
        return {
            "blockwise.inner.weight": (self.width, hidden),
            "blockwise.outer.weight": (self.offsets * hidden, self.width),
            "blockwise.norm.weight": (hidden,),
        }


@dataclass(frozen=True)
class HeadsCheckpoint:
    """Heads of all kinds in a directory, with the shapes of all tensors that an export reads."""

    checkout: Checkout
    checkpoint: Checkpoint
    heads: tuple[HeadsConfig, ...]
    shapes: Shapes


@contextmanager
def open_heads(checkout: Checkout, target: TargetCheckpoint) -> Iterator[HeadsCheckpoint]:
    """Open heads, check that they were trained for the target, and every tensor that will be read.

    Raises:
        PairMismatchError: they were trained for other weights.
        CheckpointError: they are no heads, or a tensor is missing or misshapen.
    """
    if not target.config.tied or target.modules is not None:
        raise PairMismatchError(f"{checkout.directory}: heads score with the rows of a plain, tied token embedding")
    heads = read_heads(checkout.directory, target)
    with Checkpoint(checkout.directory) as checkpoint:
        shapes = heads_shapes(heads, target.config)
        checkpoint.check(shapes)
        yield HeadsCheckpoint(checkout, checkpoint, heads, shapes)


def heads_shapes(heads: tuple[HeadsConfig, ...], target: TextConfig) -> Shapes:
    """Every tensor that is read."""
    shapes: Shapes = {}
    for each in heads:
        shapes |= each.shapes(target.hidden_size)
        if each.shortlist is not None:
            shapes |= {CENTROIDS: (each.shortlist.clusters, target.hidden_size), ORDERING: (target.vocab_size,)}
    return shapes


def read_heads(directory: Path, target: TargetCheckpoint) -> tuple[HeadsConfig, ...]:
    """The kinds that `config.json` lists, for this target."""
    path = directory / "config.json"
    fields = Fields(read_json(path), str(path))
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
    """Tells weights of the same shapes apart: of the final norm and the last layer's down projection, as float32."""
    last = len(target.config.layers) - 1
    digest = hashlib.sha256()
    for name in ("norm.weight", f"layers.{last}.mlp.down_proj.weight"):
        digest.update(np.ascontiguousarray(target.checkpoint.read(target.prefix + name)).tobytes())
    return digest.hexdigest()


def _check_target(made_for: Fields, target: TargetCheckpoint) -> None:
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


def _shortlist(fields: Fields, target: TextConfig) -> Shortlist | None:
    if fields.data.get("shortlist") is None:
        return None
    own = fields.mapping("shortlist", {})
    clusters = own.integer("clusters", 0, 1, target.vocab_size)
    if target.vocab_size % clusters:
        raise CheckpointError(f"{own.origin}: {clusters} clusters do not divide a vocabulary of {target.vocab_size}")
    return Shortlist(clusters, own.integer("top", 0, 1, clusters))


def _heads(kind: HeadsKind, fields: Fields, shortlist: Shortlist | None, target: TargetCheckpoint) -> HeadsConfig:
    if kind == "exit":
        layer = fields.integer("layer", -1, 0, len(target.config.layers) - 1)
        return HeadsConfig(kind, 1, 0, layer, shortlist)
    width = fields.integer("width", 0) if kind == "blockwise" else 0
    return HeadsConfig(kind, fields.integer("offsets", 0, 1, MOST_OFFSETS), width, None, shortlist)
