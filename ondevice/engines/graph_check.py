"""Checks an ONNX graph before ONNX Runtime opens it, and compares its inputs and outputs with the configuration.

The graph may come from an untrusted source. ONNX Runtime, from 1.25 on, refuses weights outside the bundle's directory
or beyond the end of their file, and attributes that an operator does not have. Only what it lets through is checked
here: it takes memory in proportion to sizes that a graph merely declares, before it can be asked for the graph's inputs
and outputs; it ends the process at some attributes; it runs operators along other axes, with which drafts change the
text. `test_graph_check.py` opens a graph for each of these without the check. Engines size their buffers by the
configuration in `bundle.json`, so the graph must agree with it.

The file is read with the small protobuf reader at the end: a runtime without the package onnx has no other.

Memory is limited at declared sizes only: inputs, outputs, initialisers, and the constants that shapes are made of. A
chain of permitted nodes can still compute a large tensor.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Set
from pathlib import Path

from ondevice.bundle_format import graph_io
from ondevice.bundle_format.interfaces import CACHE_ROWS, OPEN, Interface, TensorSignature
from ondevice.bundle_format.manifest import Manifest
from ondevice.errors import BundleCorruptError

MAX_PADDING = 1 << 10
"""Most rows that a graph adds to a tensor: those of a block of the audio tower."""

MAX_BYTES = 1 << 24
"""Largest graph file that is read, in bytes. Weights are in data files, so real ones have a few hundred kilobytes."""

_FLOAT, _INT, _STRING, _INTS = 1, 2, 3, 7
"""Values of onnx.AttributeProto.AttributeType that exported graphs use."""

_AXES = {"RMSNormalization": -1, "Softmax": -1, "TensorScatter": -2}
"""The attribute `axis` of operators that would otherwise mix rows."""

_GRAPH, _FUNCTIONS = 7, 25
"""Fields of onnx.ModelProto."""

_NODES, _INITIALISERS, _INPUTS, _OUTPUTS, _VALUES, _SPARSE = 1, 5, 11, 12, 13, 15
"""Fields of onnx.GraphProto."""

_RAW, _PLACE, _IS_EXTERNAL = 9, 13, 14
"""Fields of onnx.TensorProto."""

_TYPES = {1: "float32", 2: "uint8", 3: "int8", 7: "int64", 9: "bool", 10: "float16", 16: "bfloat16"}
"""Values of onnx.TensorProto.DataType that exported graphs use."""

_MAX_DIMENSIONS = 8
"""Most dimensions of an initialiser, and numbers of a shape, which are multiplied here; exported ones have four."""


def check_graph(path: Path, manifest: Manifest, expected: Interface) -> None:
    """Check a graph's inputs, outputs and nodes, and the sizes of its weights. The graph is not run.

    `expected` is the interface that follows from the configuration; the manifest lists the data files and their sizes.

    Raises:
        BundleCorruptError: the file cannot be read, is not an ONNX file, holds something that no exported graph has,
            or has other inputs or outputs.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise MalformedError(f"more than {MAX_BYTES} bytes")
        model = ProtobufMessage(memoryview(path.read_bytes()))
        graph = model.message(_GRAPH)
        if model.bytes(_FUNCTIONS) or graph.bytes(_SPARSE):
            raise MalformedError("it has functions or sparse weights")
        found = Interface(_tensors(graph, _INPUTS), _tensors(graph, _OUTPUTS))
        check_interface(path.name, found, expected)
        constants = _Constants(manifest, expected)
        for tensor in graph.messages(_INITIALISERS):
            constants.add(tensor)
        constants.check_names(found.inputs.keys(), {value.string(1) for value in graph.messages(_VALUES)})
        for node in graph.messages(_NODES):
            _check_node(node, constants)
    except MalformedError as error:
        raise BundleCorruptError(f"{path} is not a well-formed graph ({error}): export the bundle again") from error
    except OSError as error:
        raise BundleCorruptError(f"{path} cannot be read ({error.strerror})") from error


def check_interface(graph: str, found: Interface, expected: Interface) -> None:
    """Compare the inputs and outputs of a graph, of which `graph` is the file name, with the expected ones.

    Raises:
        BundleCorruptError: an input or output is missing, unknown, or has another element type or shape.
    """
    for there, here in zip(found, expected, strict=True):
        for name in sorted(there.keys() | here.keys()):
            expects = here[name].unnamed() if name in here else None
            if there.get(name) == expects:
                continue
            if name in there and name in here:
                difference = f"{name} is {there[name]!s:.99}, bundle.json makes it {expects}"
            else:
                difference = f"{name!r:.99} is in {'the graph' if name in there else 'bundle.json'} alone"
            raise BundleCorruptError(f"bundle.json and {graph} disagree ({difference}): export the bundle again")


def _tensors(graph: ProtobufMessage, field: int) -> dict[str, TensorSignature]:
    """The element types and shapes of a field of onnx.ValueInfoProto by name.

    Raises:
        MalformedError: a name occurs twice, or a value is not a tensor.
    """
    found: dict[str, TensorSignature] = {}
    for value in graph.messages(field):
        name, kind = value.string(1), value.message(2)
        if name in found or kind.fields != {1}:
            raise MalformedError(f"{name!r:.99} occurs twice or is not a tensor")
        tensor = kind.message(1)
        dimensions = tensor.message(2).messages(1)
        sizes = (dimension.integer(1) if 1 in dimension.fields else OPEN for dimension in dimensions)
        found[name] = TensorSignature(_type(tensor.integer(1)), tuple(sizes))
    return found


def _type(number: int) -> str:
    return _TYPES.get(number, f"type {number}")


class _Constants:
    """The initialisers of a graph.

    Attributes:
        numbers: the values of the int64 ones in the graph file itself, such as shapes, by name.
    """

    def __init__(self, manifest: Manifest, expected: Interface) -> None:
        self.numbers: dict[str, tuple[int, ...]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        files = {table.file for table in manifest.tensors.values()}
        self._most = sum(manifest.files[file].size for file in files)
        self._vocab_size = manifest.target.vocab_size
        models = [model for model in (manifest.target, manifest.drafter) if model is not None]
        self._heads = max(2, *(own.heads for model in models for own in model.attention))
        self._outputs = [tensor.shape for tensor in expected.outputs.values()]

    def add(self, tensor: ProtobufMessage) -> None:
        """Check an initialiser (onnx.TensorProto), and keep its shape, and its values if they may become a shape.

        No exported tensor has as many elements as the data files have bytes, and no exported shape as large a number.

        Raises:
            MalformedError: its name occurs twice, its type is unknown, it or a number in it is larger than the data
                files, or it is not clear whether its values are in the graph file.
        """
        name, dtype, shape = tensor.string(8), _type(tensor.integer(2)), tensor.integers(1)
        is_external = bool(tensor.bytes(_PLACE))
        if name in self._shapes or dtype not in _TYPES.values() or tensor.integer(_IS_EXTERNAL) != is_external:
            raise MalformedError(f"{name!r:.99} occurs twice, or is of an unknown type or place")
        if len(shape) > _MAX_DIMENSIONS or abs(math.prod(shape)) > self._most:
            raise MalformedError(f"{name!r:.99} is larger than the data files")
        self._shapes[name] = shape
        if dtype != "int64" or is_external:  # ONNX Runtime makes no shape of external data
            return
        content = tensor.bytes(_RAW)
        if len(content) != 1 or len(content[0]) % 8:
            raise MalformedError(f"{name!r:.99} has no values, or part of a number")
        self.numbers[name] = tuple(number for (number,) in struct.iter_unpack("<q", content[0]))
        if any(abs(number) > self._most for number in self.numbers[name]):
            raise MalformedError(f"{name!r:.99} has a number above {self._most}")

    def check_names(self, inputs: Set[str], values: Set[str]) -> None:
        """Check that no input has the name of an initialiser, and that other values with a declared shape have one.

        ONNX Runtime believes the declared shape of a node's output, and takes an input's value for an initialiser's.

        Raises:
            MalformedError: an input is an initialiser, or a value is not one.
        """
        for name in inputs & self._shapes.keys():
            raise MalformedError(f"the input {name} is an initialiser too")
        for name in values - self._shapes.keys():
            raise MalformedError(f"{name!r:.99} has a shape and is not an initialiser")

    def check_growth(self, op: str, inputs: list[str]) -> None:
        """Check a Range, Expand or Pad node: their outputs are as large as the numbers in their inputs say.

        Exported graphs expand one number, token ids to the shape of an output, and masks by query heads.

        Raises:
            MalformedError: a Range does not count the vocabulary, an Expand has no constant shape or one too large, or
                a Pad no constant sizes of which none is above MAX_PADDING.
        """
        numbers = [self.numbers.get(name) for name in inputs]
        if op == "Range" and numbers != [(0,), (self._vocab_size,), (1,)]:
            raise MalformedError("a Range does not count the vocabulary")
        if op == "Pad" and (len(numbers) != 2 or numbers[1] is None or max(numbers[1]) > MAX_PADDING):
            raise MalformedError(f"a Pad has no constant sizes, or one above {MAX_PADDING}")
        if op == "Expand":
            shape = numbers[1] if len(numbers) == 2 else None
            if shape is None or len(shape) > _MAX_DIMENSIONS or abs(math.prod(shape)) > self._most_of(inputs[0], shape):
                raise MalformedError("an Expand has no constant shape or one too large")

    def _most_of(self, name: str, shape: tuple[int, ...]) -> int:
        """Most elements of the shape that this input of an Expand may get."""
        one = self._shapes.get(name) in ((), (1,))
        return self._most if one or shape in self._outputs else self._heads


def _check_node(node: ProtobufMessage, constants: _Constants) -> None:
    """Refuse a node that ONNX Runtime would accept although it is harmful.

    - An operator that no exported graph has.
    - A head count outside 1..2**31 - 1: ONNX Runtime 1.25 divides by it in 32 bits, and a zero ends the process.
    - A Split into another number of parts than it has outputs: with fewer, ONNX Runtime ends the process, and with a
      large number it takes 8 bytes for each.
    - A TensorScatter without the input `write_index`: ONNX Runtime then writes at row 0, so rejected draft rows
      overwrite committed ones and change the text.
    - An axis of `_AXES` other than exported: results of a row would depend on other rows, so drafts change the text.
    - Attributes that hold a graph or tensors, which no other check would see. ONNX Runtime does not check those whose
      name begins with two underscores; a graph in one ends the process of 1.25, and takes memory in later versions.
    - A Range, Expand or Pad of any size: see `_Constants.check_growth`.

    Raises:
        MalformedError: the node has one of these.
    """
    op, inputs = node.string(4), node.strings(1)
    if op not in graph_io.OPERATORS.get(node.string(7), ()):
        raise MalformedError(f"{op!r:.99} is not an operator of exported graphs")
    constants.check_growth(op, inputs)
    if op == "TensorScatter" and not {graph_io.write_index(kind) for kind in CACHE_ROWS}.intersection(inputs[2:]):
        raise MalformedError("a TensorScatter has no write_index")
    for attribute in node.messages(5):
        name, kind = attribute.string(1), attribute.integer(20)
        if kind not in (_FLOAT, _INT, _STRING, _INTS):
            raise MalformedError(f"{name!r:.99} of {op} is of an unknown type")
        if name == "num_outputs" and attribute.integer(3) != len(node.strings(2)):
            raise MalformedError(f"{name} of {op} is {attribute.integer(3)}")
        if name == "axis" and attribute.integer(3) != _AXES.get(op, attribute.integer(3)):
            raise MalformedError(f"{name} of {op} is {attribute.integer(3)}")
        if name in ("q_num_heads", "kv_num_heads", "num_heads") and not (
            kind == _INT and 0 < attribute.integer(3) < 1 << 31
        ):
            raise MalformedError(f"{name} of {op} is {attribute.integer(3)}")


# The protobuf wire format, as far as the checks need it. Every length is checked against the bytes that are left.


VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
"""Wire types: the three lowest bits of a field's key."""


class MalformedError(ValueError):
    """The file is not valid protobuf, or holds something that no exported graph has."""


class ProtobufMessage:
    """The fields of one protobuf message by number. A field's values are in the order of the file.

    Every method raises MalformedError if the bytes are not valid or a field has another type.
    """

    def __init__(self, data: memoryview) -> None:
        self._fields: dict[int, list[int | memoryview | None]] = {}
        at = 0
        while at < len(data):
            key, at = varint(data, at)
            value, at = _value(data, at, key & 7)
            self._fields.setdefault(key >> 3, []).append(value)

    @property
    def fields(self) -> set[int]:
        """The numbers of all fields that have a value."""
        return set(self._fields)

    def integer(self, number: int) -> int:
        """The last value of an int64 field, or 0 if there is none."""
        return (self.integers(number) or (0,))[-1]

    def integers(self, number: int) -> tuple[int, ...]:
        """All values of an int64 field that is not packed."""
        found = []
        for value in self._fields.get(number, []):
            if not isinstance(value, int):
                raise MalformedError(f"field {number} is not a number")
            found.append(value - 2**64 if value >= 2**63 else value)
        return tuple(found)

    def bytes(self, number: int) -> list[memoryview]:
        """All values of a field of byte strings."""
        found = []
        for value in self._fields.get(number, []):
            if not isinstance(value, memoryview):
                raise MalformedError(f"field {number} is a number")
            found.append(value)
        return found

    def messages(self, number: int) -> Iterator[ProtobufMessage]:
        return (ProtobufMessage(value) for value in self.bytes(number))

    def message(self, number: int) -> ProtobufMessage:
        """The one message of a field. A reader that follows the specification would merge several."""
        found = self.bytes(number)
        if len(found) != 1:
            raise MalformedError(f"field {number} has {len(found)} messages")
        return ProtobufMessage(found[0])

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


def _value(data: memoryview, at: int, kind: int) -> tuple[int | memoryview | None, int]:
    """Read the value of wire type `kind` at `at`; returns it, None for one of fixed width, and the offset after it."""
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
    return (data[at : at + size] if kind == BYTES else None), at + size
