"""Reads a target graph; `ondevice.contract` lists its inputs and outputs."""

from __future__ import annotations

import dataclasses

from ondevice import contract
from ondevice.engines.agreement import check_target
from ondevice.engines.onnx.file import Graph
from ondevice.engines.simd.graph.layers import AttentionReader, CacheOwner, LayerReader, MatchedLayer
from ondevice.engines.simd.graph.matching import Matcher, agree, require
from ondevice.engines.simd.graph.model import Attention, Matrix, PerLayerInputs, TargetModel
from ondevice.manifest import Target


def read_target(graph: Graph, target: Target) -> TargetModel:
    """The model that the graph computes.

    Raises:
        UnsupportedGraphError: something in it is not what the exporter writes.
        BundleCorruptError: it is not the model that bundle.json describes.
    """
    return _TargetReader(graph, target).read()


class _TargetReader:
    def __init__(self, graph: Graph, target: Target) -> None:
        check_target(graph.interface, target)
        self._target = target
        self._match = Matcher(graph)
        self._layers = LayerReader(self._match, target.hidden_size)
        caches = {
            (contract.present(index, "key"), contract.present(index, "value")): CacheOwner.of(target, index)
            for index in target.kv_layers()
        }
        self._all = AttentionReader(self._layers, target.hidden_size, caches)
        self._wanted = AttentionReader(self._layers, target.hidden_size, caches, wanted=True)

    def read(self) -> TargetModel:
        """Walk from the outputs to the token ids."""
        match = self._match
        head, cap = self._head()
        value, norm = self._layers.norm(contract.HIDDEN)
        matched: list[MatchedLayer] = []
        first_shared: int | None = None
        for index in reversed(range(len(self._target.layers))):
            if first_shared is None and match.op(value) == "Gather":
                first_shared, value = index + 1, match.selected(value)
            matched.insert(0, self._layer(index, value, self._wanted if first_shared is None else self._all))
            value = matched[0].source
        if first_shared is None:
            first_shared, value = 0, match.selected(value)
        require(first_shared > 0, "no layer runs on all rows")
        slices, size = self._slices(matched, first_shared)
        factor = match.times(value)
        source, table = match.gathered(factor[0])
        match.expect_input(source, contract.TOKEN_IDS)
        require(table.width == self._target.hidden_size, f"embeddings of {table.width}")
        require(table.entries == self._target.vocab_size == head.rows, f"a vocabulary of {table.entries}")
        layers = tuple(each.layer for each in matched)
        per_layer = None if slices is None else self._per_layer_inputs(slices, value, len(layers))
        require(per_layer is None or per_layer.size == size, f"per-layer gates of {size}")
        assert match.eps is not None
        return TargetModel(table, factor[1], per_layer, layers, first_shared, norm, head, cap, match.eps)

    def _head(self) -> tuple[Matrix, float | None]:
        """The head and the softcap."""
        match = self._match
        value, cap = match.softcap(contract.LOGITS)
        source, head = match.linear(value)
        require(source == contract.HIDDEN and head.width == self._target.hidden_size, "the head reads something else")
        return head, cap

    def _layer(self, index: int, value: str, reader: AttentionReader) -> MatchedLayer:
        """The layer whose output is `value`, with its new keys and values where it owns a cache."""
        matched = self._layers.read(value, reader)
        expected = self._target.layers[index]
        attention = matched.layer.attention
        agree(attention.source == expected.kv_source, f"layer {index} reads the cache of layer {attention.source}")
        heads = attention.query_heads
        agree(heads == self._target.query_heads, f"layer {index} has {heads} query heads")
        if expected.kv_source != index:
            return matched
        require(reader is self._all, f"layer {index} writes a cache from the wanted rows alone")
        new = reader.read_new(*self._written(index, attention), matched.entry, attention)
        layer = dataclasses.replace(matched.layer, attention=dataclasses.replace(attention, new=new))
        return dataclasses.replace(matched, layer=layer)

    def _written(self, index: int, attention: Attention) -> tuple[str, str]:
        """The names of the new keys and values that go into a layer's cache."""
        match = self._match
        new = []
        for part in ("key", "value"):
            node = match.node(contract.present(index, part), "TensorScatter", 3, axis=-2)
            match.expect_input(node.inputs[0], contract.past(index, part))
            match.expect_input(node.inputs[2], contract.write_index(attention.kind))
            new.append(node.inputs[1])
        return new[0], new[1]

    def _slices(self, layers: list[MatchedLayer], first_shared: int) -> tuple[str | None, int | None]:
        """The name of the per-layer embeddings of all layers, and the size of a slice; None, None without."""
        found: set[str | None] = set()
        sizes: set[int | None] = set()
        for index, matched in enumerate(layers):
            whole = matched.slices
            found.add(self._match.selected(whole) if whole is not None and index >= first_shared else whole)
            per_layer = matched.layer.per_layer
            require(per_layer is None or per_layer.index == index, f"layer {index} takes another layer's slice")
            sizes.add(None if per_layer is None else per_layer.gate.rows)
        require(len(found) == len(sizes) == 1, "layers differ in their per-layer embeddings")
        return found.pop(), sizes.pop()

    def _per_layer_inputs(self, value: str, embedded: str, layers: int) -> PerLayerInputs:
        """How the per-layer embeddings `value` are made of the token ids and their embeddings `embedded`."""
        match = self._match
        added, factor = match.times(value)
        left, right = match.node(added, "Add", 2).inputs
        rows, row_factor = match.times(right)
        gathered, shape = match.reshaped(rows)
        require(len(shape) == 3 and shape[:2] == (-1, layers) and shape[2] % 32 == 0, f"{rows}: shape {shape}")
        size = shape[2]
        source, table = match.gathered(gathered)
        match.expect_input(source, contract.TOKEN_IDS)
        require(table.width == layers * size, f"{gathered}: rows of {table.width}")
        require(table.entries >= self._target.vocab_size, f"{gathered}: {table.entries} entries")
        split, norm = self._layers.norm(left, size)
        scaled, context_factor = match.times(match.reshape(split, -1, layers, size))
        source, projection = self._layers.linear(scaled, self._target.hidden_size, layers * size)
        require(source == embedded, f"{scaled}: a context of something else than the embeddings")
        return PerLayerInputs(projection, norm, layers, table, context_factor, row_factor, factor)
