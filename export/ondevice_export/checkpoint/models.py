"""Opens the checkpoints of a target and its drafter and checks their configurations, tensors and shapes.

`tensor_table` names the tensors of a model, `named_tensors` finds them in a checkpoint.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from ondevice.arrays import Int64Array
from ondevice.bundle_format.audio import AudioEntry
from ondevice.bundle_format.model_config import DrafterEntry, Target
from ondevice.bundle_format.tensor_table import (
    DRAFTER_TOKENS,
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    MTP,
    Shapes,
    drafter_shapes,
    is_plain,
    target_shapes,
)
from ondevice.bundle_format.vision import VisionEntry
from ondevice.errors import CheckpointError, PairMismatchError
from ondevice_export.checkpoint import audio as audio_towers
from ondevice_export.checkpoint import vision as vision_towers
from ondevice_export.checkpoint.directory import Checkpoint, FilesCheckpoint, SafetensorsCheckpoint
from ondevice_export.checkpoint.named_tensors import NamedTensors, TensorNames
from ondevice_export.checkpoint.quantized.gemma import GemmaQuantization, read_quantization
from ondevice_export.checkpoint.quantized.gemma_modules import QuantizedModules, plain_names
from ondevice_export.checkpoint.source import Checkout, Note
from ondevice_export.families import Described, read_target
from ondevice_export.families import mtp as mtp_layers
from ondevice_export.families.family import Config, Family, RowsOf
from ondevice_export.families.gemma4_assistant import read_drafter
from ondevice_export.gguf.checkpoint import GgufCheckpoint
from ondevice_export.text_files import read_tokenizer

_PREFIXES = ("model.language_model.", "language_model.model.", "model.", "")
"""Prefixes of the text model's tensors; those of multimodal checkpoints come first, as some begin with `model.` too."""

_COMPARED = 4096
"""Rows of two matrices that are compared at a time."""

_HEADS = (HEAD, "language_model.lm_head.weight")
"""Names of the head."""


@dataclass(frozen=True)
class TargetCheckpoint:
    """A target's open checkpoint, with its configuration and the shapes of all tensors that an export reads."""

    checkout: Checkout
    tensors: NamedTensors
    family: str
    """The family's name, for display."""
    config: Target
    shapes: Shapes
    """By the names in the checkpoint."""
    token_ids: Mapping[str, Any]
    """`bos_token_id`, `eos_token_id`, `pad_token_id` and `add_bos_token` of the configuration, unchecked."""
    modules: QuantizedModules | None = None
    """The quantised modules; None unless the checkpoint was trained quantised."""
    vision: VisionEntry | None = None
    """The vision tower; None if the checkpoint has none, or if it is left out."""
    audio: AudioEntry | None = None
    """The audio tower; the same."""
    mtp: MtpLayer | None = None
    """The MTP layer beside the model; None if the checkpoint has none that is supported."""

    @property
    def checkpoint(self) -> Checkpoint:
        return self.tensors.checkpoint

    @property
    def matrices(self) -> Shapes:
        """The tensors of `shapes` that may be quantised: others, such as routers, are known by the bundle's names."""
        own = target_shapes(self.config).items()
        return {self.tensors.names.of(name): shape for name, shape in own if not is_plain(name, shape)}


@dataclass(frozen=True)
class DrafterCheckpoint:
    """A drafter's open checkpoint, with its configuration and the shapes of all tensors that an export reads."""

    checkout: Checkout
    tensors: NamedTensors
    config: DrafterEntry
    shapes: Shapes
    """By the names in the checkpoint."""
    head_tokens: Int64Array | None = None
    """The ids of the tokens that its head scores, if the checkpoint does not have them; None otherwise."""

    @property
    def checkpoint(self) -> Checkpoint:
        return self.tensors.checkpoint


@dataclass(frozen=True)
class MtpLayer:
    """An MTP layer of a target's checkpoint, which drafts for the target."""

    target: Target
    """The target's configuration with the layer's keys and values."""
    drafter: DrafterEntry
    names: TensorNames
    """The drafter's names."""
    head_tokens: Int64Array | None
    """As in `DrafterCheckpoint`."""
    rows_of: Mapping[str, RowsOf]
    """As of `Family`."""

    @property
    def shapes(self) -> Shapes:
        """The shapes of the drafter's tensors by their names in the checkpoint."""
        own = drafter_shapes(self.drafter, self.target)
        return {self.names.of(name): shape for name, shape in own.items() if name != DRAFTER_TOKENS}

    def beside(self, target: TargetCheckpoint) -> tuple[TargetCheckpoint, DrafterCheckpoint]:
        """The target with the keys and values of the layer, and the drafter that this is."""
        written = dataclasses.replace(
            target, config=self.target, shapes=checkpoint_shapes(self.target, target.tensors.names)
        )
        tensors = dataclasses.replace(target.tensors, names=self.names)
        return written, DrafterCheckpoint(target.checkout, tensors, self.drafter, self.shapes, self.head_tokens)


@contextmanager
def open_target(
    checkout: Checkout, note: Note, *, text_only: bool = False, context: int | None = None
) -> Iterator[TargetCheckpoint]:
    """Open a target and check the shape of every tensor that will be read; with `text_only` without towers.

    `context` is as for `read_target`.

    Raises:
        CheckpointError: the family is unknown, or a tensor is missing or has a wrong shape.
    """
    with open_checkpoint(checkout) as (opened, checkpoint):
        family, fields, config = read_target(checkpoint.config, checkpoint.origin, context)
        if context is None and fields.context < fields.limit:
            note(
                f"texts end at {fields.context} tokens, where the model changes its frequencies: --context N, up to "
                f"{fields.limit}, exports it with the frequencies of longer texts, for all texts"
            )
        quantization = read_quantization(checkpoint.config, checkpoint.origin)
        names = _names(_weights(checkpoint, quantization), config, family, checkpoint.origin)
        for index in range(len(config.layers)):
            for each in ("gate_up_proj", "down_proj") if fields.flag("alternating_experts") else ():
                checkpoint.turn(names.of(f"layers.{index}.experts.{each}"))
            checkpoint.split(f"{names.prefix}layers.{index}.", family.rows_of(fields, index))
        tensors = _named(checkpoint, names, fields)
        if quantization is None and config.tied and not _heads_agree(checkpoint, names):
            config = dataclasses.replace(config, tied=False)
            note(
                f"{names.head} differs from the token embedding: it is used, though config.json says that they are one"
            )
        shapes = checkpoint_shapes(config, tensors.names)
        modules = None if quantization is None else QuantizedModules(checkpoint, quantization, shapes)
        if modules is None:
            checkpoint.check(shapes)
        else:
            modules.check()
        prefix = tensors.names.prefix
        sharing = (index for index, layer in enumerate(config.layers) if layer.mixer.kv_source is not None)
        skipped = _unread(checkpoint, _weights(checkpoint, quantization), shapes, _unused_kv(prefix, sharing), prefix)
        vision, audio = None, None
        if family.towers and not text_only:
            quantised = modules is not None
            vision = vision_towers.read_vision(opened.directory, checkpoint, config, note, quantised=quantised)
            audio = audio_towers.read_audio(opened.directory, checkpoint, config, note, quantised=quantised)
        mtp = None
        if quantization is None:
            mtp = _mtp_layer(opened.directory, checkpoint, Described(family, fields, config), note)
        skipped = [name for name in skipped if not name.startswith(MTP)]
        towers = (*(vision_towers.TOWER if vision else ()), *(audio_towers.TOWER if audio else ()))
        if skipped := [name for name in skipped if not name.startswith(towers)]:
            note(f"skipping {len(skipped)} vision and audio tensors: the bundle does not use them")
        ids = fields.token_ids
        yield TargetCheckpoint(opened, tensors, family.name, config, shapes, ids, modules, vision, audio, mtp)


@contextmanager
def open_drafter(checkout: Checkout, target: TargetCheckpoint) -> Iterator[DrafterCheckpoint]:
    """Open a drafter and check that it belongs to the target and that every tensor to be read has its shape.

    Raises:
        PairMismatchError: the drafter was made for another target.
        CheckpointError: the checkpoint is no assistant, or a tensor is missing or has a wrong shape.
    """
    with open_checkpoint(checkout, tokenizer=False) as (opened, checkpoint):
        try:
            config = read_drafter(checkpoint.config, checkpoint.origin, target.config)
        except PairMismatchError as error:
            raise PairMismatchError(f"{checkout.path}: {error}: name another drafter, or --drafter none") from error
        if read_quantization(checkpoint.config, checkpoint.origin) is not None:
            raise CheckpointError(f"{checkout.directory}: a drafter that was trained quantised is not supported")
        shapes = drafter_shapes(config, target.config)
        checkpoint.check(shapes)
        _unread(checkpoint, checkpoint.names, shapes, _unused_kv("model.", range(len(config.layers))), "model.")
        yield DrafterCheckpoint(opened, NamedTensors(checkpoint), config, shapes)


def own_drafter(target: TargetCheckpoint, mtp: MtpLayer) -> tuple[TargetCheckpoint, DrafterCheckpoint]:
    """The target with the keys and values of its MTP layer, and the drafter that this is.

    Raises:
        CheckpointError: a tensor is missing or has a wrong shape.
    """
    checkpoint = target.checkpoint
    assert isinstance(checkpoint, FilesCheckpoint)  # as `open_checkpoint` has opened it
    checkpoint.halve(mtp_layers.JOINED, *mtp_layers.HALVES)
    checkpoint.split(mtp_layers.LAYER, mtp.rows_of)
    written, drafter = mtp.beside(target)
    checkpoint.check(written.shapes | drafter.shapes)
    return written, drafter


def _mtp_layer(directory: Path, checkpoint: Checkpoint, described: Described, note: Note) -> MtpLayer | None:
    """The MTP layer of a checkpoint; None if it has none, or with a note one of another form."""
    family, fields, config = described
    if mtp_layers.JOINED not in checkpoint:
        return None
    count = fields.integer("mtp_num_hidden_layers", 1, minimum=0)
    if count != 1 or fields.flag("mtp_use_dedicated_embeddings"):
        note("its MTP layers are left out: only one is supported, without embedding and head of its own")
        return None
    head_tokens = _frequent(directory, config.vocab_size)
    scored = config.vocab_size if head_tokens is None else len(head_tokens)
    names, rows_of = TensorNames(MTP, own_prefix="model.", others=family.names), mtp_layers.rows_of(family, fields)
    return MtpLayer(*mtp_layers.with_mtp_layer(family, fields, config, scored), names, head_tokens, rows_of)


def _frequent(directory: Path, vocab_size: int) -> Int64Array | None:
    """The ids of the tokens that a drafter scores of a large vocabulary, ascending; None for all of a small one."""
    if vocab_size <= 2 * mtp_layers.LISTED:
        return None
    tokenizer = read_tokenizer(directory)
    added = () if tokenizer is None else (each for each in tokenizer.added if each < vocab_size)
    return np.array(sorted({*range(mtp_layers.LISTED), *added}), np.int64)


@contextmanager
def open_checkpoint(
    checkout: Checkout, *, tokenizer: bool = True
) -> Iterator[tuple[Checkout, FilesCheckpoint[Any, Any]]]:
    """Open a directory or a GGUF file; the checkout's `directory` has the text files while it is open.

    A GGUF file's are made from its metadata, in a temporary directory, its tokenizer only if `tokenizer` is set.
    """
    if checkout.file is None:
        with SafetensorsCheckpoint(checkout.directory) as checkpoint:
            yield checkout, checkpoint
        return
    with GgufCheckpoint(checkout.file) as file, TemporaryDirectory() as directory:
        file.write_text_files(Path(directory), tokenizer=tokenizer)
        yield dataclasses.replace(checkout, directory=Path(directory)), file


def checkpoint_shapes(target: Target, names: TensorNames) -> Shapes:
    """The shapes of the target's tensors by their names in a checkpoint."""
    return {names.of(name): shape for name, shape in target_shapes(target).items()}


def _weights(checkpoint: Checkpoint, quantization: GemmaQuantization | None) -> list[str]:
    """The names of a checkpoint's tensors, as they are where nothing is quantised."""
    return checkpoint.names if quantization is None else list(plain_names(checkpoint.names))


def _names(present: Iterable[str], config: Target, family: Family, origin: str) -> TensorNames:
    """The names of the text model's tensors."""
    names = set(present)
    head = next((head for head in _HEADS if head in names), None)
    alone = config.tied and head is not None and not any(prefix + EMBEDDING in names for prefix in _PREFIXES)
    first = family.names.get(FINAL_NORM, FINAL_NORM) if alone else EMBEDDING
    prefix = next((prefix for prefix in _PREFIXES if prefix + first in names), None)
    if prefix is None:
        raise CheckpointError(f"{origin}: the checkpoint has no {EMBEDDING}: it holds no text model")
    if head is None and not config.tied:
        raise CheckpointError(f"{origin}: the head is not tied to the token embedding, and there is no {HEAD}")
    others = {**family.names, **mtp_layers.NAMES}
    return TensorNames(prefix, head or HEAD, head if alone else None, others=others)


def _heads_agree(checkpoint: Checkpoint, names: TensorNames) -> bool:
    """Whether the head equals the token embedding, if the checkpoint has both. transformers ties them only then."""
    head, embedding = names.of(HEAD), names.of(EMBEDDING)
    if head == embedding or head not in checkpoint or embedding not in checkpoint:
        return True
    shape = checkpoint.shape(head)
    if shape != checkpoint.shape(embedding) or len(shape) != 2:
        return False
    starts = range(0, shape[0], _COMPARED)
    pieces = ((start, min(start + _COMPARED, shape[0])) for start in starts)
    return all(np.array_equal(checkpoint.rows(head, *piece), checkpoint.rows(embedding, *piece)) for piece in pieces)


def _named(checkpoint: Checkpoint, names: TensorNames, config: Config) -> NamedTensors:
    return NamedTensors(
        checkpoint,
        names,
        norm_offset=float(config.integer("norm_offset", 0, 0, 1)),
        logits_divisor=config.number("logits_scaling", 1.0),
        alternating=config.flag("alternating_experts"),
        log_decay=config.flag("log_decay"),
    )


_BUFFERS = ("rotary_emb.inv_freq",)
"""How the names of tensors end that older checkpoints have and no model reads."""


def _unread(
    checkpoint: Checkpoint, names: Iterable[str], shapes: Shapes, unused: Iterable[str], prefix: str
) -> list[str]:
    """The names of tensors that an export leaves out because they belong to other modalities.

    Args:
        checkpoint: the checkpoint. A bias of zeros changes nothing: AutoGPTQ wrote one for every matrix.
        names: the names of its tensors, as they are where nothing is quantised.
        shapes: the tensors that an export reads.
        unused: tensors of the text model that a checkpoint may have and an export ignores.
        prefix: the prefix of the text model's tensor names.

    Raises:
        CheckpointError: a tensor of the text model is unknown to this architecture, so the result would be wrong.
    """
    expected = set(shapes) | set(_HEADS) | set(unused)
    rest = [name for name in names if name not in expected and not name.endswith(_BUFFERS)]
    own = [name for name in rest if name.startswith(prefix) and not _other_modality(name)]
    own = [name for name in own if not name.endswith(".bias") or checkpoint.read(name).any()]
    if own:
        raise CheckpointError(f"tensor {own[0]} has no place in the model that config.json describes ({len(own)} such)")
    return rest


def _unused_kv(prefix: str, layers: Iterable[int]) -> list[str]:
    """Names of the K/V tensors that checkpoints carry for layers that read another layer's cache."""
    names = ("k_proj", "v_proj", "k_norm", "v_norm")
    return [f"{prefix}layers.{index}.self_attn.{name}.weight" for index in layers for name in names]


def _other_modality(name: str) -> bool:
    return any(word in name for word in ("vision", "audio", "image", "multi_modal"))
