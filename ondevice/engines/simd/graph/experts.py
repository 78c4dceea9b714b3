"""Reads the experts of a layer: a router, rows that are sorted by expert, and two matrices for each."""

from __future__ import annotations

import numpy as np

from ondevice.engines.simd.graph.matching import Matcher, require
from ondevice.engines.simd.graph.model import Experts, Floats, Matrix

_INT64 = 7
"""onnx.TensorProto.DataType"""


class ExpertsReader:
    """Reads what takes the place of a dense block of width `width`, from its output to the hidden state."""

    def __init__(self, matcher: Matcher, width: int) -> None:
        self._match = matcher
        self._width = width

    def read(self, value: str, hidden: str) -> tuple[str, Experts]:
        """The output of the dense block that is added to the experts', and the experts, all of which read `hidden`."""
        match = self._match
        dense, chosen = match.node(value, "Add", 2).inputs
        dense_output, dense_norm = self._norm(dense)
        mixed, norm = self._norm(chosen)
        weights, outputs = match.node(match.reshape(mixed, -1, self._width), "MatMul", 2).inputs
        weights, shape = match.reshaped(weights)
        require(len(shape) == 3 and shape[:2] == (-1, 1) and shape[2] > 0, f"{weights}: shape {shape}")
        top = shape[2]
        numbers, router, scale = self._route(weights, hidden, top)
        joined, back = match.node(match.reshape(outputs, -1, top, self._width), "Gather", 2, axis=0).inputs
        order = self._sorted(back)
        flat = self._sorted(order)
        require(match.reshape(flat, -1) == numbers, f"{flat}: sorted by something else than the experts")
        parts = match.node(joined, "Concat", len(scale), axis=0).inputs
        pairs = [self._expert(part) for part in parts]
        sources = [source for source, _, _ in pairs]
        pre_norm = self._parts(sources, order, flat, hidden, top)
        gate_up, down = tuple(both for _, both, _ in pairs), tuple(last for _, _, last in pairs)
        for matrices in (gate_up, down):
            same = {(matrix.format, matrix.rows, matrix.width) for matrix in matrices}
            require(len(same) == 1, f"{joined}: experts of different sizes")
            require(matrices[0].format.group > 0, f"{joined}: experts whose weights share no scale")
        require(gate_up[0].rows == 2 * down[0].width and down[0].rows == self._width, f"{joined}: experts' sizes")
        return dense_output, Experts(router, scale, top, pre_norm, gate_up, down, norm, dense_norm)

    def _route(self, weights: str, hidden: str, top: int) -> tuple[str, Floats, Floats]:
        """The numbers [T, top] of the experts that have these weights, the router with its norm, and the scales."""
        match = self._match
        best, picked = match.node(weights, "Mul", 2).inputs
        scale, numbers = match.node(picked, "Gather", 2, axis=0).inputs
        scales = match.floats(scale, 1)
        count = len(scales)
        largest, total = match.node(best, "Div", 2).inputs
        summed = match.node(total, "ReduceSum", 2, keepdims=1)
        require(summed.inputs[0] == largest and match.integers(summed.inputs[1]) == (-1,), f"{best}: shares of another")
        search = match.node(largest, "TopK", 2, output=0, axis=-1)
        require(match.node(numbers, "TopK", 2, output=1, axis=-1) is search, f"{numbers}: experts of other weights")
        require(match.integers(search.inputs[1]) == (top,) and top <= count, f"{numbers}: the best of {count}")
        cut = match.node(match.node(search.inputs[0], "Softmax", 1, axis=-1).inputs[0], "Slice", 4)
        ends = tuple(match.integers(name) for name in cut.inputs[1:])
        require(ends == ((0,), (count,), (1,)), f"{cut.outputs[0]}: a slice {ends}")
        scores = match.node(match.reshape(cut.inputs[0], -1, 2 * count), "Gemm", 2, transB=1)
        router = match.floats(scores.inputs[1], 2)
        require(router.shape == (count, self._width), f"a router of shape {router.shape}")
        twice = match.node(match.reshape(scores.inputs[0], -1, self._width), "Concat", 2, axis=-1).inputs
        source, norm = self._norm(twice[0])
        require(twice[0] == twice[1] and source == hidden, f"{scores.outputs[0]}: a router that reads something else")
        return numbers, router * norm, scales

    def _expert(self, value: str) -> tuple[str, Matrix, Matrix]:
        """The rows, gate with up, and down of an expert whose output is `value`."""
        match = self._match
        product, down = match.linear(value)
        activated, up = match.node(product, "Mul", 2).inputs
        halves = match.node(match.gelu(activated), "Split", 1, output=0, axis=-1, num_outputs=2)
        other = match.node(up, "Split", 1, output=1, axis=-1, num_outputs=2)
        require(other is halves, f"{product}: gate and up of different experts")
        source, both = match.linear(halves.inputs[0])
        require(both.width == self._width, f"{value}: an expert of width {both.width}")
        return source, both, down

    def _parts(self, values: list[str], order: str, flat: str, hidden: str, top: int) -> Floats:
        """The norm of the rows that experts read: `values` are those of each, split off in their order."""
        match = self._match
        splits = [match.node(value, "Split", 2, output=number, axis=0) for number, value in enumerate(values)]
        split = splits[0]
        require(all(each is split for each in splits) and len(split.outputs) == len(values), "rows of other experts")
        summed = match.node(split.inputs[1], "ReduceSum", 2, keepdims=0)
        require(match.integers(summed.inputs[1]) == (0,), f"{split.inputs[1]}: sizes in an unknown form")
        column, every = match.node(match.node(summed.inputs[0], "Cast", 1, to=_INT64).inputs[0], "Equal", 2).inputs
        numbers = match.node(column, "Unsqueeze", 2)
        counted = np.array_equal(match.tensor(every, np.int64, 1), np.arange(len(values)))
        require(counted and match.integers(numbers.inputs[1]) == (1,), f"{column}: experts in an unknown form")
        require(numbers.inputs[0] == flat, f"{column}: the sizes of other parts")
        normed, rows = match.node(split.inputs[0], "Gather", 2, axis=0).inputs
        sorted_by, divisor = match.node(rows, "Div", 2).inputs
        require(sorted_by == order and int(match.tensor(divisor, np.int64, 0)) == top, f"{rows}: rows of other experts")
        source, norm = self._norm(normed)
        require(source == hidden, f"{normed}: experts that do not read what they are added to")
        return norm

    def _sorted(self, value: str) -> str:
        """The numbers that the indices `value` sort, equal ones in order."""
        match = self._match
        search = match.node(value, "TopK", 2, output=1, axis=0, largest=0)
        counted = match.node(search.inputs[1], "Shape", 1).inputs[0]
        require(counted == search.inputs[0], f"{value}: not all are sorted")
        return search.inputs[0]

    def _norm(self, value: str) -> tuple[str, Floats]:
        source, weight = self._match.norm(value)
        require(len(weight) == self._width, f"{value}: a norm of {len(weight)}")
        return source, weight
