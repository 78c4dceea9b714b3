"""`bundle.json` as dataclasses, written by the exporter and checked field by field by the runtime."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from ondevice.contract import AttentionKind
from ondevice.errors import BundleCorruptError, UnsupportedBundleError

SCHEMAS = (1, 2)
"""Raised whenever an older runtime would misread a newer bundle: bundles with heads have 2, all others 1."""

HeadsKind = Literal["medusa", "blockwise", "exit"]

MOST_TOKENS = 1 << 24
"""Longest context: angles of rotary embeddings are made of positions in float32, which holds no larger ones exactly."""

MOST_SIZE = (1 << 31) - 1
"""Of anything else that is counted in a model."""

MOST_OFFSETS = 16
"""Tokens that heads propose: as many as a schedule drafts at most."""

_OBSOLETE = {"num_assistant_tokens_schedule"}
"""Fields of the drafter that bundles made before 2026-11 have, and nothing reads."""

Section = TypeVar("Section")


@dataclass(frozen=True)
class Layer:
    """The shape of a decoder layer's keys and values, and whose cache holds them."""

    kind: AttentionKind
    kv_heads: int
    head_dim: int
    kv_source: int
    """Index of the layer whose cache this one reads: its own where it has one."""

    @property
    def kv_width(self) -> int:
        """Numbers in a row of keys, or of values."""
        return self.kv_heads * self.head_dim


@dataclass(frozen=True)
class Target:
    """The target: its graph's file, and the sizes that engines allocate memory by."""

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
class DrafterEntry:
    """The drafter: its graph's file, and the caches of the target that it reads."""

    graph: str
    full_layer: int
    """Index of the target's layer whose cache the drafter's full-attention layers read."""
    sliding_layer: int
    """The same of its sliding layers."""
    candidates: int
    """Tokens scored per step: those of the centroid head's clusters, or the whole vocabulary."""
    num_assistant_tokens: int = 6
    """Draft length that its authors recommend."""


AS_TRAINED = "trained"
"""Weights whose codes are those of a checkpoint that was trained quantised."""


@dataclass(frozen=True)
class HeadsEntry:
    """Heads that propose tokens from a hidden state of the target; see `ondevice.contract`."""

    kind: HeadsKind
    graph: str
    offsets: int
    """Tokens that are proposed: those behind the next one, or of the kind `exit` the next one itself."""
    candidates: int
    """Tokens scored for each: those of the best clusters, or the whole vocabulary."""
    layer: int | None = None
    """Of the kind `exit`: index of the layer behind which it reads the residual stream."""


@dataclass(frozen=True)
class Quantization:
    """How weights were quantised, for readers: engines go by the graphs."""

    weights: str
    """int4, int8, none (float32), or AS_TRAINED."""
    block_size: int
    """Weights that share a scale; 0 where that differs from matrix to matrix."""
    head_bits: int
    """Bits of the head, which is the token table too where they are tied; 32 where `weights` is none."""


@dataclass(frozen=True)
class Source:
    """The checkpoint that something was exported from."""

    id: str
    revision: str | None = None


@dataclass(frozen=True)
class FileEntry:
    """Bytes and hash of a file of the bundle."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The whole of `bundle.json`."""

    family: str
    name: str
    target: Target
    drafter: DrafterEntry | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    quantization: Quantization
    sources: dict[str, Source]
    tools: dict[str, str]
    files: dict[str, FileEntry] = field(default_factory=dict)
    schema: int = SCHEMAS[0]
    sha256: str | None = None
    """`digest()` when the file was written; None in bundles made before 2026-11."""
    heads: tuple[HeadsEntry, ...] = ()

    def digest(self) -> str:
        """sha256 of all other fields, however the file is formatted."""
        data = dataclasses.replace(self, sha256=None)._fields()
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.files.values())

    @property
    def weight_bytes(self) -> int:
        """Of the graphs with their weights."""
        return sum(entry.size for name, entry in self.files.items() if ".onnx" in name)

    @property
    def altered(self) -> bool:
        """Whether a field is not what it was when the file was written."""
        return self.sha256 not in (None, self.digest())

    def to_json(self) -> str:
        return json.dumps(dataclasses.replace(self, sha256=self.digest())._fields(), indent=2) + "\n"

    def _fields(self) -> dict[str, Any]:
        """What the file holds: a bundle without heads is that of schema 1, to the last byte."""
        data = dataclasses.asdict(self)
        if not self.heads:
            del data["heads"]
        return data

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Parse and check `bundle.json`.

        Raises:
            UnsupportedBundleError: the schema is not this version's.
            BundleCorruptError: not JSON, or a field is missing, unknown, of the wrong type, or out of range.
        """
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise BundleCorruptError(f"bundle.json is not valid JSON ({error}): export the bundle again") from error
        schema = data.get("schema") if isinstance(data, dict) else None
        if schema not in SCHEMAS:
            raise UnsupportedBundleError(
                f"this bundle has schema {schema!r}, this version of ondevice reads {' and '.join(map(str, SCHEMAS))}: "
                "export it again, or update ondevice"
            )
        try:
            manifest = _manifest(data)
            manifest.check()
        except InvalidFieldError as error:
            raise BundleCorruptError(f"bundle.json: {error}: export the bundle again") from error
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BundleCorruptError(f"bundle.json is malformed ({error!r}): export the bundle again") from error
        return manifest

    def check(self) -> None:
        """Check every number that an engine computes an address or a size from, and every token id.

        Raises:
            InvalidFieldError: one is out of range, or contradicts another.
        """
        _check_target(self.target)
        if self.drafter is not None:
            _check_drafter(self.drafter, self.target)
        _require(not self.heads or self.schema == SCHEMAS[-1], f"heads in a bundle of schema {self.schema}")
        kinds = [heads.kind for heads in self.heads]
        _require(len(set(kinds)) == len(kinds), f"heads of the kinds {', '.join(kinds)}")
        for heads in self.heads:
            _check_heads(heads, self.target)
        tokens = {"bos_token_id": self.bos_token_id, "pad_token_id": self.pad_token_id}
        tokens |= {f"eos_token_ids[{index}]": token for index, token in enumerate(self.eos_token_ids)}
        for name, token in tokens.items():
            if token is not None:
                _check_number(name, token, self.target.vocab_size - 1, least=0)
        for name, entry in self.files.items():
            _check_number(f"size of {name!r:.99}", entry.size, 1 << 62)
            hexadecimal = re.fullmatch("[0-9a-f]{64}", entry.sha256)
            _require(hexadecimal is not None, f"sha256 of {name!r:.99} is {entry.sha256!r:.99}")


class InvalidFieldError(ValueError):
    """A field of a manifest that no bundle can have."""


def _manifest(data: dict[str, Any]) -> Manifest:
    target, drafter = data["target"], data["drafter"]
    layers = tuple(_section(Layer, layer) for layer in target["layers"])
    if drafter is not None:
        drafter = _section(DrafterEntry, {name: drafter[name] for name in drafter if name not in _OBSOLETE})
    for name, version in data["tools"].items():
        _require(isinstance(version, str), f"the version of {name!r:.99} is {version!r:.99}")
    sections = {
        "target": _section(Target, {**target, "layers": layers}),
        "drafter": drafter,
        "eos_token_ids": tuple(data["eos_token_ids"]),
        "heads": tuple(_section(HeadsEntry, heads) for heads in data.get("heads", ())),
        "quantization": _section(Quantization, data["quantization"]),
        "sources": {role: _section(Source, source) for role, source in data["sources"].items()},
        "files": {name: _section(FileEntry, entry) for name, entry in data["files"].items()},
    }
    return _section(Manifest, {**data, **sections})


def _section(kind: type[Section], data: Mapping[str, Any]) -> Section:
    """A dataclass from the JSON object of its fields, those of a plain type checked."""
    made = kind(**data)
    for name, hint in get_type_hints(kind).items():
        value = getattr(made, name)
        if get_origin(hint) is Literal:
            fits = value in get_args(hint)
        else:
            # elements of tuples and dicts are checked where they are made
            fits = get_origin(hint) in (tuple, dict) or (isinstance(value, hint) and not isinstance(value, bool))
        _require(fits, f"{name} is {value!r:.99}")
    return made


def _check_target(target: Target) -> None:
    for name in ("vocab_size", "hidden_size", "query_heads"):
        _check_number(name, getattr(target, name))
    _check_number("context_length", target.context_length, MOST_TOKENS)
    _check_number("sliding_window", target.sliding_window, target.context_length)
    _require(bool(target.layers), "there are no layers")
    for index, layer in enumerate(target.layers):
        _check_number(f"kv_heads of layer {index}", layer.kv_heads)
        _check_number(f"head_dim of layer {index}", layer.head_dim)
        _require(0 <= layer.kv_source <= index, f"layer {index} reads the cache of layer {layer.kv_source}")
        owner = target.layers[layer.kv_source]
        same = (owner.kind, owner.kv_heads, owner.head_dim) == (layer.kind, layer.kv_heads, layer.head_dim)
        _require(
            same and owner.kv_source == layer.kv_source, f"layer {index} cannot read layer {layer.kv_source}'s cache"
        )


def _check_drafter(drafter: DrafterEntry, target: Target) -> None:
    _check_number("candidates", drafter.candidates, target.vocab_size)
    _check_number("num_assistant_tokens", drafter.num_assistant_tokens)
    for kind, layer in (("full", drafter.full_layer), ("sliding", drafter.sliding_layer)):
        owners = [index for index in target.kv_layers() if target.layers[index].kind == kind]
        _require([layer] == owners[-1:], f"the drafter's {kind} layer is not the last with a cache of its own")


def _check_heads(heads: HeadsEntry, target: Target) -> None:
    _check_number(f"candidates of the {heads.kind} heads", heads.candidates, target.vocab_size)
    _check_number(f"offsets of the {heads.kind} heads", heads.offsets, 1 if heads.kind == "exit" else MOST_OFFSETS)
    if heads.kind == "exit":
        _check_number("layer of the exit heads", heads.layer, len(target.layers) - 1, least=0)
    else:
        _require(heads.layer is None, f"the {heads.kind} heads have a layer")


def _check_number(name: str, value: Any, most: int = MOST_SIZE, least: int = 1) -> None:
    number = isinstance(value, int) and not isinstance(value, bool)
    _require(number and least <= value <= most, f"{name} is {value!r:.99}, not a whole number from {least} to {most}")


def _require(condition: bool, reason: str) -> None:
    if not condition:
        raise InvalidFieldError(reason)
