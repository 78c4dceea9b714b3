"""The manifest, `bundle.json`, as dataclasses: written by the exporter, parsed and checked by the runtime.

The file may come from an untrusted source. `Manifest.from_json` checks the type and range of every field, and
`Manifest.check_tensors` checks the tensor tables against the configuration and the sizes of the files.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ondevice.bundle_format.audio import AudioEntry, audio_shapes, check_audio
from ondevice.bundle_format.checks import InvalidFieldError, check_number, require
from ondevice.bundle_format.model_config import (
    DrafterEntry,
    HeadsEntry,
    Target,
    check_drafter,
    check_heads,
    check_target,
)
from ondevice.bundle_format.tensor_table import (
    Shapes,
    Tensor,
    TensorTable,
    check_tables,
    drafter_shapes,
    heads_shapes,
    target_shapes,
)
from ondevice.bundle_format.vision import VisionEntry, check_vision, vision_shapes
from ondevice.errors import BundleCorruptError, UnsupportedBundleError

SCHEMA = 4
"""Version of the format, raised whenever an older runtime would misread a newer bundle. Schemas 1 and 2 had no tensor
tables, 1 to 3 described the layers of one family only."""

_CORRUPT = "export the bundle again"

SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
"""Variables of chat templates that hold the text of a special token."""

AS_TRAINED = "trained"
"""Value of `Quantization.weights`: the codes come unchanged from a checkpoint of quantization-aware training."""


KEEP, MIXED = "keep", "mixed"
"""Values of `Quantization.weights` of bundles whose matrices have several formats: those of their source, and one that
was chosen for each."""


@dataclass(frozen=True)
class Quantization:
    """How the weights were quantised, for display. Engines read the formats from the tensor tables."""

    weights: str
    """int4, int4-affine, int4-table, int8, none (float32), keep (those of a GGUF file), mixed (one for each matrix), or
    AS_TRAINED; after "mxfp4+", that of the matrices which the checkpoint has not in MXFP4."""
    block_size: int
    """Number of weights that share a scale; 0 if it differs between matrices."""
    head_bits: int
    """Bits per weight of the head, and of the token embedding if it is tied to the head; 32 if `weights` is none."""


@dataclass(frozen=True)
class Source:
    """A checkpoint from which a part of the bundle was exported."""

    id: str
    revision: str | None = None
    file: str | None = None
    """Name of the GGUF file, the first of several; None for a directory, and `bundle.json` then has none of these."""
    sha256: str | None = None
    """sha256 of the GGUF file in hexadecimal; of several, of their hashes in order."""
    types: dict[str, int] | None = None
    """Number of tensors of each type in the GGUF file."""


@dataclass(frozen=True)
class FileEntry:
    """Size in bytes and sha256 in hexadecimal of a file of the bundle."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """All fields of `bundle.json`."""

    family: str
    name: str
    target: Target
    drafter: DrafterEntry | None
    bos_token_id: int | None
    """The token that begins a text. Chat templates write it themselves."""
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    quantization: Quantization
    sources: dict[str, Source]
    tools: dict[str, str]
    files: dict[str, FileEntry] = field(default_factory=dict)
    heads: tuple[HeadsEntry, ...] = ()
    tensors: dict[str, TensorTable] = field(default_factory=dict)
    """Tensor tables, by the file name of their graph."""
    vision: VisionEntry | None = None
    """The vision tower; None if the bundle reads no pictures, and `bundle.json` then has no such field."""
    audio: AudioEntry | None = None
    """The audio tower; None if the bundle has none, as for `vision`."""
    add_bos: bool = True
    """Whether `bos_token_id` is put in front of a text that no chat template has rendered."""
    special_tokens: dict[str, str | None] = field(default_factory=dict)
    """Texts of SPECIAL_TOKENS as the checkpoint's tokenizer names them, None for one that it has not. They may differ
    from the tokens of the ids above, which are those of generation. A name that is absent stands for the id's token."""
    schema: int = SCHEMA
    sha256: str | None = None
    """Value of `digest()` when the file was written; None if unknown, as before the file is written."""

    def digest(self) -> str:
        """sha256 of all fields except `sha256`; it does not depend on how the file is formatted."""
        data = _fields(dataclasses.replace(self, sha256=None))
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()

    @property
    def first_token_id(self) -> int | None:
        """The token that is put in front of a text that no chat template has rendered; None for none."""
        return self.bos_token_id if self.add_bos else None

    @property
    def size(self) -> int:
        """Total size of all files in bytes."""
        return sum(entry.size for entry in self.files.values())

    @property
    def weight_bytes(self) -> int:
        """Total size of the graphs and their weights in bytes."""
        return sum(entry.size for name, entry in self.files.items() if ".onnx" in name)

    @property
    def weights(self) -> str:
        """The format of the target's matrices, for display; where it is not one for all, with that of most weights."""
        kind = self.quantization.weights
        if kind not in (KEEP, MIXED) or self.target.graph not in self.tensors:
            return kind
        counts = Counter[str]()
        for tensor in self.tensors[self.target.graph].tensors.values():
            if tensor.weight_format.quantised:
                counts[tensor.weight_format.name] += math.prod(tensor.shape)
        return f"{kind} ({counts.most_common(1)[0][0]})" if counts else kind

    @property
    def reads_media(self) -> bool:
        """Whether prompts may have pictures or sounds."""
        return self.vision is not None or self.audio is not None

    @property
    def altered(self) -> bool:
        """Whether a field was changed after the file was written."""
        return self.sha256 not in (None, self.digest())

    def to_json(self) -> str:
        """The text of the file, with one line per tensor."""
        data = _fields(dataclasses.replace(self, sha256=self.digest(), tensors={}))
        del data["tensors"]
        tables = ",\n".join(_table_json(graph, table) for graph, table in self.tensors.items())
        return _text_of(data).removesuffix("\n}") + f',\n  "tensors": {{\n{tables}\n  }}\n}}\n'

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Parse `bundle.json` and check its configuration; `check_tensors` checks the tensor tables.

        Raises:
            UnsupportedBundleError: the schema is not SCHEMA.
            BundleCorruptError: the text is not JSON, or a field is missing, unknown, duplicated, of the wrong type, or
                out of range.
        """
        try:
            data = json.loads(text, object_pairs_hook=_object)
        except (ValueError, RecursionError) as error:
            raise BundleCorruptError(f"bundle.json is not valid JSON ({error}): {_CORRUPT}") from error
        schema = data.get("schema") if isinstance(data, dict) else None
        if schema != SCHEMA or not isinstance(schema, int):
            raise UnsupportedBundleError(
                f"this bundle has schema {schema!r:.99}, this version of ondevice reads {SCHEMA}: "
                "export it again, or update ondevice"
            )
        try:
            manifest: Manifest = _parsed(cls, data, "the file")
            manifest.check()
        except InvalidFieldError as error:
            raise BundleCorruptError(f"bundle.json: {error}: {_CORRUPT}") from error
        return manifest

    def check(self) -> None:
        """Check every number from which an engine computes an address or a size, every token id, and every sha256.

        Raises:
            InvalidFieldError: a field is out of range, or contradicts another.
        """
        check_target(self.target)
        if self.drafter is not None:
            check_drafter(self.drafter, self.target)
        kinds = [heads.kind for heads in self.heads]
        require(len(set(kinds)) == len(kinds), f"heads of the kinds {', '.join(kinds)}")
        for heads in self.heads:
            check_heads(heads, self.target)
        if self.vision is not None:
            check_vision(self.vision, self.target)
        if self.audio is not None:
            check_audio(self.audio, self.target)
        tokens = {"bos_token_id": self.bos_token_id, "pad_token_id": self.pad_token_id}
        tokens |= {f"eos_token_ids[{index}]": token for index, token in enumerate(self.eos_token_ids)}
        for name, token in tokens.items():
            if token is not None:
                check_number(name, token, self.target.vocab_size - 1, least=0)
        for name in self.special_tokens:
            require(name in SPECIAL_TOKENS, f"special_tokens has the unknown name {name!r:.99}")
        for name, entry in self.files.items():
            check_number(f"size of {name!r:.99}", entry.size, 1 << 62)
            hexadecimal = re.fullmatch("[0-9a-f]{64}", entry.sha256)
            require(hexadecimal is not None, f"sha256 of {name!r:.99} is {entry.sha256!r:.99}")

    def check_tensors(self) -> None:
        """Check every tensor of the tables against the configuration and the sizes of the files.

        The simd engine calls this before it reads any weights, the exporter before it renames a finished bundle to its
        final name.

        Raises:
            BundleCorruptError: a tensor is missing, unknown, of the wrong shape or format, or outside its file.
        """
        expected: dict[str, Shapes] = {self.target.graph: target_shapes(self.target)}
        try:
            if self.drafter is not None:
                expected[self.drafter.graph] = drafter_shapes(self.drafter, self.target)
            expected |= {heads.graph: heads_shapes(heads, self.target) for heads in self.heads}
            if self.vision is not None:
                expected[self.vision.graph] = vision_shapes(self.vision, self.target)
            if self.audio is not None:
                expected[self.audio.graph] = audio_shapes(self.audio, self.target)
            parts = (self.target, self.drafter, *self.heads, self.vision, self.audio)
            models = sum(part is not None for part in parts)
            require(len(expected) == models, "two models have one graph")
            check_tables(self.tensors, expected, {name: entry.size for name, entry in self.files.items()})
        except InvalidFieldError as error:
            raise BundleCorruptError(f"bundle.json: {error}: {_CORRUPT}") from error


def _fields(manifest: Manifest) -> dict[str, Any]:
    """All fields of `bundle.json`. Towers, an MTP layer, special tokens and a GGUF file's facts are left out where they
    are absent.
    """
    data = dataclasses.asdict(manifest)
    gguf = ("file", "sha256", "types")
    data["sources"] = {
        part: {name: value for name, value in source.items() if value is not None or name not in gguf}
        for part, source in data["sources"].items()
    }
    if data["target"]["mtp"] is None:
        del data["target"]["mtp"]
    optional = ("vision", "audio", "special_tokens")
    return {name: value for name, value in data.items() if value or name not in optional}


LINE = 118
"""Most characters of a line of `bundle.json` that holds a whole object or list."""


def _text_of(value: Any, indent: str = "") -> str:
    """The JSON text of a value, with one line for every list of numbers and for what fits into a line."""
    line, inner = json.dumps(value), indent + "  "
    is_numbers = isinstance(value, list | tuple) and all(isinstance(each, float) for each in value)
    fits = bool(indent) and len(indent) + len(line) <= LINE
    if is_numbers or fits or not value or not isinstance(value, dict | list | tuple):
        return line
    if isinstance(value, dict):
        parts, ends = [f"{json.dumps(name)}: {_text_of(each, inner)}" for name, each in value.items()], "{}"
    else:
        parts, ends = [_text_of(each, inner) for each in value], "[]"
    return f"{ends[0]}\n" + ",\n".join(inner + part for part in parts) + f"\n{indent}{ends[1]}"


def _table_json(graph: str, table: TensorTable) -> str:
    """The JSON text of a table with one line per tensor; fields with default values are left out."""
    lines = [f"{json.dumps(name)}: {json.dumps(_without_defaults(each))}" for name, each in table.tensors.items()]
    tensors = ",\n        ".join(lines)
    return (
        f'    {json.dumps(graph)}: {{\n      "file": {json.dumps(table.file)},\n'
        f'      "tensors": {{\n        {tensors}\n      }}\n    }}'
    )


def _without_defaults(tensor: Tensor) -> dict[str, Any]:
    default = {each.name: each.default for each in dataclasses.fields(tensor)}
    return {name: value for name, value in dataclasses.asdict(tensor).items() if value != default[name]}


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The dict of a JSON object.

    Raises:
        ValueError: a name is duplicated, of which Python's reader would keep the last value.
    """
    made: dict[str, Any] = {}
    for name, value in pairs:
        if name in made:
            raise ValueError(f"{name!r:.99} stands there twice")
        made[name] = value
    return made


_hints = cache(get_type_hints)


def _parsed(hint: Any, value: Any, name: str) -> Any:
    """A parsed JSON value as an instance of the type `hint`.

    Args:
        hint: a dataclass, a union of dataclasses that differ in their field `type`, `X | None`, `tuple[X, ...]`,
            `dict[K, V]`, a `Literal`, or a plain type.
        value: the parsed JSON value.
        name: what error messages call the value.

    Raises:
        InvalidFieldError: the value has another type, or its fields are not those of the dataclass.
    """
    kind = get_origin(hint)
    if kind is UnionType:
        first, *others = get_args(hint)
        if others == [type(None)]:
            return None if value is None else _parsed(first, value, name)
        said = value.get("type") if isinstance(value, dict) else None
        found = next((each for each in (first, *others) if each.type == said), None)
        require(found is not None, f"{name} has the type {said!r:.99}")
        return _parsed(found, value, name)
    made: Any = hint
    if dataclasses.is_dataclass(hint):
        require(isinstance(value, dict), f"{name} is {value!r:.99}")
        fields = {each.name: each for each in dataclasses.fields(hint)}
        for unknown in value.keys() - fields.keys():
            raise InvalidFieldError(f"{name} has the unknown field {unknown!r:.99}")
        for field_name, each in fields.items():
            optional = (each.default, each.default_factory) != (dataclasses.MISSING, dataclasses.MISSING)
            require(field_name in value or optional, f"{name} has no {field_name}")
        hints = _hints(made)
        return made(**{each: _parsed(hints[each], inner, each) for each, inner in value.items()})
    if kind is tuple:
        require(isinstance(value, list), f"{name} is {value!r:.99}")
        return tuple(_parsed(get_args(hint)[0], each, name) for each in value)
    if kind is dict:
        require(isinstance(value, dict), f"{name} is {value!r:.99}")
        key, inner = get_args(hint)
        return {_parsed(key, each, name): _parsed(inner, value[each], f"{each!r:.99} of {name}") for each in value}
    known = value in get_args(hint) if kind is Literal else isinstance(value, hint)
    require(known and (hint is bool or not isinstance(value, bool)), f"{name} is {value!r:.99}")
    return value
