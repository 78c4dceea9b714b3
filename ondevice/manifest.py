"""`bundle.json`: what a bundle says of itself. The exporter writes it, the runtime trusts nothing else."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any, get_args

from ondevice.contract import AttentionKind
from ondevice.errors import BundleCorruptError, UnsupportedBundleError

SCHEMA = 1
"""Raised whenever an older runtime would misread a newer bundle."""


@dataclass(frozen=True)
class Layer:
    """One decoder layer as the cache sees it."""

    kind: AttentionKind
    kv_heads: int
    head_dim: int
    kv_source: int
    """The layer whose cache this one reads: its own index where it owns one."""

    @property
    def kv_width(self) -> int:
        """Floats in one cache row."""
        return self.kv_heads * self.head_dim


@dataclass(frozen=True)
class Target:
    graph: str
    vocab_size: int
    hidden_size: int
    context_length: int
    sliding_window: int
    query_heads: int
    layers: tuple[Layer, ...]

    def kv_layers(self) -> list[int]:
        """Indices of the layers that own a cache, ascending."""
        return [index for index, layer in enumerate(self.layers) if layer.kv_source == index]


@dataclass(frozen=True)
class DrafterModel:
    graph: str
    full_layer: int
    """The target layer whose cache the drafter's full-attention layer reads."""
    sliding_layer: int
    candidates: int
    """Tokens scored per step: the centroid head's shortlist, or the whole vocabulary."""
    num_assistant_tokens: int = 6
    num_assistant_tokens_schedule: str = "constant"


@dataclass(frozen=True)
class Quantization:
    weights: str
    """int4, int8 or none (float32)."""
    block_size: int
    head_bits: int
    """Width of the tied token table, head and embedding in one; 32 where `weights` is none."""


@dataclass(frozen=True)
class Source:
    id: str
    revision: str | None = None


@dataclass(frozen=True)
class FileEntry:
    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    family: str
    name: str
    target: Target
    drafter: DrafterModel | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    quantization: Quantization
    sources: dict[str, Source]
    tools: dict[str, str]
    files: dict[str, FileEntry] = field(default_factory=dict)
    schema: int = SCHEMA

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Parse and check `bundle.json`.

        Raises:
            UnsupportedBundleError: the schema is not this version's.
            BundleCorruptError: not JSON, or a field is missing, unknown, or of the wrong type.
        """
        try:
            data = json.loads(text)
        except ValueError as error:
            raise BundleCorruptError(f"bundle.json is not valid JSON ({error}): export the bundle again") from error
        schema = data.get("schema") if isinstance(data, dict) else None
        if schema != SCHEMA:
            raise UnsupportedBundleError(
                f"this bundle has schema {schema!r}, this version of ondevice reads {SCHEMA}: "
                "export it again, or update ondevice"
            )
        try:
            manifest = _manifest(data)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BundleCorruptError(f"bundle.json is malformed ({error!r}): export the bundle again") from error
        _check(manifest)
        return manifest


def _manifest(data: dict[str, Any]) -> Manifest:
    target = dict(data["target"])
    target["layers"] = tuple(Layer(**layer) for layer in target["layers"])
    drafter = data["drafter"]
    return Manifest(
        **{
            **data,
            "target": Target(**target),
            "drafter": None if drafter is None else DrafterModel(**drafter),
            "eos_token_ids": tuple(int(token) for token in data["eos_token_ids"]),
            "quantization": Quantization(**data["quantization"]),
            "sources": {role: Source(**source) for role, source in data["sources"].items()},
            "files": {name: FileEntry(**entry) for name, entry in data["files"].items()},
        }
    )


def _check(manifest: Manifest) -> None:
    """Everything an engine computes an address or a size from."""
    target = manifest.target
    sizes: dict[str, Any] = {
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "context_length": target.context_length,
        "sliding_window": target.sliding_window,
        "query_heads": target.query_heads,
    }
    if not target.layers:
        raise BundleCorruptError("bundle.json lists no layers: export the bundle again")
    for index, layer in enumerate(target.layers):
        sizes[f"layer {index} kv_heads"] = layer.kv_heads
        sizes[f"layer {index} head_dim"] = layer.head_dim
        source = layer.kv_source
        well_formed = (
            layer.kind in get_args(AttentionKind)
            and isinstance(source, int)
            and 0 <= source <= index
            and target.layers[source].kv_source == source
            and target.layers[source].kind == layer.kind
            and (target.layers[source].kv_heads, target.layers[source].head_dim) == (layer.kv_heads, layer.head_dim)
        )
        if not well_formed:
            raise BundleCorruptError(f"bundle.json: layer {index} is inconsistent: export the bundle again")
    for name, entry in manifest.files.items():
        sizes[f"size of {name}"] = entry.size
    if manifest.drafter is not None:
        sizes["drafter candidates"] = manifest.drafter.candidates
        for kind, layer_index in (("full", manifest.drafter.full_layer), ("sliding", manifest.drafter.sliding_layer)):
            if [layer_index] != [layer for layer in target.kv_layers() if target.layers[layer].kind == kind][-1:]:
                raise BundleCorruptError(f"bundle.json: the drafter's {kind} layer is not the target's last one")
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise BundleCorruptError(f"bundle.json: {name} is {value!r}, not a positive number")
