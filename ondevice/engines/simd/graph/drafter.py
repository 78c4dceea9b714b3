"""Reads a drafter graph, one MTP step; `ondevice.contract` lists its inputs and outputs."""

from __future__ import annotations

import numpy as np

from ondevice import contract
from ondevice.engines.agreement import check_drafter
from ondevice.engines.onnx.file import Graph
from ondevice.engines.simd.graph.layers import AttentionReader, CacheOwner, LayerReader
from ondevice.engines.simd.graph.matching import Matcher, require
from ondevice.engines.simd.graph.model import Centroids, DecoderLayer, DrafterModel, Matrix
from ondevice.manifest import DrafterEntry, Target


def read_drafter(graph: Graph, target: Target, entry: DrafterEntry) -> DrafterModel:
    """The model that the graph computes.

    Args:
        graph: of the drafter.
        target: the target whose caches it reads.
        entry: what bundle.json says of it.

    Raises:
        UnsupportedGraphError: something in it is not what the exporter writes.
        BundleCorruptError: it is not the model that bundle.json describes.
    """
    return _DrafterReader(graph, target, entry).read()


class _DrafterReader:
    def __init__(self, graph: Graph, target: Target, entry: DrafterEntry) -> None:
        check_drafter(graph.interface, entry, target)
        self._target = target
        self._entry = entry
        self._match = Matcher(graph)

    def read(self) -> DrafterModel:
        """Walk from the outputs to the token id."""
        match = self._match
        hidden, post_projection = match.linear(contract.NEXT_HIDDEN)
        width = post_projection.width
        require(post_projection.rows == self._target.hidden_size, "a hidden state of another size than the target's")
        layer_reader = LayerReader(match, width)
        attention = AttentionReader(layer_reader, width, self._caches(), positions=contract.POSITION)
        head = self._head(hidden, width)
        value, norm = layer_reader.norm(hidden)
        layers: list[DecoderLayer] = []
        while match.op(value) == "Mul":
            matched = layer_reader.read(value, attention)
            require(matched.slices is None, "a drafter with per-layer embeddings")
            require(matched.layer.experts is None, "a drafter with experts")
            layers.insert(0, matched.layer)
            value = matched.source
        joined, pre_projection = match.linear(value)
        require(pre_projection.rows == width and width % 32 == 0, f"{value}: {pre_projection.rows} rows")
        require(pre_projection.width == 2 * self._target.hidden_size, f"{value}: width {pre_projection.width}")
        embedded, target_hidden = match.node(joined, "Concat", 2, axis=-1).inputs
        match.expect_input(target_hidden, contract.HIDDEN)
        rows, factor = match.times(embedded)
        ids, table = match.gathered(rows)
        match.expect_input(ids, contract.TOKEN_ID)
        fits = table.width == self._target.hidden_size and table.entries == self._target.vocab_size
        require(fits, "an embedding of another size than the target's")
        require(bool(layers) and match.eps is not None, "a drafter without layers")
        assert match.eps is not None
        return DrafterModel(table, factor, pre_projection, tuple(layers), norm, head, post_projection, match.eps)

    def _caches(self) -> dict[tuple[str, str], CacheOwner]:
        indices = {"full": self._entry.full_layer, "sliding": self._entry.sliding_layer}
        caches = {}
        for index in indices.values():
            layer = self._target.layers[index]
            names = contract.shared(layer.kind, "key"), contract.shared(layer.kind, "value")
            caches[names] = CacheOwner.of(self._target, index)
        return caches

    def _head(self, hidden: str, width: int) -> Centroids | Matrix:
        """The head that scores `hidden` [1, width]: a matrix over the whole vocabulary, or centroids."""
        match = self._match
        scored, shape = match.reshaped(contract.LOGITS)
        require(shape == (-1,), f"logits of shape {shape}")
        if match.op(contract.CANDIDATES) == "Range":
            source, matrix = match.linear(scored)
            whole = matrix.rows == self._target.vocab_size == self._entry.candidates and matrix.width == width
            require(source == hidden and whole, "a head of another size")
            return matrix
        return self._centroids(scored, hidden, width)

    def _centroids(self, scored: str, hidden: str, width: int) -> Centroids:
        """The centroid head whose scores, before they are made flat, are `scored`."""
        match = self._match
        rows, column = match.node(scored, "MatMul", 2).inputs
        require(match.reshape(column, -1, 1) == hidden, "the head reads something else")
        entries, table = match.gathered(match.reshape(rows, -1, width))
        clusters, best = match.reshaped(entries)
        search = match.node(clusters, "TopK", 2, axis=-1)
        scores = match.node(search.inputs[0], "Gemm", 2, transB=1)
        weights = match.floats(scores.inputs[1], 2)
        top = match.integers(search.inputs[1])[0]
        source = match.node(match.reshape(contract.CANDIDATES, -1), "Gather", 2, axis=0)
        ids = match.tensor(source.inputs[0], np.int64, 2)
        require(best == (-1,) and source.inputs[1] == entries, "candidates of other clusters")
        require(scores.inputs[0] == hidden and weights.shape[1] == width, "centroids of another width")
        count, per_cluster = ids.shape
        fits = count == len(weights) == table.entries and table.width == per_cluster * width and 0 < top <= count
        require(fits and top * per_cluster == self._entry.candidates, "clusters of another size")
        inside = ids.size and ids.min() >= 0 and ids.max() < self._target.vocab_size
        require(bool(inside), "clusters with tokens outside the vocabulary")
        return Centroids(weights, top, per_cluster, table, ids)
