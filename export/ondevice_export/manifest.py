"""Makes the manifest of a bundle, `bundle.json`, from the configurations of target and drafter."""

from __future__ import annotations

import dataclasses
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from ondevice import __version__
from ondevice.bundle import GENERATION_CONFIG
from ondevice.bundle_format.checks import InvalidFieldError
from ondevice.bundle_format.manifest import AS_TRAINED, Manifest, Quantization, Source
from ondevice.bundle_format.model_config import DrafterEntry
from ondevice.bundle_format.tensor_table import EMBEDDING, HEAD
from ondevice.bundle_format.weight_format import MXFP4
from ondevice.errors import CheckpointError, UsageError
from ondevice.options import GenerationDefaults
from ondevice_export.checkpoint.heads import HeadsCheckpoint
from ondevice_export.checkpoint.json_fields import read_json
from ondevice_export.checkpoint.models import DrafterCheckpoint, TargetCheckpoint
from ondevice_export.checkpoint.source import default_name
from ondevice_export.export_options import ExportOptions
from ondevice_export.gguf.checkpoint import GgufCheckpoint
from ondevice_export.quantize import BLOCK
from ondevice_export.text_files import adds_bos, begin_token, read_tokenizer, special_tokens, turn_ends

_TOOLS = ("onnx", "onnx-ir", "numpy", "numba")


def tool_versions() -> dict[str, str]:
    """Versions of the packages that made a bundle, by package name."""
    versions = {"python": platform.python_version(), "ondevice": __version__}
    for name in _TOOLS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # a frozen application, which leaves metadata out
            versions[name] = "unknown"
    return versions


def make_manifest(
    target: TargetCheckpoint,
    drafter: DrafterCheckpoint | None,
    options: ExportOptions,
    heads: HeadsCheckpoint | None = None,
) -> Manifest:
    """Make the manifest, except its list of files and its tensor tables.

    Raises:
        CheckpointError: the manifest would be invalid, for instance because a token id is outside the vocabulary.
    """
    config, token_ids, directory = target.config, dict(target.token_ids), target.checkout.directory
    generation = _generation(directory)
    token_ids |= {name: generation[name] for name in token_ids if generation.get(name) is not None}
    sources = {"target": _source(target)}
    if drafter is not None:
        sources["drafter"] = _source(drafter)
    if heads is not None:
        sources["heads"] = Source(heads.checkout.id, heads.checkout.revision)
    tokenizer = read_tokenizer(directory)
    bos = begin_token(directory, tokenizer, _single(token_ids["bos_token_id"]))
    pad = _single(token_ids["pad_token_id"])
    made = Manifest(
        family=target.family,
        name=default_name(target.checkout),
        target=config,
        drafter=None if drafter is None else _drafter(drafter),
        bos_token_id=bos,
        eos_token_ids=tuple(dict.fromkeys([*_several(token_ids["eos_token_id"]), *turn_ends(directory, tokenizer)])),
        pad_token_id=pad if pad is not None and 0 <= pad < config.vocab_size else None,  # some name -1 for none
        quantization=_quantization(target, options),
        sources=sources,
        tools=tool_versions(),
        heads=() if heads is None else heads.heads,
        vision=target.vision,
        audio=target.audio,
        add_bos=adds_bos(directory, tokenizer, bos, default=target.token_ids.get("add_bos_token")),
        special_tokens=special_tokens(directory),
    )
    try:
        made.check()
    except InvalidFieldError as error:
        raise CheckpointError(f"{target.checkout.path}: {error}") from error
    try:
        GenerationDefaults.of(generation, config.vocab_size)
    except UsageError as error:
        raise CheckpointError(f"{directory / GENERATION_CONFIG}: {error}: correct it, or delete the field") from error
    return made


def _source(model: TargetCheckpoint | DrafterCheckpoint) -> Source:
    checkout, file = model.checkout, model.checkpoint
    if not isinstance(file, GgufCheckpoint):
        return Source(checkout.id, checkout.revision)
    return Source(checkout.id, checkout.revision, file.path.name, file.sha256(), file.types())


def _quantization(target: TargetCheckpoint, options: ExportOptions) -> Quantization:
    head = target.tensors.names.of(EMBEDDING if target.config.tied else HEAD)
    if target.modules is None:
        formats = options.target_formats
        form, weights = formats.of(target.checkpoint, head, formats.head), options.quantize or "int4"
        if not formats.keep and any(formats.kept(target.checkpoint, name) for name in target.shapes):
            weights = f"{MXFP4.name}+{weights}"
        return Quantization(weights, BLOCK, form.bits)
    return Quantization(AS_TRAINED, 0, target.modules.format(head).bits)


def _drafter(drafter: DrafterCheckpoint) -> DrafterEntry:
    """The drafter's configuration, with the draft length that its authors recommend."""
    tokens = _generation(drafter.checkout.directory).get("num_assistant_tokens")
    if isinstance(tokens, int) and not isinstance(tokens, bool) and tokens > 0:
        return dataclasses.replace(drafter.config, num_assistant_tokens=tokens)
    return drafter.config


def _generation(directory: Path) -> dict[str, Any]:
    path = directory / GENERATION_CONFIG
    return read_json(path) if path.is_file() else {}


def _several(value: Any) -> list[int]:
    """A field that holds one token id, a list of ids, or nothing, as a list."""
    values = value if isinstance(value, list) else [value]
    return [one for one in values if isinstance(one, int) and not isinstance(one, bool)]


def _single(value: Any) -> int | None:
    return next(iter(_several(value)), None)
