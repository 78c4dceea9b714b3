"""Builds an ONNX graph: inputs, initialisers, nodes in call order, outputs."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ondevice.bundle_format import graph_io
from ondevice.bundle_format.interfaces import Interface, TensorSignature
from ondevice_export.data_file import Region

CONTRIB = "com.microsoft"
_IR_VERSION = 11
_TYPES = {"float32": ir.DataType.FLOAT, "int64": ir.DataType.INT64, "bool": ir.DataType.BOOL}


class GraphBuilder:
    """One graph under construction; every method that adds a node returns the node's output value.

    Attributes:
        inputs: the graph's inputs by name.
    """

    def __init__(self, name: str, interface: Interface) -> None:
        """
        Args:
            name: name of the graph.
            interface: its inputs and outputs.
        """
        self.name = name
        self.inputs = {each: _value(each, tensor) for each, tensor in interface.inputs.items()}
        self._interface = interface
        self._outputs: list[ir.Value] = []
        self._nodes: list[ir.Node] = []
        self._initializers: dict[str, ir.Value] = {}
        self._scope: list[str] = []

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Prefix the names of the nodes that are added within the context with `name`."""
        self._scope.append(name)
        try:
            yield
        finally:
            self._scope.pop()

    def output(self, name: str, value: ir.Value) -> None:
        """Make a value the output of this name."""
        like = _value(name, self._interface.outputs[name])
        value.name, value.type, value.shape = name, like.type, like.shape
        self._outputs.append(value)

    def op(self, op_type: str, *inputs: ir.Value | None, domain: str = "", **attributes: Any) -> ir.Value:
        """Add a node with one output and return that output."""
        return self.ops(op_type, *inputs, outputs=1, domain=domain, **attributes)[0]

    def ops(
        self, op_type: str, *inputs: ir.Value | None, outputs: int, domain: str = "", **attributes: Any
    ) -> Sequence[ir.Value]:
        """Add a node with several outputs and return them; ValueError for an operator that engines refuse."""
        if op_type not in graph_io.OPERATORS[domain]:
            raise ValueError(f"{op_type} is not one of graph_io.OPERATORS")
        label = "/".join([*self._scope, f"{op_type}_{len(self._nodes)}"])
        node = ir.node(op_type, inputs, attributes=attributes, domain=domain, num_outputs=outputs, name=label)
        for index, value in enumerate(node.outputs):
            value.name = label if index == 0 else f"{label}:{index}"
        self._nodes.append(node)
        return node.outputs

    def constant(self, array: npt.NDArray[Any]) -> ir.Value:
        """A small initialiser, stored in the graph file itself; equal arrays share one initialiser."""
        values = "_".join(map(str, array.reshape(-1)[:4].tolist()))
        name = f"{array.dtype.name}.{'x'.join(map(str, array.shape))}.{values}.{zlib.crc32(array.tobytes()):08x}"
        return self._initializer(ir.Tensor(np.asarray(array, order="C"), name=name))

    def scalar(self, value: float) -> ir.Value:
        return self.constant(np.array(value, np.float32))

    def integers(self, *values: int) -> ir.Value:
        """A constant int64 vector, for shapes and axes."""
        return self.constant(np.array(values, np.int64))

    def indices(self, count: int) -> ir.Value:
        """0 to `count` - 1, int64[count]."""
        zero, end, one = (self.constant(np.array(value, np.int64)) for value in (0, count, 1))
        return self.op("Range", zero, end, one)

    def external(self, name: str, region: Region, dtype: ir.DataType, shape: Sequence[int]) -> ir.Value:
        """An initialiser whose data is a region of an external data file."""
        return self._initializer(
            ir.ExternalTensor(region.location, region.offset, region.nbytes, dtype, shape=ir.Shape(shape), name=name)
        )

    def reshape(self, value: ir.Value, *shape: int) -> ir.Value:
        """Reshape to `shape`; 0 copies the input's dimension at that index, -1 is inferred from the others."""
        return self.op("Reshape", value, self.integers(*shape))

    def silu(self, value: ir.Value) -> ir.Value:
        """x * sigmoid(x)."""
        return self.op("Mul", value, self.op("Sigmoid", value))

    def log_sigmoid(self, x: ir.Value, width: int) -> ir.Value:
        """log(sigmoid(x)), [T, width], as the logarithm of the first of the softmax weights of x and 0.

        ONNX Runtime's `Log` and `Softplus` round the last numbers of a tensor, which fill no vector, in another way
        than those before them, so that a row would depend on others.
        """
        pairs = self.op("Pad", self.reshape(x, -1, width, 1), self.integers(0, 0, 0, 0, 0, 1))
        return self.op("Gather", self.op("LogSoftmax", pairs, axis=-1), self.constant(np.array(0)), axis=-1)

    def model(self, producer_version: str) -> ir.Model:
        """The finished model."""
        graph = ir.Graph(
            list(self.inputs.values()),
            self._outputs,
            nodes=self._nodes,
            initializers=list(self._initializers.values()),
            opset_imports=dict(graph_io.OPSETS),
            name=self.name,
        )
        return ir.Model(graph, ir_version=_IR_VERSION, producer_name="ondevice", producer_version=producer_version)

    def _initializer(self, tensor: ir.TensorProtocol) -> ir.Value:
        name = str(tensor.name)
        known = self._initializers.get(name)
        if known is None:
            known = ir.Value(
                name=name,
                type=ir.TensorType(tensor.dtype),
                shape=ir.Shape(tensor.shape.numpy()),
                const_value=tensor,
            )
            self._initializers[name] = known
        elif not _same(known.const_value, tensor):
            raise ValueError(f"graph {self.name} has two initialisers called {name}")
        return known


def _value(name: str, tensor: TensorSignature) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(_TYPES[tensor.dtype]), shape=ir.Shape(tensor.shape))


def _same(one: ir.TensorProtocol | None, other: ir.TensorProtocol) -> bool:
    if one is None or one.dtype != other.dtype or one.shape != other.shape:
        return False
    if isinstance(one, ir.ExternalTensor) and isinstance(other, ir.ExternalTensor):
        return (one.location, one.offset, one.length) == (other.location, other.offset, other.length)
    return not isinstance(one, ir.ExternalTensor) and one.tobytes() == other.tobytes()
