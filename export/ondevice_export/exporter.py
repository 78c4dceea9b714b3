"""Exports a checkpoint with its towers, its drafter and its heads to a bundle."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path

from ondevice.bundle import Bundle, exports_directory
from ondevice.bundle_format.audio import audio_shapes
from ondevice.bundle_format.manifest import Manifest
from ondevice.bundle_format.tensor_table import Shapes
from ondevice.bundle_format.vision import vision_shapes
from ondevice.errors import BundleError, OndeviceError, PairMismatchError, UsageError, one_line, reason
from ondevice.machine import expanded
from ondevice.options import check_whole
from ondevice.progress import Advance, Progress, counted, silent
from ondevice_export.bit_budget import choose_formats
from ondevice_export.bundle_writer import BundleWriter, check_replaceable
from ondevice_export.calibration.source import (
    FactorSource,
    ImportanceMatrix,
    calibration_text,
    is_importance_matrix,
    run_text,
)
from ondevice_export.calibration.unfinished import remove_unfinished, unfinished_export
from ondevice_export.checkpoint.directory import Checkpoint
from ondevice_export.checkpoint.heads import HeadsCheckpoint, open_heads
from ondevice_export.checkpoint.json_fields import read_json
from ondevice_export.checkpoint.models import (
    DrafterCheckpoint,
    TargetCheckpoint,
    checkpoint_shapes,
    open_drafter,
    open_target,
    own_drafter,
)
from ondevice_export.checkpoint.quantized.methods import KEPT, quant_method
from ondevice_export.checkpoint.source import Checkout, Note, default_name, locate, locate_drafter, locate_heads
from ondevice_export.export_options import ExportOptions, Formats
from ondevice_export.gguf.checkpoint import GgufCheckpoint, parts
from ondevice_export.graph_files import GraphFiles, count_weights, estimate_bytes
from ondevice_export.manifest import make_manifest, tool_versions
from ondevice_export.text_files import copy_text_files

_log = logging.getLogger(__name__)
_INT8 = ExportOptions(quantize="int8")
"""Options of the bundle through which the text of a calibration is run."""


def export(
    source: str | Path,
    out: str | Path | None = None,
    *,
    drafter: str = "auto",
    heads: str = "auto",
    quantize: str | None = None,
    head_bits: int | None = None,
    revision: str | None = None,
    gguf: str | None = None,
    text_only: bool = False,
    context: int | None = None,
    calibrate: str | None = None,
    bits_per_weight: float | None = None,
    progress: Progress = silent,
    note: Note = _log.info,
    on_begin: Callable[[], None] = lambda: None,
) -> Path:
    """Export a checkpoint, with its drafter and heads, to a bundle directory.

    Args:
        source: the checkpoint's directory, GGUF file or hub id.
        out: the bundle's directory; by default a directory named after the source in `$ONDEVICE_HOME` if that is set,
            else in `bundles`. An older bundle there is replaced after the new one is complete.
        drafter: `auto`, `none`, or a directory, GGUF file or hub id. `auto` takes the MTP layer of the checkpoint, if
            it has one, where it finds no other drafter and no heads.
        heads: `auto`, `none` or a directory. `auto` skips heads that were trained for other weights, with a note.
        quantize: `int4`, `int4-affine`, `int4-table`, `int8`, `none`, or `keep`, the default for GGUF files and
            checkpoints quantised by GPTQ, AWQ or compressed-tensors; that of others is `int4`. See `ExportOptions` for
            this and the other options of formats.
        head_bits: 4 or 8; None for 8, or for what a GGUF file has.
        revision: branch, tag or commit of `source` on the hub.
        gguf: the GGUF file to take of a repository or directory.
        text_only: leave out the vision and audio towers that the checkpoint may have.
        context: the longest text of the bundle, in tokens; None for the model's own. A model with `longrope` has two
            sets of frequencies, and a bundle one: by default that of texts up to the original length, where its texts
            end; with a longer `context` that of longer texts, for all texts.
        calibrate: round to 4 bits by what a text or an importance matrix says of the inputs.
        bits_per_weight: choose a format for each matrix, so that they have this number on average.
        progress: called with the number of weights written so far and in total; a text that is run counts too.
        note: called with one-line messages for the user.
        on_begin: called when everything is checked, before the first weight is read.

    Returns:
        The bundle's directory.

    Raises:
        CheckpointError: the checkpoint is damaged, incomplete or of an unknown family.
        PairMismatchError: the drafter or the heads were made for another target.
        UsageError: an option is invalid, or has no effect on this checkpoint, or `out` is neither free nor an older
            bundle.
    """
    options = ExportOptions(quantize, head_bits, calibrate, bits_per_weight)
    context = None if context is None else check_whole("context", context, 2)
    target = locate(str(source), revision, gguf)
    notes: list[str] = []  # for after the target is opened: where that fails, only the error is of interest
    assistant = locate_drafter(drafter, target, notes.append)
    trained = locate_heads(heads, target)
    place = _place(default_name(target), out)
    _refuse_overlap(place, [found for found in (target, assistant, trained) if found is not None])
    check_replaceable(place)
    packed = target.file is not None or quant_method(read_json(target.directory / "config.json")) in KEPT
    options = options.for_target(quantised=packed)
    with ExitStack() as stack:
        opened = stack.enter_context(open_target(target, note, text_only=text_only, context=context))
        if context is not None and context > (limit := opened.config.context_length):
            raise UsageError(
                f"--context is {context}: texts of this model end at {limit} tokens in a bundle, and cannot be longer"
            )
        opened_heads = None
        if trained is not None:
            try:
                opened_heads = stack.enter_context(open_heads(trained, opened))
            except PairMismatchError as error:
                if heads != "auto":
                    raise
                note(f"no heads: {error}")
        opened_drafter = None if assistant is None else stack.enter_context(open_drafter(assistant, opened))
        if drafter == "auto" and assistant is None and opened_heads is None and opened.mtp is not None:
            opened, opened_drafter = own_drafter(opened, opened.mtp)
            notes.clear()
        for line in notes:
            note(line)
        write(opened, opened_drafter, opened_heads, place, options, progress=progress, note=note, on_begin=on_begin)
    return place


def write(
    target: TargetCheckpoint,
    drafter: DrafterCheckpoint | None,
    heads: HeadsCheckpoint | None,
    out: Path,
    options: ExportOptions,
    *,
    progress: Progress,
    note: Note = _log.info,
    on_begin: Callable[[], None] = lambda: None,
) -> None:
    """Write open checkpoints to a bundle; the arguments are as for `export`, which finds and opens them."""
    if target.modules is not None and (options.calibrate, options.bits_per_weight) != (None, None):
        raise UsageError("the weights stay as they were trained: leave --calibrate and --bits-per-weight out")
    if options.bits_per_weight is not None:
        options = dataclasses.replace(options, chosen=choose_formats(target, options.bits_per_weight))
    _note_rounding(target, options, note)
    _note_kept(target, options, note)
    if target.modules is None:
        needed = estimate_bytes(target.shapes, options.target_formats, target.checkpoint)
    else:
        note("the weights stay as they were trained; --quantize and --head-bits are for the drafter alone")
        needed = target.modules.bytes()
    further = _further_parts(target, drafter, heads, options)
    needed += sum(estimate_bytes(*part) for part in further)
    calibrates = options.calibrate is not None
    if calibrates and not is_importance_matrix(options.calibrate or ""):
        needed += estimate_bytes(target.shapes, _INT8.target_formats)
    passes = 3 if calibrates else 1  # over the target's weights: a bundle in int8 is written and run first
    advance = counted(progress, passes * count_weights(target.shapes) + sum(count_weights(part[0]) for part in further))
    manifest = make_manifest(target, drafter, options, heads)
    _note_replaced(out, manifest, note)
    with _disk_errors(out), BundleWriter(out) as bundle, ExitStack() as stack:
        _check_space(out, needed)
        on_begin()
        calibration = stack.enter_context(_calibration(target, out, options, advance, note)) if calibrates else None
        graphs = GraphFiles(bundle.directory, options, advance, calibration)
        shared = graphs.write_target(target)
        if drafter is not None:
            graphs.write_drafter(drafter, target.config, shared)
        if heads is not None:
            graphs.write_heads(heads, target.config, shared)
        if target.vision is not None:
            graphs.write_vision(target.vision, target)
        if target.audio is not None:
            graphs.write_audio(target.audio, target)
        copy_text_files(target.checkout.directory, bundle.directory, note)
        bundle.commit(manifest, graphs.tensors)
    remove_unfinished(out)


def _further_parts(
    target: TargetCheckpoint, drafter: DrafterCheckpoint | None, heads: HeadsCheckpoint | None, options: ExportOptions
) -> list[tuple[Shapes, Formats, Checkpoint | None]]:
    """The parts of a bundle beside the target's text model, as arguments of `estimate_bytes`."""
    found: list[tuple[Shapes, Formats, Checkpoint | None]] = []
    if drafter is not None:
        found.append((drafter.shapes, options.drafter_formats, drafter.checkpoint))
    if heads is not None:
        found.append((heads.shapes, options.drafter_formats, None))
    if target.vision is not None:
        found.append((vision_shapes(target.vision, target.config), options.tower_formats, None))
    if target.audio is not None:
        found.append((audio_shapes(target.audio, target.config), options.tower_formats, None))
    return found


@contextmanager
def _calibration(
    target: TargetCheckpoint, out: Path, options: ExportOptions, advance: Advance, note: Note
) -> Iterator[FactorSource]:
    """Open the importance matrix of `calibrate`, or a bundle of the target that runs its text."""
    source = options.calibrate or ""
    if is_importance_matrix(source):
        with closing(ImportanceMatrix(Path(source))) as matrix:
            yield matrix
        return
    text, share = calibration_text(source), count_weights(target.shapes)
    with (
        unfinished_export(out, _key(target, options, text), note) as unfinished,
        run_text(text, unfinished, partial(_write_int8, target, advance), advance, share) as calibration,
    ):
        yield calibration


def _write_int8(target: TargetCheckpoint, advance: Advance, out: Path) -> Bundle:
    """A bundle of the target alone with 8 bits per weight, through which the text of a calibration is run."""
    config = dataclasses.replace(target.config, mtp=None)
    shapes = checkpoint_shapes(config, target.tensors.names)
    alone = dataclasses.replace(target, vision=None, audio=None, config=config, shapes=shapes)
    with BundleWriter(out) as bundle:
        graphs = GraphFiles(bundle.directory, _INT8, advance)
        graphs.write_target(alone)
        copy_text_files(target.checkout.directory, bundle.directory, _log.debug)
        bundle.commit(make_manifest(alone, None, _INT8), graphs.tensors)
    return Bundle.open(out)


def _key(target: TargetCheckpoint, options: ExportOptions, text: str) -> str:
    """The same for calibrated exports of the same bytes: by the target's files, the options, the text and the tools.

    The longest text is one of the options: it decides the frequencies with which the calibration's text is run.
    """
    path = target.checkout.path
    files = parts(path) if path.is_file() else sorted(filter(Path.is_file, path.iterdir()))
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    given = str(path), stats, options, target.config.context_length, text, sorted(tool_versions().items())
    return hashlib.sha256(repr(given).encode()).hexdigest()


def _place(name: str, out: str | Path | None) -> Path:
    """The absolute path of the bundle; raises UsageError where `out` is not a valid path (circular links, a NUL)."""
    place = exports_directory() / name if out is None else expanded(out)
    try:
        return place.resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise UsageError(f"{place} cannot be written ({reason(error)}): choose another --out") from error


def _refuse_overlap(out: Path, sources: list[Checkout]) -> None:
    for source in sources:
        path = source.path.resolve()
        if out == path or path in out.parents or out in path.parents:
            raise UsageError(f"{out} and the checkpoint {path} lie in each other: choose another --out")


def _note_rounding(target: TargetCheckpoint, options: ExportOptions, note: Note) -> None:
    """Say what it costs to round the weights of a GGUF file, which were rounded before, to 4 bits."""
    formats, file = options.target_formats, target.checkpoint
    if formats.layers.bits != 4 or not isinstance(file, GgufCheckpoint):
        return
    matrices = target.matrices
    chosen = {name: formats.of(file, name, formats.layers) for name in matrices}
    again = [name for name, form in chosen.items() if form.bits == 4 and file.kept_format(name) != form]
    if rounded := sum(file.kind(name).unpack is not None for name in again):
        note(
            f"{rounded} of {len(matrices)} matrices are rounded to 4 bits a second time, which costs small models much "
            "(measured: 0.3 nats per token, 44 % more perplexity); less with --calibrate, nothing with --quantize keep"
        )


def _note_kept(target: TargetCheckpoint, options: ExportOptions, note: Note) -> None:
    """Say that matrices in MXFP4 do not get the format of the others."""
    formats, matrices = options.target_formats, target.matrices
    kept = [name for name in matrices if not formats.keep and formats.kept(target.checkpoint, name)]
    if kept:
        note(f"{len(kept)} of {len(matrices)} matrices stay in MXFP4, as they are; --quantize is for the others")


def _note_replaced(out: Path, new: Manifest, note: Note) -> None:
    """Say which bundle the export replaces, unless that was made of the same source."""

    def origin(manifest: Manifest) -> tuple[object, ...]:
        source = manifest.sources["target"]
        return manifest.name, source.id, source.sha256

    with suppress(BundleError, KeyError):  # no bundle, or one without a source
        old = Bundle.open(out).manifest
        if origin(old) != origin(new):
            note(f"replacing {out}, the bundle of {'another ' if old.name == new.name else ''}{one_line(old.name)}")


def _check_space(out: Path, needed: int) -> None:
    free = shutil.disk_usage(out.parent).free
    if free < needed:
        raise OndeviceError(
            f"the bundle needs about {needed / 1e9:.2f} GB and {out.parent} has {free / 1e9:.2f} GB free: "
            "make room or choose another --out"
        )


@contextmanager
def _disk_errors(out: Path) -> Iterator[None]:
    """Raise an OSError of the block, such as a full disk, as an OndeviceError with a one-line message."""
    try:
        yield
    except OSError as error:
        if isinstance(error, OndeviceError):
            raise
        cause = "the disk is full" if error.errno == errno.ENOSPC else error.strerror or str(error)
        raise OndeviceError(f"the bundle could not be written to {out.parent}: {cause}; nothing was kept") from error
