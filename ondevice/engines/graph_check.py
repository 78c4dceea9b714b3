"""Checks an ONNX graph before ONNX Runtime opens it, and compares its inputs and outputs with the configuration.

The graph may come from an untrusted source. ONNX Runtime reads any file that a graph names for its weights, and does
not check some sizes that crash the process later. Engines size their buffers by the configuration in `bundle.json`, so
the graph must agree with it. `check_graph` reads the file without onnx, with the small protobuf reader at the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from ondevice.bundle_format import graph_io
from ondevice.bundle_format.graph_io import AttentionKind
from ondevice.bundle_format.manifest import Manifest
from ondevice.bundle_format.model_config import DrafterEntry, HeadsEntry, Target
from ondevice.errors import BundleCorruptError

Shape = tuple[int | None, ...]
"""Sizes of a tensor's dimensions; None for a dimension whose size is known at run time only."""

MOST_BYTES = 1 << 24
"""Largest graph file that is read, in bytes. Weights are in data files, so real ones have a few hundred kilobytes."""

_KINDS: tuple[AttentionKind, ...] = ("full", "sliding")
_PARTS: tuple[Literal["key", "value"], ...] = ("key", "value")

_FLOAT, _INT, _STRING, _INTS = 1, 2, 3, 7
"""Values of onnx.AttributeProto.AttributeType that exported graphs use."""

_OF_GRAPHS = (5, 6, 10, 11, 22, 23)
"""Fields of onnx.AttributeProto that hold tensors and graphs."""

_GRAPH, _TRAINING, _FUNCTIONS = 7, 20, 25
"""Fields of onnx.ModelProto."""

_NODES, _INITIALISERS, _SPARSE = 1, 5, 15
"""Fields of onnx.GraphProto."""


class Interface(NamedTuple):
    """The shapes of a graph's inputs and outputs by name."""

    inputs: Mapping[str, Shape]
    outputs: Mapping[str, Shape]


def check_graph(path: Path, manifest: Manifest) -> None:
    """Check the nodes of a graph, and that its weights lie within the bundle's data files. The graph is not run.

    Args:
        path: the ONNX file.
        manifest: lists the data files and their sizes.

    Raises:
        BundleCorruptError: the file cannot be read, is not an ONNX file, or holds something that no exported graph has.
    """
    try:
        if path.stat().st_size > MOST_BYTES:
            raise MalformedError(f"more than {MOST_BYTES} bytes")
        model = Message(memoryview(path.read_bytes()))
        if len(model.bytes(_GRAPH)) != 1:  # ONNX Runtime would merge several
            raise MalformedError("it has no graph, or several")
        graph = model.message(_GRAPH)
        if model.bytes(_FUNCTIONS) or model.bytes(_TRAINING) or graph.bytes(_SPARSE):
            raise MalformedError("it has functions, training steps or sparse weights")
        for node in graph.messages(_NODES):
            _check_node(node)
        data = {table.file: manifest.files[table.file].size for table in manifest.tensors.values()}
        for tensor in graph.messages(_INITIALISERS):
            _check_weights(tensor, data)
    except MalformedError as error:
        raise BundleCorruptError(f"{path} is not a well-formed graph ({error}): export the bundle again") from error
    except OSError as error:
        raise BundleCorruptError(f"{path} cannot be read ({error.strerror})") from error


def check_interface(graph: str, found: Interface, expected: Interface) -> None:
    """Compare the inputs and outputs of a graph with those that follow from the configuration.

    Args:
        graph: file name of the graph, for messages.
        found: the interface of the graph.
        expected: the interface that follows from the configuration.

    Raises:
        BundleCorruptError: an input or output is missing, unknown or has another shape.
    """
    for there, here in zip(found, expected, strict=True):
        for name in sorted(there.keys() ^ here.keys()):
            raise _disagreement(f"{name} is in {'the graph' if name in there else 'bundle.json'} alone", graph)
        for name, shape in here.items():
            if not _fits(there[name], shape):
                raise _disagreement(f"{name} is {_text(there[name])}, bundle.json makes it {_text(shape)}", graph)


def target_interface(target: Target) -> Interface:
    """The inputs and outputs of the target's graph that follow from its configuration."""
    caches = {layer: (1, None, target.layers[layer].kv_width) for layer in target.kv_layers()}
    inputs: dict[str, Shape] = dict.fromkeys((graph_io.TOKEN_IDS, graph_io.POSITIONS, graph_io.WANTED), (None,))
    inputs |= {graph_io.write_index(kind): (1,) for kind in _KINDS}
    inputs |= {graph_io.mask(kind): (None, None) for kind in _KINDS}
    inputs |= {graph_io.past(layer, part): shape for layer, shape in caches.items() for part in _PARTS}
    outputs: dict[str, Shape] = {
        graph_io.LOGITS: (None, target.vocab_size),
        graph_io.HIDDEN: (None, target.hidden_size),
    }
    outputs |= {graph_io.present(layer, part): shape for layer, shape in caches.items() for part in _PARTS}
    return Interface(inputs, outputs)


def drafter_interface(drafter: DrafterEntry, target: Target) -> Interface:
    """The inputs and outputs of the drafter's graph that follow from its configuration."""
    row: Shape = (1, target.hidden_size)
    inputs: dict[str, Shape] = {graph_io.TOKEN_ID: (1,), graph_io.HIDDEN: row, graph_io.POSITION: (1,)}
    for kind in _KINDS:
        cache = (1, None, target.layers[drafter.kv_layer(kind)].kv_width)
        inputs |= {graph_io.mask(kind): (1, None)} | {graph_io.shared(kind, part): cache for part in _PARTS}
    scored: Shape = (drafter.candidates,)
    return Interface(inputs, {graph_io.CANDIDATES: scored, graph_io.LOGITS: scored, graph_io.NEXT_HIDDEN: row})


def heads_interface(heads: HeadsEntry, target: Target) -> Interface:
    """The inputs and outputs of a graph of heads that follow from its configuration."""
    scored: Shape = (heads.offsets, heads.candidates)
    outputs = {graph_io.CANDIDATES: scored, graph_io.LOGITS: scored}
    return Interface({graph_io.HIDDEN: (1, target.hidden_size)}, outputs)


def _check_node(node: Message) -> None:
    """Refuse a node that ONNX Runtime would accept although it is harmful.

    - A head count outside 1..2**31 - 1: ONNX Runtime divides by it in 32 bits, and a zero ends the process.
    - A TensorScatter without the input `write_index`: ONNX Runtime then writes at row 0, so rejected draft rows
      overwrite committed ones and change the text.
    - Attributes that hold a graph or tensors: no other check would see these.

    Raises:
        MalformedError: the node has one of these.
    """
    op = node.string(4)
    if op == "TensorScatter" and not {graph_io.write_index(kind) for kind in _KINDS}.intersection(node.strings(1)[2:]):
        raise MalformedError("a TensorScatter has no write_index")
    for attribute in node.messages(5):
        name, kind = attribute.string(1), attribute.integer(20)
        if kind not in (_FLOAT, _INT, _STRING, _INTS) or any(attribute.bytes(field) for field in _OF_GRAPHS):
            raise MalformedError(f"{name!r:.99} of {op:.99} is of an unknown type")
        if name in ("q_num_heads", "kv_num_heads") and not (kind == _INT and 0 < attribute.integer(3) < 1 << 31):
            raise MalformedError(f"{name} of {op:.99} is {attribute.integer(3)}")


def _check_weights(tensor: Message, data: Mapping[str, int]) -> None:
    """Check that an initialiser with external data lies within one of the bundle's data files.

    Args:
        tensor: the onnx.TensorProto.
        data: data file -> its size in bytes.

    Raises:
        MalformedError: the initialiser names another file, or bytes outside the file.
    """
    entries = [(entry.string(1), entry.string(2)) for entry in tensor.messages(13)]
    if not entries and not tensor.integer(14):
        return
    name, place = tensor.string(8), dict(entries)
    file = place.get("location", "")
    if len(place) != len(entries) or file not in data:
        raise MalformedError(f"the weights of {name!r:.99} lie in {file!r:.99}, which has no tensor table")
    offset, length = place.get("offset", "0"), place.get("length", "")
    numbers = all(number.isascii() and number.isdecimal() and len(number) < 20 for number in (offset, length))
    if not numbers or int(offset) + int(length) > data[file]:
        raise MalformedError(f"the weights of {name!r:.99} lie outside {file}")


def _disagreement(what: str, graph: str) -> BundleCorruptError:
    return BundleCorruptError(f"bundle.json and {graph} disagree ({what}): export the bundle again")


def _fits(found: Shape, expected: Shape) -> bool:
    """Whether shapes agree. None in `found` matches any size: a graph leaves some open, as of caches no layer reads."""
    return len(found) == len(expected) and all(
        size is None or size == known for size, known in zip(found, expected, strict=True)
    )


def _text(shape: Shape) -> str:
    return f"[{', '.join('?' if size is None else str(size) for size in shape)}]"


# The protobuf wire format, as far as the checks need it. Every length is checked against the bytes that are left.


VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
"""Wire types: the three lowest bits of a field's key."""


class MalformedError(ValueError):
    """The file is not valid protobuf, or holds something that no exported graph has."""


class Message:
    """The fields of one protobuf message by number. A field's values are in the order of the file.

    Every method raises MalformedError if the bytes are not valid or a field has another type.
    """

    def __init__(self, data: memoryview) -> None:
        self._fields: dict[int, list[int | memoryview]] = {}
        at = 0
        while at < len(data):
            key, at = varint(data, at)
            value, at = _value(data, at, key & 7)
            self._fields.setdefault(key >> 3, []).append(value)

    def integer(self, number: int, default: int = 0) -> int:
        """The last value of an int64 field, or `default` if there is none."""
        value = self._fields.get(number, [default])[-1]
        if not isinstance(value, int):
            raise MalformedError(f"field {number} is not a number")
        return value - 2**64 if value >= 2**63 else value

    def bytes(self, number: int) -> list[memoryview]:
        """All values of a field of byte strings."""
        found = []
        for value in self._fields.get(number, []):
            if isinstance(value, int):
                raise MalformedError(f"field {number} is a number")
            found.append(value)
        return found

    def messages(self, number: int) -> Iterator[Message]:
        return (Message(value) for value in self.bytes(number))

    def message(self, number: int) -> Message:
        """The last message of a field; an empty one if there is none."""
        found = self.bytes(number)
        return Message(found[-1] if found else memoryview(b""))

    def strings(self, number: int) -> list[str]:
        try:
            return [bytes(value).decode() for value in self.bytes(number)]
        except UnicodeDecodeError as error:
            raise MalformedError(f"field {number} is not UTF-8 text") from error

    def string(self, number: int) -> str:
        """The last string of a field; an empty one if there is none."""
        found = self.strings(number)
        return found[-1] if found else ""


def varint(data: memoryview, at: int) -> tuple[int, int]:
    """Read the unsigned number at `at`, stored in groups of 7 bits; returns it and the offset after it."""
    result = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise MalformedError("the file ends inside a number")
        byte = data[at]
        at += 1
        result |= (byte & 127) << shift
        if byte < 128:
            return result & (2**64 - 1), at
    raise MalformedError("a number has more than ten bytes")


def _value(data: memoryview, at: int, kind: int) -> tuple[int | memoryview, int]:
    """Read the value of wire type `kind` at `at`; returns it and the offset after it."""
    if kind == VARINT:
        return varint(data, at)
    if kind == BYTES:
        size, at = varint(data, at)
    elif kind in (FIXED32, FIXED64):
        size = 4 if kind == FIXED32 else 8
    else:
        raise MalformedError(f"wire type {kind}")
    if size > len(data) - at:
        raise MalformedError("the file ends inside a field")
    part = data[at : at + size]
    return (part if kind == BYTES else int.from_bytes(part, "little")), at + size
