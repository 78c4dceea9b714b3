"""The two checkpoints of a pair, opened and checked: configuration, tensors, shapes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ondevice_export.checkpoint import Checkpoint
from ondevice_export.config import DrafterConfig, TextConfig, read_drafter, read_target
from ondevice_export.pair import check_pair
from ondevice_export.source import Checkout, Note
from ondevice_export.tensor_names import Shapes, drafter_shapes, target_shapes, text_prefix, unread


@dataclass(frozen=True)
class TargetCheckpoint:
    """A target's checkpoint, opened, with its configuration and the shapes of all tensors that an export reads."""

    checkout: Checkout
    checkpoint: Checkpoint
    family: str
    config: TextConfig
    prefix: str
    shapes: Shapes


@dataclass(frozen=True)
class DrafterCheckpoint:
    """The same of a drafter."""

    checkout: Checkout
    checkpoint: Checkpoint
    config: DrafterConfig
    shapes: Shapes


@contextmanager
def open_target(checkout: Checkout, note: Note) -> Iterator[TargetCheckpoint]:
    """Open a target and check every tensor that will be read.

    Raises:
        CheckpointError: the family is unknown, or a tensor is missing or misshapen.
    """
    family, config = read_target(checkout.directory)
    with Checkpoint(checkout.directory) as checkpoint:
        prefix = text_prefix(checkpoint.names)
        shapes = target_shapes(config, prefix)
        checkpoint.check(shapes)
        skipped = unread(checkpoint.names, shapes, config, prefix)
        if skipped:
            note(f"skipping {len(skipped)} vision and audio tensors: a bundle holds the text model")
        yield TargetCheckpoint(checkout, checkpoint, family, config, prefix, shapes)


@contextmanager
def open_drafter(checkout: Checkout, target: TargetCheckpoint) -> Iterator[DrafterCheckpoint]:
    """Open a drafter, check that it belongs to the target, and every tensor that will be read.

    Raises:
        PairMismatchError: it was made for another target.
        CheckpointError: it is no assistant, or a tensor is missing or misshapen.
    """
    config = read_drafter(checkout.directory)
    check_pair(target.config, config)
    with Checkpoint(checkout.directory) as checkpoint:
        shapes = drafter_shapes(config)
        checkpoint.check(shapes)
        unread(checkpoint.names, shapes, config.text, "model.")
        yield DrafterCheckpoint(checkout, checkpoint, config, shapes)
