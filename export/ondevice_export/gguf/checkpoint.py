"""A GGUF file as a checkpoint: a configuration and tensors as the hub has them.

What the conversion of llama.cpp did is undone as rows are read: names, and the order of the rows of queries and keys.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ondevice.arrays import Float32Array
from ondevice.bundle import GGUF, GGUF_PART, TOKENIZER
from ondevice.bundle_format.weight_format import INT4, INT4_AFFINE, INT4_TABLE, INT8, MXFP4, WeightFormat
from ondevice.errors import CheckpointError
from ondevice_export.checkpoint.directory import FilesCheckpoint, joined
from ondevice_export.checkpoint.json_fields import JsonFields
from ondevice_export.checkpoint.stacks import RowRange, stack_experts
from ondevice_export.gguf.architectures import DIVISORS, LONG_DIVISORS, Metadata, find_architecture
from ondevice_export.gguf.blocks import Blocks, TensorType, read_blocks, to_float32
from ondevice_export.gguf.file import GgufFile, GgufTensor
from ondevice_export.gguf.tokenizer import Vocabulary, make_tokenizer
from ondevice_export.quantize import BLOCK

_KEPT = {
    "Q4_0": INT4, "Q4_1": INT4_AFFINE, "Q4_K": INT4_AFFINE, "IQ4_NL": INT4_TABLE, "IQ4_XS": INT4_TABLE, "Q5_0": INT8,
    "Q8_0": INT8, "MXFP4": MXFP4,
}  # fmt: skip
"""Types whose blocks a bundle stores as they are, and their format there. Only Q4_K and IQ4_XS lose something: the
products of their scales are rounded from 17 bits to fp16; and MXFP4 where a scale is below 2**-24. The others have no
format of their own and become int8 (Q6_K has a scale for every 16 weights, Q5_1 and Q5_K have minimums)."""


class GgufCheckpoint(FilesCheckpoint[GgufFile, GgufTensor]):
    """The model of a GGUF file, or of the parts that a large one was split into.

    Attributes:
        path: the file, or its first part.
        origin: what error messages call the configuration.
        metadata: all metadata fields.
        config: the configuration in the spelling of the hub's `config.json`.
        vocabulary: its tokens; None if the file has none.
    """

    def __init__(self, path: Path) -> None:
        """
        Raises:
            CheckpointError: a file is missing or damaged, or its architecture or a tensor's type is not read.
        """
        self.path, *others = parts(path)
        super().__init__(self.path)
        self.origin = str(self.path)
        try:
            found = self._open([self.path, *others])
            self.metadata = self._files[0].metadata
            entries = {name: entry for name, (_, entry) in found.items()}
            divisors = self._divisors(found, DIVISORS), self._divisors(found, (LONG_DIVISORS,))
            architecture = self.metadata.get("general.architecture")
            self._architecture = find_architecture(self.metadata, self.origin)
            described = Metadata(self.metadata, entries, divisors, self.origin)
            self.config = self._architecture.config(described)
            named: dict[str, tuple[GgufFile, GgufTensor]] = {}
            for name, place in found.items():
                hub_name = self._architecture.hub_name(name)
                if described.drafts(name):
                    hub_name = self._architecture.mtp_name(name) if described.drafting == 1 else None
                    if hub_name is not None:
                        named[hub_name] = place
                    continue
                if hub_name is None and name not in (*DIVISORS, LONG_DIVISORS):
                    raise CheckpointError(f"{self.origin}: tensor {name} has no place in a {architecture} model")
                if hub_name is not None:
                    named[hub_name] = place
            self._tensors = stack_experts(named, self.origin)
            self.vocabulary = None
            if "tokenizer.ggml.tokens" in self.metadata:
                self.vocabulary = Vocabulary(self.metadata, self.config["vocab_size"], self.origin)
                self.config |= self._token_ids(self.vocabulary)
        except BaseException:
            self.close()
            raise

    def kind(self, name: str) -> TensorType:
        """The type of a tensor in the file; of experts whose gate and up have different types, that of gate."""
        return self._find(name).parts[0].place.kind

    def dtype(self, name: str) -> str:
        return self.kind(name).name

    def types(self) -> dict[str, int]:
        """The number of the file's tensors of each type."""
        places = {part.place.name: part.place for stack in self._tensors.values() for part in stack.parts}
        return dict(Counter(place.kind.name for place in places.values()))

    def kept_format(self, name: str) -> WeightFormat | None:
        stack = self._find(name)
        kinds = {part.place.kind.name for part in stack.parts}
        if len(kinds) != 1 or (stack.columns is not None and stack.shape[-1] % BLOCK):
            return None
        return _KEPT.get(kinds.pop())

    def kept_blocks(
        self, name: str, start: int, stop: int
    ) -> tuple[NDArray[np.uint8], Float32Array, Float32Array | None]:
        blocks, form = self.blocks(name, start, stop), _KEPT[self.kind(name).name]
        codes, cut = blocks.codes.reshape(stop - start, -1), self._find(name).cut
        factors = self._factors(name, start, stop)
        minimums = None if blocks.minimums is None else cut(blocks.minimums * factors, BLOCK)
        return cut(codes + np.uint8(form.zero - blocks.zero)), cut(blocks.scales * factors, BLOCK), minimums

    def write_text_files(self, directory: Path, *, tokenizer: bool) -> None:
        """Write what a checkpoint of the hub has beside its weights: tokenizer and chat template.

        Raises:
            CheckpointError: the vocabulary is of a kind that is not read, or damaged.
        """
        configured: dict[str, object] = {}
        if self.vocabulary is not None:
            configured["add_bos_token"] = self.vocabulary.add_bos
            if tokenizer:
                (directory / TOKENIZER).write_text(make_tokenizer(self.vocabulary), "utf-8")
        names = {"default": "tokenizer.chat_template", "tool_use": "tokenizer.chat_template.tool_use"}
        named = {name: text for name, key in names.items() if isinstance(text := self.metadata.get(key), str)}
        configured["chat_template"] = [{"name": name, "template": template} for name, template in named.items()]
        (directory / "tokenizer_config.json").write_text(json.dumps(configured), "utf-8")

    def sha256(self) -> str:
        """The sha256 of the file in hexadecimal; of several parts, of their hashes in order."""
        digests = []
        for file in self._files:
            with file.path.open("rb") as content:
                digests.append(hashlib.file_digest(content, "sha256"))
        whole = hashlib.sha256(b"".join(each.digest() for each in digests))
        return (digests[0] if len(digests) == 1 else whole).hexdigest()

    def raw_rows(self, name: str, start: int, stop: int) -> NDArray[np.uint8]:
        return joined([self._raw_rows(name, part) for part in self._find(name).between(start, stop)])

    def _raw_rows(self, name: str, part: RowRange[GgufFile, GgufTensor]) -> NDArray[np.uint8]:
        """Rows that lie in one of the file's tensors."""
        order = self._order(name, part.place)
        if order is None:
            return part.file.read_rows(part.place, part.start, part.stop)[:: part.step]
        wanted = order[part.start : part.stop : part.step]
        first = int(wanted.min())
        return part.file.read_rows(part.place, first, int(wanted.max()) + 1)[wanted - first]

    def blocks(self, name: str, start: int, stop: int) -> Blocks:
        """Rows `start` to `stop` of a quantised matrix as codes, scales and minimums."""
        return read_blocks(self.raw_rows(name, start, stop), self.kind(name))

    def rows(self, name: str, start: int, stop: int) -> Float32Array:
        stack = self._find(name)
        return stack.cut(joined([self._rows(name, part) for part in stack.between(start, stop)]))

    def _rows(self, name: str, part: RowRange[GgufFile, GgufTensor]) -> Float32Array:
        return part.scaled(to_float32(self._raw_rows(name, part), part.place.kind))

    def picked_rows(self, name: str, indices: NDArray[np.int64]) -> Float32Array:
        picked = [self.rows(name, int(index), int(index) + 1) for index in indices]
        return np.concatenate(picked) if picked else np.empty((0, self.shape(name)[-1]), np.float32)

    def integers(self, name: str) -> NDArray[np.int64]:
        raise CheckpointError(f"{self.origin}: {name} is {self.dtype(name)}, expected integers")

    def _order(self, name: str, entry: GgufTensor) -> NDArray[np.int64] | None:
        """The file's row for each of the hub's rows; None if they are the same.

        The conversion of Llama puts the two numbers that a rotation turns next to each other in every head of queries
        and keys; the hub has all first ones before all second ones.
        """
        size = self.config["head_dim"]
        turned = name.endswith(("self_attn.q_proj.weight", "self_attn.k_proj.weight"))
        if not self._architecture.interleaved or not turned or entry.rows % size or size % 2:
            return None
        return np.arange(entry.rows).reshape(-1, size // 2, 2).swapaxes(1, 2).reshape(-1)

    def _open(self, paths: list[Path]) -> dict[str, tuple[GgufFile, GgufTensor]]:
        """Open the parts; the tensors by the file's names."""
        found: dict[str, tuple[GgufFile, GgufTensor]] = {}
        for path in paths:
            file = GgufFile(path)
            self._files.append(file)
            count = JsonFields(file.metadata, str(path)).integer("split.count", 1, minimum=0)
            if count not in (0, len(paths)):
                raise CheckpointError(f"{path} is one of {count} parts: give it a name like model-00001-of-00002.gguf")
            for name, entry in file.entries.items():
                if name in found:
                    raise CheckpointError(f"{path} holds {name} a second time")
                found[name] = (file, entry)
        return found

    def _divisors(self, found: Mapping[str, tuple[GgufFile, GgufTensor]], names: Sequence[str]) -> Float32Array | None:
        """The numbers that divide rotary frequencies, if the file has them: its first tensor of these names."""
        name = next((each for each in names if each in found), None)
        if name is None:
            return None
        file, entry = found[name]
        if len(entry.shape) != 1 or math.prod(entry.shape) > 1 << 16:
            raise CheckpointError(f"{self.origin}: {name} has the shape {list(entry.shape)}")
        divisors: Float32Array = to_float32(file.read_rows(entry, 0, 1), entry.kind)[0]
        return divisors

    @staticmethod
    def _token_ids(vocabulary: Vocabulary) -> dict[str, object]:
        ids = {"bos_token_id": vocabulary.id("bos"), "pad_token_id": vocabulary.id("padding")}
        return {**ids, "eos_token_id": vocabulary.ends() or None}


def parts(path: Path) -> list[Path]:
    """All parts of a model that was split into files like `model-00001-of-00003.gguf`, of which `path` is one.

    Raises:
        CheckpointError: a part is missing.
    """
    part = GGUF_PART.fullmatch(path.name)
    if part is None or not 1 <= int(part["count"]) <= 1000:
        return [path]
    name, count = part["name"], part["count"]
    found = [path.with_name(f"{name}-{number:05d}-of-{count}{GGUF}") for number in range(1, int(count) + 1)]
    for each in found:
        if not each.is_file():
            raise CheckpointError(
                f"{each} is missing: a model of {len(found)} files needs all of them in one directory"
            )
    return found
