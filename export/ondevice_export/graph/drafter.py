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
from ondevice_export.graph.block import Block
from ondevice_export.graph.layer import decoder_layer
from ondevice_export.graph.matrix import gather, linear
from ondevice_export.graph.rows import CACHE_ROWS, Rows
from ondevice_export.graph.tape import Tape
from ondevice_export.graph.target import embed
from ondevice_export.graph.weights import Weights
from ondevice_export.matrices import RowReader, StoredMatrix

_HEAD = "model.embed_tokens.weight"


class DrafterGraph:
    """Builds the drafter's graph around the target's token table."""

    def __init__(
        self, tape: Tape, config: DrafterConfig, weights: Weights, checkpoint: Checkpoint, table: StoredMatrix
    ) -> None:
        self._tape = tape
        self._config = config
        self._weights = weights
        self._block = Block(tape, config.text, weights)
        self._checkpoint = checkpoint
        # Both models call their table model.embed_tokens.weight.
        self._table = dataclasses.replace(table, name=f"target.{table.name}")
        self._id = tape.input(contract.TOKEN_ID, ir.DataType.INT64, [1])
        self._hidden = tape.input(contract.HIDDEN, ir.DataType.FLOAT, [1, config.backbone_hidden_size])
        position = tape.input(contract.POSITION, ir.DataType.INT64, [1])
        masks = {kind: tape.input(contract.mask(kind), ir.DataType.BOOL, [1, CACHE_ROWS[kind]]) for kind in CACHE_ROWS}
        self._rows = Rows(tape, position, masks, config.text.rope)
        self._caches = {kind: self._cache(kind) for kind in CACHE_ROWS}

    def build(self) -> None:
        """`h = pre_projection(concat(embed(token), hidden))`, the layers, the norm, then head and post_projection."""
        tape, config, weights = self._tape, self._config, self._weights
        joined = tape.op("Concat", embed(tape, self._table, self._id), self._hidden, axis=-1)
        hidden = weights.linear(joined, "pre_projection.weight")
        for index in range(len(config.text.layers)):
            hidden = self._layer(index, hidden)
        hidden = self._block.norm(hidden, "model.norm")
        with tape.scope("head"):
            candidates, logits = self._whole_head(hidden) if config.centroids is None else self._centroid_head(hidden)
        following = weights.linear(hidden, "post_projection.weight")
        tape.output(candidates, contract.CANDIDATES, ir.DataType.INT64, [config.candidates])
        tape.output(logits, contract.LOGITS, ir.DataType.FLOAT, [config.candidates])
        tape.output(following, contract.NEXT_HIDDEN, ir.DataType.FLOAT, [1, config.backbone_hidden_size])

    def _cache(self, kind: AttentionKind) -> KeyValue:
        """The target's shared cache of one kind, as wide as the drafter's layers of that kind read it."""
        layer = next((layer for layer in self._config.text.layers if layer.kind == kind), None)
        width: int | str = "W" if layer is None else layer.kv_heads * layer.head_dim
        shape: list[int | str] = [1, CACHE_ROWS[kind], width]
        return KeyValue(
            self._tape.input(contract.shared(kind, "key"), ir.DataType.FLOAT, shape),
            self._tape.input(contract.shared(kind, "value"), ir.DataType.FLOAT, shape),
        )

    def _layer(self, index: int, hidden: ir.Value) -> ir.Value:
        block = self._block.at(f"model.layers.{index}.")
        layer = self._config.text.layers[index]
        attention = Attention(block.at("self_attn."), layer)
        with self._tape.scope(f"layers.{index}"):
            attend = partial(attention.attend, rows=self._rows, cache=self._caches[layer.kind])
            return decoder_layer(block, hidden, attend, None)

    def _whole_head(self, hidden: ir.Value) -> tuple[ir.Value, ir.Value]:
        """All V tokens: candidates [V], logits [V]."""
        tape, size = self._tape, self._config.text.vocab_size
        head = self._weights.matrix(_HEAD, self._weights.widths.head)
        zero, end, one = (tape.constant(np.array(value, np.int64)) for value in (0, size, 1))
        return tape.op("Range", zero, end, one), tape.reshape(linear(tape, hidden, head), -1)

    def _centroid_head(self, hidden: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The tokens of the best clusters: candidates [C], logits [C] (Gemma4AssistantMaskedEmbedder).

        The head's rows are stored in cluster order, so a cluster is one entry of a table of V / per_cluster entries.
        """
        tape, weights, config = self._tape, self._weights, self._config
        assert config.centroids is not None
        per_cluster = config.text.vocab_size // config.centroids
        ordering = self._token_ordering()
        scores = tape.op("Gemm", hidden, weights.vector("masked_embedding.centroids.weight"), transB=1)
        clusters = tape.ops("TopK", scores, tape.integers(config.centroid_top_k), axis=-1, outputs=2)[1]
        clusters = tape.reshape(clusters, -1)
        head = weights.matrix(_HEAD, weights.widths.head, rows=self._ordered_rows(ordering))
        rows = tape.reshape(gather(tape, head, clusters, group=per_cluster), -1, head.width)
        logits = tape.op("MatMul", rows, tape.reshape(hidden, -1, 1))
        ids = weights.array("masked_embedding.token_ordering", ordering.reshape(config.centroids, per_cluster))
        return tape.reshape(tape.op("Gather", ids, clusters, axis=0), -1), tape.reshape(logits, -1)

    def _token_ordering(self) -> npt.NDArray[np.int64]:
        """Token ids in cluster order, [V]: a permutation, or the head's rows would be misplaced."""
        size = self._config.text.vocab_size
        ordering = self._checkpoint.integers("masked_embedding.token_ordering")
        if not np.array_equal(np.sort(ordering), np.arange(size)):
            raise CheckpointError(f"masked_embedding.token_ordering does not name each of the {size} tokens once")
        return ordering

    def _ordered_rows(self, ordering: npt.NDArray[np.int64]) -> RowReader:
        return lambda start, stop: self._checkpoint.picked_rows(_HEAD, ordering[start:stop])
