"""Recognises a graph by walking from its outputs to its inputs; every step says which node must stand there.

A graph with anything else in it raises UnsupportedGraphError: no kernel runs on a guess.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ondevice import contract
from ondevice.engines.agreement import disagreement
from ondevice.engines.onnx.file import Graph, Node
from ondevice.engines.simd.graph.model import Floats, Matrix, Table
from ondevice.engines.simd.graph.trained import read_linear, read_rows
from ondevice.engines.simd.unsupported import UnsupportedGraphError
from ondevice.weight_format import IN_GROUPS, WeightFormat

BLOCK = 32
"""Weights that share a scale."""

INT8_ACTIVATIONS = 4
"""`accuracy_level` of a product whose activations may be quantised, as the kernels do."""


def require(condition: bool, reason: str) -> None:
    """Raise UnsupportedGraphError unless `condition` holds."""
    if not condition:
        raise UnsupportedGraphError(reason)


def agree(condition: bool, what: str) -> None:
    """Raise BundleCorruptError unless the graph is what bundle.json says: then no engine may run it."""
    if not condition:
        raise disagreement(what)


class Matcher:
    """Reads the values of one graph as what the exporter makes them.

    Attributes:
        eps: of the RMS norms, which must all have the same; None before the first was read.
    """

    def __init__(self, graph: Graph) -> None:
        require(graph.opsets == contract.OPSETS, f"operators of {_versions(graph.opsets)}")
        self._graph = graph
        self.eps: float | None = None

    def op(self, value: str) -> str:
        """The operator that makes a value; empty for inputs and tensors."""
        node = self._graph.producers.get(value)
        return node.op if node else ""

    def producer(self, value: str) -> Node:
        """The node that makes a value, whatever it is."""
        found = self._graph.producers.get(value)
        if found is None:
            raise UnsupportedGraphError(f"{value or 'a value'} is made by nothing")
        return found

    def node(self, value: str, op: str, inputs: int, output: int | None = None, **attributes: Any) -> Node:
        """The node that makes a value: operator `op` with `inputs` inputs, these attributes and no others.

        The value must be its output of that number; None stands for the one that matters.
        """
        node = self._graph.producers.get(value)
        if node is None or node.op != op:
            raise UnsupportedGraphError(f"{value or 'a value'} is made by {self.op(value) or 'nothing'}, not by {op}")
        given = len(node.inputs)
        while given and not node.inputs[given - 1]:
            given -= 1
        number = _OUTPUT.get(op, 0) if output is None else output
        require(given == inputs and node.outputs.index(value) == number, f"{value}: {op} in an unknown form")
        for name, expected in attributes.items():
            found = node.attributes.get(name)
            require(found == expected, f"{value}: {op} with {name} {found!r} instead of {expected!r}")
        unknown = set(node.attributes) - set(attributes) - _READ_LATER.get(op, set())
        require(not unknown, f"{value}: {op} with {', '.join(sorted(unknown))}")
        return node

    def integer(self, node: Node, name: str, least: int = 1) -> int:
        """An integer attribute of a node, at least `least`."""
        value = node.attributes.get(name)
        if not isinstance(value, int) or not least <= value < 1 << 31:
            raise UnsupportedGraphError(f"{node.outputs[0]}: {node.op} with {name} {value!r}")
        return value

    def expect_input(self, value: str, name: str) -> None:
        """`value` must be the graph's input `name`."""
        require(value == name and name in self._graph.inputs, f"{value} where the input {name} belongs")

    def tensor(self, value: str, dtype: type[np.generic], dimensions: int) -> NDArray[Any]:
        """A tensor of that dtype and number of dimensions."""
        found = self._graph.tensors.get(value)
        if found is None or found.dtype != dtype or found.ndim != dimensions:
            raise UnsupportedGraphError(f"{value} is not a tensor of {dimensions} dimensions of {dtype.__name__}")
        return found

    def found(self, value: str) -> NDArray[Any]:
        """A tensor of any type."""
        tensor = self._graph.tensors.get(value)
        if tensor is None:
            raise UnsupportedGraphError(f"{value} is not a tensor")
        return tensor

    def floats(self, value: str, dimensions: int) -> Floats:
        """A small float32 tensor without NaN and infinities, each of which would make all logits NaN."""
        found: Floats = self.tensor(value, np.float32, dimensions)
        require(bool(np.isfinite(found).all()), f"{value} holds numbers that are not finite")
        return found

    def integers(self, value: str) -> tuple[int, ...]:
        """A vector of int64: shapes and axes."""
        return tuple(int(number) for number in self.tensor(value, np.int64, 1))

    def scalar(self, value: str) -> float:
        """A finite number, alone or in a vector of one."""
        found = self._graph.tensors.get(value)
        if found is None or found.dtype != np.float32 or found.size != 1 or not np.isfinite(found).all():
            raise UnsupportedGraphError(f"{value} is not a single float32")
        return float(found.reshape(-1)[0])

    def times(self, value: str) -> tuple[str, float]:
        """x and the constant of x * constant."""
        node = self.node(value, "Mul", 2)
        return node.inputs[0], self.scalar(node.inputs[1])

    def softcap(self, value: str) -> tuple[str, float | None]:
        """x and c of c * tanh(x / c), or the value itself and None."""
        if self.op(value) != "Mul" or self.op(self.node(value, "Mul", 2).inputs[0]) != "Tanh":
            return value, None
        value, cap = self.times(value)
        value, inverse = self.times(self.node(value, "Tanh", 1).inputs[0])
        require(0 < cap < 1e6 and abs(cap * inverse - 1) < 1e-5, f"a softcap of {cap} after a division by {inverse}")
        return value, cap

    def reshape(self, value: str, *shape: int) -> str:
        """The input of a Reshape to `shape`."""
        node = self.node(value, "Reshape", 2)
        found = self.integers(node.inputs[1])
        require(found == shape, f"{value} is reshaped to {found} instead of {shape}")
        return node.inputs[0]

    def reshaped(self, value: str) -> tuple[str, tuple[int, ...]]:
        """The input and the shape of a Reshape."""
        node = self.node(value, "Reshape", 2)
        return node.inputs[0], self.integers(node.inputs[1])

    def selected(self, value: str) -> str:
        """The value of which `value` holds the wanted rows."""
        node = self.node(value, "Gather", 2, axis=0)
        self.expect_input(node.inputs[1], contract.WANTED)
        return node.inputs[0]

    def norm(self, value: str) -> tuple[str, Floats]:
        """The input and the weight of an RMS norm over the last axis."""
        node = self.node(value, "RMSNormalization", 2, axis=-1)
        eps = node.attributes.get("epsilon", 1e-5)
        self.eps = eps if self.eps is None else self.eps
        sensible = isinstance(eps, float) and 0 < eps < 1
        require(sensible and eps == self.eps, f"{value}: norms with different epsilons")
        return node.inputs[0], self.floats(node.inputs[1], 1)

    def linear(self, value: str) -> tuple[str, Matrix]:
        """x and the quantised matrix of x @ matrix.T."""
        if self.op(value) in ("Mul", "Split"):
            return read_linear(self, value)
        if self.op(value) in ("Gemm", "MatMul"):
            raise UnsupportedGraphError("its weights are not quantised")
        node = self.node(value, "com.microsoft.MatMulNBits", 3, block_size=BLOCK, accuracy_level=INT8_ACTIVATIONS)
        bits, width, rows = (self.integer(node, name) for name in ("bits", "K", "N"))
        found = self._in_groups(value, bits)
        codes = self.tensor(node.inputs[1], np.uint8, 3)
        fits = codes.shape == (rows, width // BLOCK, found.bytes(BLOCK)) and width % BLOCK == 0
        require(fits, f"{value}: shape {codes.shape}")
        scales = self._graph.tensors.get(node.inputs[2])
        shape_fits = scales is not None and scales.dtype == np.float32 and scales.size == rows * width // BLOCK
        if scales is None or not shape_fits:
            raise UnsupportedGraphError(f"{value}: scales that do not fit")
        return node.inputs[0], Matrix(codes.reshape(rows, -1), scales.reshape(rows, width // BLOCK), found)

    def gathered(self, value: str) -> tuple[str, Table]:
        """The ids and the table of table[ids]."""
        if self.op(value) == "Reshape" or (
            self.op(value) == "Cast" and self.op(self.node(value, "Cast", 1, to=_FLOAT).inputs[0]) == "Gather"
        ):
            return read_rows(self, value)
        half = self.op(value) == "Cast"
        if half:
            value = self.node(value, "Cast", 1, to=_FLOAT).inputs[0]
        if self.op(value) == "Gather":
            raise UnsupportedGraphError("its tables are not quantised")
        node = self.node(
            value, "com.microsoft.GatherBlockQuantized", 3, block_size=BLOCK, gather_axis=0, quantize_axis=1
        )
        found = self._in_groups(value, self.integer(node, "bits"))
        codes = self.tensor(node.inputs[0], np.uint8, 2)
        scales = self.tensor(node.inputs[2], np.float16 if half else np.float32, 2)
        groups, rest = divmod(codes.shape[1], found.bytes(BLOCK))
        require(scales.shape == (len(codes), groups) and not rest, f"{value}: scales of another shape than the table's")
        return node.inputs[1], Table(codes, scales, found)

    @staticmethod
    def _in_groups(value: str, bits: int) -> WeightFormat:
        """The format of codes of that many bits with a scale for every 32."""
        found = IN_GROUPS.get(bits)
        if found is None:
            raise UnsupportedGraphError(f"{value}: weights of {bits} bits")
        return found

    def gelu(self, value: str) -> str:
        """The input of a GELU in its tanh form."""
        return self.node(value, "Gelu", 1, approximate="tanh").inputs[0]


def _versions(opsets: Mapping[str, int]) -> str:
    return ", ".join(f"{domain or 'ONNX'} {version}" for domain, version in sorted(opsets.items())) or "no version"


_FLOAT = 1
"""onnx.TensorProto.DataType"""

_OUTPUT = {"TopK": 1}
"""Index of the output that is read, where it is not the first."""

_READ_LATER = {
    "RMSNormalization": {"epsilon"},
    "com.microsoft.MatMulNBits": {"bits", "K", "N"},
    "com.microsoft.GatherBlockQuantized": {"bits"},
    "RotaryEmbedding": {"num_heads"},
    "Attention": {"q_num_heads", "kv_num_heads"},
}
"""Attributes that `node` allows and its caller checks."""
