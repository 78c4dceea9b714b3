"""The drafter graph: one MTP step (Gemma4AssistantForCausalLM); see `ondevice.contract`."""

from __future__ import annotations

import dataclasses
from functools import partial

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ondevice import contract
from ondevice.contract import AttentionKind
from ondevice.errors import CheckpointError
from ondevice_export.checkpoint import Checkpoint
from ondevice_export.config import DrafterConfig
from ondevice_export.graph.attention import Attention, KeyValue
from ondevice_export.graph.graph_builder import GraphBuilder
from ondevice_export.graph.layer import decoder_layer
from ondevice_export.graph.matrix import gather, linear
from ondevice_export.graph.module_builder import ModuleBuilder
from ondevice_export.graph.target import embed
from ondevice_export.graph.token_rows import CACHE_ROWS, TokenRows
from ondevice_export.graph.weights import Weights
from ondevice_export.matrices import RowReader, StoredMatrix

_HEAD = "model.embed_tokens.weight"


class DrafterGraph:
    """Builds the drafter's graph around the target's token table."""

    def __init__(
        self,
        builder: GraphBuilder,
        config: DrafterConfig,
        weights: Weights,
        checkpoint: Checkpoint,
        table: StoredMatrix,
    ) -> None:
        self._builder = builder
        self._config = config
        self._weights = weights
        self._module = ModuleBuilder(builder, config.text, weights)
        self._checkpoint = checkpoint
        # Both models call their table model.embed_tokens.weight.
        self._table = dataclasses.replace(table, name=f"target.{table.name}")
        self._id = builder.input(contract.TOKEN_ID, ir.DataType.INT64, [1])
        self._hidden = builder.input(contract.HIDDEN, ir.DataType.FLOAT, [1, config.backbone_hidden_size])
        position = builder.input(contract.POSITION, ir.DataType.INT64, [1])
        masks = {
            kind: builder.input(contract.mask(kind), ir.DataType.BOOL, [1, CACHE_ROWS[kind]]) for kind in CACHE_ROWS
        }
        self._rows = TokenRows(builder, position, masks, config.text.rope)
        self._caches = {kind: self._cache(kind) for kind in CACHE_ROWS}

    def build(self) -> None:
        """`h = pre_projection(concat(embed(token), hidden))`, the layers, the norm, then head and post_projection."""
        builder, config, weights = self._builder, self._config, self._weights
        joined = builder.op("Concat", embed(builder, self._table, self._id), self._hidden, axis=-1)
        hidden = weights.linear(joined, "pre_projection.weight")
        for index in range(len(config.text.layers)):
            hidden = self._layer(index, hidden)
        hidden = self._module.norm(hidden, "model.norm")
        with builder.scope("head"):
            candidates, logits = self._whole_head(hidden) if config.centroids is None else self._centroid_head(hidden)
        following = weights.linear(hidden, "post_projection.weight")
        builder.output(candidates, contract.CANDIDATES, ir.DataType.INT64, [config.candidates])
        builder.output(logits, contract.LOGITS, ir.DataType.FLOAT, [config.candidates])
        builder.output(following, contract.NEXT_HIDDEN, ir.DataType.FLOAT, [1, config.backbone_hidden_size])

    def _cache(self, kind: AttentionKind) -> KeyValue:
        """The target's shared cache of one kind, as wide as the drafter's layers of that kind read it."""
        layer = next((layer for layer in self._config.text.layers if layer.kind == kind), None)
        width: int | str = "W" if layer is None else layer.kv_heads * layer.head_dim
        shape: list[int | str] = [1, CACHE_ROWS[kind], width]
        return KeyValue(
            self._builder.input(contract.shared(kind, "key"), ir.DataType.FLOAT, shape),
            self._builder.input(contract.shared(kind, "value"), ir.DataType.FLOAT, shape),
        )

    def _layer(self, index: int, hidden: ir.Value) -> ir.Value:
        module = self._module.at(f"model.layers.{index}.")
        layer = self._config.text.layers[index]
        attention = Attention(module.at("self_attn."), layer)
        with self._builder.scope(f"layers.{index}"):
            attend = partial(attention.attend, rows=self._rows, cache=self._caches[layer.kind])
            return decoder_layer(module, hidden, attend)

    def _whole_head(self, hidden: ir.Value) -> tuple[ir.Value, ir.Value]:
        """All V tokens: candidates [V], logits [V]."""
        builder, size = self._builder, self._config.text.vocab_size
        head = self._weights.matrix(_HEAD, self._weights.formats.head)
        zero, end, one = (builder.constant(np.array(value, np.int64)) for value in (0, size, 1))
        return builder.op("Range", zero, end, one), builder.reshape(linear(builder, hidden, head), -1)

    def _centroid_head(self, hidden: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The tokens of the best clusters: candidates [C], logits [C] (Gemma4AssistantMaskedEmbedder).

        The head's rows are stored in cluster order, so a cluster is one entry of a table of V / per_cluster entries.
        """
        builder, weights, config = self._builder, self._weights, self._config
        assert config.centroids is not None
        per_cluster = config.text.vocab_size // config.centroids
        ordering = self._token_ordering()
        scores = builder.op("Gemm", hidden, weights.vector("masked_embedding.centroids.weight"), transB=1)
        clusters = builder.ops("TopK", scores, builder.integers(config.centroid_top_k), axis=-1, outputs=2)[1]
        clusters = builder.reshape(clusters, -1)
        head = weights.matrix(_HEAD, weights.formats.head, rows=self._ordered_rows(ordering))
        rows = builder.reshape(gather(builder, head, clusters, group=per_cluster), -1, head.width)
        logits = builder.op("MatMul", rows, builder.reshape(hidden, -1, 1))
        ids = weights.array("masked_embedding.token_ordering", ordering.reshape(config.centroids, per_cluster))
        return builder.reshape(builder.op("Gather", ids, clusters, axis=0), -1), builder.reshape(logits, -1)

    def _token_ordering(self) -> npt.NDArray[np.int64]:
        """Token ids in cluster order, [V]: a permutation, or the head's rows would be misplaced."""
        size = self._config.text.vocab_size
        ordering = self._checkpoint.integers("masked_embedding.token_ordering")
        if not np.array_equal(np.sort(ordering), np.arange(size)):
            raise CheckpointError(f"masked_embedding.token_ordering does not name each of the {size} tokens once")
        return ordering

    def _ordered_rows(self, ordering: npt.NDArray[np.int64]) -> RowReader:
        return lambda start, stop: self._checkpoint.picked_rows(_HEAD, ordering[start:stop])
