"""The two checkpoints of a pair, opened and checked: configuration, tensors, shapes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ondevice.errors import CheckpointError
from ondevice_export.checkpoint import Checkpoint
from ondevice_export.config import DrafterConfig, TextConfig, read_drafter, read_target
from ondevice_export.gemma_quantization import read_quantization
from ondevice_export.pair import check_pair
from ondevice_export.quantized_modules import QuantizedModules, plain_names
from ondevice_export.source import Checkout, Note
from ondevice_export.tensor_names import HEAD, Shapes, drafter_shapes, target_shapes, text_prefix, unread


@dataclass(frozen=True)
class TargetCheckpoint:
    """A target's checkpoint, opened, with its configuration and the shapes of all tensors that an export reads."""

    checkout: Checkout
    checkpoint: Checkpoint
    family: str
    config: TextConfig
    prefix: str
    shapes: Shapes
    modules: QuantizedModules | None = None
    """Where the checkpoint was trained quantised."""


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
        quantization = read_quantization(checkout.directory)
        names = checkpoint.names if quantization is None else list(plain_names(checkpoint.names))
        prefix = text_prefix(names)
        if not config.tied and HEAD not in names:
            path = checkout.directory / "config.json"
            raise CheckpointError(f"{path}: the head is not tied to the token embedding, and there is no {HEAD}")
        shapes = target_shapes(config, prefix)
        modules = None if quantization is None else QuantizedModules(checkpoint, quantization, shapes)
        if modules is None:
            checkpoint.check(shapes)
        else:
            modules.check()
        skipped = unread(names, shapes, config, prefix)
        if skipped:
            note(f"skipping {len(skipped)} vision and audio tensors: a bundle holds the text model")
        yield TargetCheckpoint(checkout, checkpoint, family, config, prefix, shapes, modules)


@contextmanager
def open_drafter(checkout: Checkout, target: TargetCheckpoint) -> Iterator[DrafterCheckpoint]:
    """Open a drafter, check that it belongs to the target, and every tensor that will be read.

    Raises:
        PairMismatchError: it was made for another target.
        CheckpointError: it is no assistant, or a tensor is missing or misshapen.
    """
    config = read_drafter(checkout.directory)
    if read_quantization(checkout.directory) is not None:
        raise CheckpointError(f"{checkout.directory}: a drafter that was trained quantised is not supported")
    check_pair(target.config, config)
    with Checkpoint(checkout.directory) as checkpoint:
        shapes = drafter_shapes(config)
        checkpoint.check(shapes)
        unread(checkpoint.names, shapes, config.text, "model.")
        yield DrafterCheckpoint(checkout, checkpoint, config, shapes)
