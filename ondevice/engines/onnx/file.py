"""Reads an ONNX file into nodes and tensors, without the onnx package: the few fields that an engine needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ondevice.engines.agreement import Interface, Shape
from ondevice.engines.onnx.protobuf import MalformedError, Message
from ondevice.errors import BundleCorruptError

Bytes = NDArray[np.uint8]

Parsed = TypeVar("Parsed")

_DTYPES: dict[int, type[np.generic]] = {
    1: np.float32, 2: np.uint8, 3: np.int8, 6: np.int32, 7: np.int64, 9: np.bool_, 10: np.float16, 11: np.float64,
    16: np.uint16,
}  # fmt: skip
"""onnx.TensorProto.DataType; the bits of bfloat16, which numpy lacks, are uint16."""

_EXTERNAL = 1
"""onnx.TensorProto.DataLocation"""

_FLOAT, _INT, _STRING, _INTS = 1, 2, 3, 7
"""onnx.AttributeProto.AttributeType"""

MOST_BYTES = 1 << 24
"""Largest graph file that is read: weights lie beside it, so real ones have a few hundred kilobytes."""

MOST_DIMENSIONS = 8
"""Of a tensor: real ones have up to three, and numpy has a limit too."""


@dataclass(frozen=True)
class Node:
    op: str
    """The operator, with its domain where that is not ONNX's own: `com.microsoft.MatMulNBits`."""
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, Any]


@dataclass(frozen=True)
class Graph:
    """A graph whose values are names; the empty name stands for an input that is left out."""

    nodes: tuple[Node, ...]
    inputs: dict[str, Shape]
    outputs: dict[str, Shape]
    tensors: dict[str, NDArray[Any]]
    opsets: dict[str, int]
    """Version of the operators of each domain; ONNX's own domain is empty."""
    producers: dict[str, Node] = field(default_factory=dict)

    @property
    def interface(self) -> Interface:
        return Interface(self.inputs, self.outputs)


def read_graph(path: Path, external: Callable[[str], Bytes]) -> Graph:
    """Read an ONNX file.

    Args:
        path: of the file.
        external: answers a data file's name with its bytes; raises BundleError where the bundle has none.

    Raises:
        BundleCorruptError: not an ONNX file, or a tensor that its data file has no room for.
    """
    return _read(path, lambda model: _graph(model, external))


def read_nodes(path: Path) -> tuple[Node, ...]:
    """The nodes of an ONNX file alone, whatever its tensors are.

    Raises:
        BundleCorruptError: not an ONNX file.
    """
    return _read(path, lambda model: tuple(_node(node) for node in model.message(7).messages(1)))


def _read(path: Path, parse: Callable[[Message], Parsed]) -> Parsed:
    try:
        if path.stat().st_size > MOST_BYTES:
            raise MalformedError(f"more than {MOST_BYTES} bytes")
        return parse(Message(memoryview(path.read_bytes())))
    except MalformedError as error:
        raise BundleCorruptError(f"{path} is not a well-formed ONNX file ({error}): export the bundle again") from error
    except OSError as error:
        raise BundleCorruptError(f"{path} cannot be read ({error.strerror})") from error


def _graph(model: Message, external: Callable[[str], Bytes]) -> Graph:
    graph = model.message(7)
    nodes = tuple(_node(node) for node in graph.messages(1))
    producers = _producers(nodes)
    tensors: dict[str, NDArray[Any]] = {}
    for tensor in graph.messages(5):
        name = tensor.string(8)
        if name in tensors or name in producers:
            raise MalformedError(f"two tensors are called {name!r}")
        tensors[name] = _tensor(tensor, name, external)
    inputs, outputs = (dict(_value(value) for value in graph.messages(number)) for number in (11, 12))
    opsets = {_domain(opset.string(1)): opset.integer(2) for opset in model.messages(8)}
    return Graph(nodes, inputs, outputs, tensors, opsets, producers)


def _producers(nodes: Sequence[Node]) -> dict[str, Node]:
    """The node that writes each value.

    Nodes must stand in an order in which they can run, as ONNX demands: a reader that walks from a value to its
    producer, and from there on, then always comes to an end.
    """
    written = {output for node in nodes for output in node.outputs}
    producers: dict[str, Node] = {}
    for node in nodes:
        for value in filter(None, node.inputs):
            if value in written and value not in producers:
                raise MalformedError(f"{value!r} is read before a node has written it")
        for output in filter(None, node.outputs):
            if output in producers:
                raise MalformedError(f"two nodes write {output!r}")
            producers[output] = node
    return producers


def _value(message: Message) -> tuple[str, Shape]:
    """The name and shape of an input or output."""
    dimensions = message.message(2).message(1).message(2).messages(1)
    sizes = [dimension.integer(1, -1) for dimension in dimensions]
    return message.string(1), tuple(size if size >= 0 else None for size in sizes)


def _node(message: Message) -> Node:
    domain, op = _domain(message.string(7)), message.string(4)
    attributes = dict(_attribute(attribute) for attribute in message.messages(5))
    return Node(f"{domain}.{op}" if domain else op, tuple(message.strings(1)), tuple(message.strings(2)), attributes)


def _domain(name: str) -> str:
    """ONNX's own operators have two names of their domain."""
    return "" if name == "ai.onnx" else name


def _attribute(message: Message) -> tuple[str, Any]:
    """The name and value of an attribute; None for the value of a type that no engine reads."""
    kind = message.integer(20)
    readers: dict[int, Callable[[], Any]] = {
        _FLOAT: lambda: message.floating(2),
        _INT: lambda: message.integer(3),
        _STRING: lambda: message.string(4),
        _INTS: lambda: tuple(message.integers(8)),
    }
    reader = readers.get(kind)
    return message.string(1), reader() if reader else None


def _tensor(message: Message, name: str, external: Callable[[str], Bytes]) -> NDArray[Any]:
    """A tensor as an array: a view of the mapped data file where it lies there."""
    shape = tuple(message.integers(1))
    dtype = _DTYPES.get(message.integer(2))
    if dtype is None or len(shape) > MOST_DIMENSIONS or any(size < 0 for size in shape):
        raise MalformedError(f"tensor {name!r} has an unknown type or shape")
    size = math.prod(shape) * np.dtype(dtype).itemsize
    data = _external_bytes(message, name, size, external) if message.integer(14) == _EXTERNAL else _inline(message)
    if len(data) != size:
        raise MalformedError(f"tensor {name!r} has {len(data)} bytes instead of {size}")
    array = np.frombuffer(data, dtype)
    if not array.flags.aligned:
        raise MalformedError(f"tensor {name!r} lies at an odd address")
    return array.reshape(shape)


def _inline(message: Message) -> Bytes:
    """The bytes of a tensor inside the graph file, copied, because a field may begin at an odd address."""
    if message.integers(7):
        return np.array(message.integers(7), np.int64).view(np.uint8)
    found = message.bytes(9) or message.bytes(4)
    return np.array(found[-1], np.uint8) if found else np.zeros(0, np.uint8)


def _external_bytes(message: Message, name: str, size: int, external: Callable[[str], Bytes]) -> Bytes:
    entries = {entry.string(1): entry.string(2) for entry in message.messages(13)}
    try:
        offset = int(entries.get("offset", "0"))
        length = int(entries.get("length", str(size)))
    except ValueError as error:
        raise MalformedError(f"tensor {name!r} lies at {entries.get('offset')!r}") from error
    data = external(entries.get("location", ""))
    if length != size or not 0 <= offset <= len(data) - size:
        raise MalformedError(f"tensor {name!r} lies outside its data file")
    return data[offset : offset + size]
