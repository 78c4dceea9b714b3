"""Reads a graph of heads, from a hidden state to candidates; `ondevice.contract` lists its input and outputs."""

from __future__ import annotations

import numpy as np

from ondevice import contract
from ondevice.engines.agreement import check_heads
from ondevice.engines.onnx.file import Graph
from ondevice.engines.simd.graph.matching import Matcher, require
from ondevice.engines.simd.graph.model import HeadsModel, Shortlist, TargetModel
from ondevice.manifest import HeadsEntry, Target


def read_heads(graph: Graph, target: Target, model: TargetModel, entry: HeadsEntry) -> HeadsModel:
    """The model that the graph computes.

    Args:
        graph: of heads of one kind.
        target: whose hidden states they read.
        model: that target, whose vocabulary projection they share.
        entry: what bundle.json says of them.

    Raises:
        UnsupportedGraphError: something in it is not what the exporter writes.
        BundleCorruptError: it is not the model that bundle.json describes.
    """
    return _HeadsReader(graph, target, model, entry).read()


class _HeadsReader:
    def __init__(self, graph: Graph, target: Target, model: TargetModel, entry: HeadsEntry) -> None:
        check_heads(graph.interface, entry, target)
        self._match = Matcher(graph)
        self._target = model
        self._entry = entry
        self._vocab_size = target.vocab_size
        self._width = target.hidden_size

    def read(self) -> HeadsModel:
        """Walk from the logits to the hidden state."""
        match, offsets, width = self._match, self._entry.offsets, self._width
        states, shortlist = self._head()
        norm = None
        if match.op(states) == "RMSNormalization":
            states, norm = match.norm(states)
            require(len(norm) == width, f"{states}: a norm of {len(norm)}")
        source, steps = match.node(states, "Add", 2).inputs
        gated = match.op(steps) == "Mul"
        if gated:
            steps, gate = match.node(steps, "Mul", 2).inputs
            require(match.node(gate, "Sigmoid", 1).inputs[0] == steps, f"{steps}: a gate of something else")
        if offsets > 1 or match.op(steps) == "Reshape":
            steps = match.reshape(steps, offsets, width)
        value, outer = match.linear(steps)
        require(outer.rows == offsets * width, f"{steps}: {outer.rows} rows")
        inner = None
        if match.op(value) == "Relu":
            value, inner = match.linear(match.node(value, "Relu", 1).inputs[0])
            require(inner.rows == outer.width and inner.rows % 32 == 0, f"{value}: {inner.rows} rows")
        require((inner or outer).width == width and source == value, "heads that add to something else than they read")
        entry_norm = None
        if source != contract.HIDDEN:
            source, entry_norm = match.norm(source)
            require(len(entry_norm) == width, f"{source}: a norm of {len(entry_norm)}")
        match.expect_input(source, contract.HIDDEN)
        require(entry_norm is None or norm is None, "heads with two norms")
        eps = self._target.eps if match.eps is None else match.eps
        return HeadsModel(self._entry.kind, offsets, entry_norm, inner, outer, gated, norm, shortlist, eps)

    def _head(self) -> tuple[str, Shortlist | None]:
        """The states that the projection scores, and the shortlist, if any."""
        match = self._match
        value, cap = match.softcap(contract.LOGITS)
        require(cap == self._target.cap, f"a softcap of {cap}, the target's is {self._target.cap}")
        if match.op(contract.CANDIDATES) == "Expand":
            require(self._entry.candidates == self._vocab_size, "a head of another size")
            require(match.op(match.node(contract.CANDIDATES, "Expand", 2).inputs[0]) == "Range", "unknown candidates")
            states, matrix = match.linear(value)
            own = self._target.head
            shared = _address(matrix.codes) == _address(own.codes) and _address(matrix.scales) == _address(own.scales)
            require(shared and (matrix.rows, matrix.format) == (own.rows, own.format), "a projection of their own")
            return states, None
        return self._shortlisted(value)

    def _shortlisted(self, value: str) -> tuple[str, Shortlist]:
        """The states whose scores, before they are made flat, are `value`, and what is scored."""
        match, offsets, count = self._match, self._entry.offsets, self._entry.candidates
        rows, column = match.node(match.reshape(value, offsets, count), "MatMul", 2).inputs
        unsqueezed = match.node(column, "Unsqueeze", 2)
        require(match.integers(unsqueezed.inputs[1]) == (2,), f"{column}: another axis")
        states = unsqueezed.inputs[0]
        entries, table = match.gathered(rows)
        own = self._target.table
        shared = _address(table.codes) == _address(own.codes) and _address(table.scales) == _address(own.scales)
        same = (table.entries, table.width, table.format) == (own.entries, own.width, own.format)
        require(
            entries == contract.CANDIDATES and shared and same, "heads that score with other rows than the target's"
        )
        found = match.node(match.reshape(entries, offsets, count), "Gather", 2, axis=0)
        ids = match.tensor(found.inputs[0], np.int64, 2)
        search = match.node(found.inputs[1], "TopK", 2, axis=-1)
        scored, centroids = match.linear(search.inputs[0])
        top = match.integers(search.inputs[1])[0]
        require(scored == states and centroids.width == self._width, "centroids of another width")
        clusters, per_cluster = ids.shape
        require(
            clusters == centroids.rows and 0 < top <= clusters and top * per_cluster == count,
            "clusters of another size",
        )
        inside = ids.size and ids.min() >= 0 and ids.max() < self._vocab_size
        require(bool(inside), "clusters with tokens outside the vocabulary")
        return states, Shortlist(centroids, top, per_cluster, ids)


def _address(values: np.ndarray) -> int:
    """Where a tensor lies: the files are mapped once, so what is shared lies in one place."""
    return int(values.ctypes.data)
