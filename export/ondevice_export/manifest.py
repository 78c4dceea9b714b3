"""Makes the manifest of a bundle, `bundle.json`, from the configurations of target and drafter."""

from __future__ import annotations

import dataclasses
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from ondevice import __version__, manifest
from ondevice.bundle import GENERATION_CONFIG
from ondevice.errors import CheckpointError
from ondevice.manifest import AS_TRAINED, Layer, Manifest, Quantization, Source, Target
from ondevice_export.config import TextConfig
from ondevice_export.export_options import ExportOptions
from ondevice_export.heads import HeadsCheckpoint, HeadsConfig
from ondevice_export.json_fields import read_json
from ondevice_export.models import DrafterCheckpoint, TargetCheckpoint
from ondevice_export.quantize import BLOCK
from ondevice_export.source import default_name
from ondevice_export.tensor_names import HEAD

TARGET_GRAPH, DRAFTER_GRAPH = "target.onnx", "drafter.onnx"
_TOOLS = ("onnx", "onnx-ir", "numpy", "numba")


def heads_graph(kind: str) -> str:
    """The file of heads of a kind."""
    return f"heads.{kind}.onnx"


def tool_versions() -> dict[str, str]:
    """Versions of what made a bundle."""
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
    """Everything but the list of files.

    Raises:
        CheckpointError: no bundle can hold such a model, for instance one with a token id outside its vocabulary.
    """
    config = target.config
    generation = _generation(target.checkout.directory)
    token_ids = {**config.token_ids, **{name: generation[name] for name in config.token_ids if generation.get(name)}}
    sources = {"target": Source(target.checkout.id, target.checkout.revision)}
    if drafter is not None:
        sources["drafter"] = Source(drafter.checkout.id, drafter.checkout.revision)
    if heads is not None:
        sources["heads"] = Source(heads.checkout.id, heads.checkout.revision)
    made = Manifest(
        family=target.family,
        name=default_name(target.checkout),
        target=_target(config),
        drafter=None if drafter is None else _drafter(config, drafter),
        bos_token_id=_single(token_ids["bos_token_id"]),
        eos_token_ids=tuple(_several(token_ids["eos_token_id"])),
        pad_token_id=_single(token_ids["pad_token_id"]),
        quantization=_quantization(target, options),
        sources=sources,
        tools=tool_versions(),
        schema=manifest.SCHEMAS[0 if heads is None else 1],
        heads=() if heads is None else tuple(_heads(each, config) for each in heads.heads),
    )
    try:
        made.check()
    except manifest.InvalidFieldError as error:
        raise CheckpointError(f"{target.checkout.directory}: {error}") from error
    return made


def _quantization(target: TargetCheckpoint, options: ExportOptions) -> Quantization:
    if target.modules is None:
        return Quantization(options.quantize, BLOCK, options.target_formats.head.bits)
    head = target.prefix + "embed_tokens.weight" if target.config.tied else HEAD
    return Quantization(AS_TRAINED, 0, target.modules.format(head).bits)


def _target(config: TextConfig) -> Target:
    layers = []
    for index, layer in enumerate(config.layers):
        source = index if layer.kv_source is None else layer.kv_source
        layers.append(Layer(layer.kind, layer.kv_heads, layer.head_dim, source))
    return Target(
        graph=TARGET_GRAPH,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        context_length=config.context_length,
        sliding_window=min(config.sliding_window, config.context_length),
        query_heads=config.query_heads,
        layers=tuple(layers),
    )


def _drafter(target: TextConfig, drafter: DrafterCheckpoint) -> manifest.DrafterEntry:
    full, sliding = target.last_kv_layer("full"), target.last_kv_layer("sliding")
    assert full is not None, "check_pair has seen both caches"
    assert sliding is not None, "check_pair has seen both caches"
    model = manifest.DrafterEntry(DRAFTER_GRAPH, full, sliding, drafter.config.candidates)
    generation = _generation(drafter.checkout.directory)
    tokens = generation.get("num_assistant_tokens")
    if isinstance(tokens, int) and not isinstance(tokens, bool) and tokens > 0:
        model = dataclasses.replace(model, num_assistant_tokens=tokens)
    return model


def _heads(heads: HeadsConfig, target: TextConfig) -> manifest.HeadsEntry:
    candidates = heads.candidates(target.vocab_size)
    return manifest.HeadsEntry(heads.kind, heads_graph(heads.kind), heads.offsets, candidates, heads.layer)


def _generation(directory: Path) -> dict[str, Any]:
    path = directory / GENERATION_CONFIG
    return read_json(path) if path.is_file() else {}


def _several(value: Any) -> list[int]:
    """A token id, a list of them, or none."""
    values = value if isinstance(value, list) else [value]
    return [one for one in values if isinstance(one, int) and not isinstance(one, bool)]


def _single(value: Any) -> int | None:
    return next(iter(_several(value)), None)
