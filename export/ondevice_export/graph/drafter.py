"""The drafter graph: one MTP step (Gemma4AssistantForCausalLM, or a layer of the model's own form); see
`ondevice.bundle_format.graph_io`.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ondevice.arrays import Int64Array
from ondevice.bundle_format import graph_io
from ondevice.bundle_format.decoder import Attention, Mixer
from ondevice.bundle_format.model_config import DrafterEntry, ShortlistEntry, Target
from ondevice.bundle_format.tensor_table import (
    DRAFTER_CENTROIDS,
    DRAFTER_EMBEDDING,
    DRAFTER_ORDERING,
    DRAFTER_TOKENS,
)
from ondevice_export.graph.attention import KeyValue, SelfAttention, TokenRows
from ondevice_export.graph.graph_builder import GraphBuilder
from ondevice_export.graph.layer import decoder_layer
from ondevice_export.graph.matrix import gather, linear
from ondevice_export.graph.mtp import MtpNodes, MtpWeights
from ondevice_export.graph.target import SharedWeights, embed, softcap
from ondevice_export.graph.weights import Module, Weights


class DrafterGraph:
    """Builds the drafter's graph around the target's token embedding, and around its head if the drafter has none."""

    def __init__(
        self,
        builder: GraphBuilder,
        config: DrafterEntry,
        target: Target,
        weights: Weights,
        shared: SharedWeights,
        *,
        head_tokens: Int64Array | None = None,
    ) -> None:
        """
        shared : the target's weights that the drafter reads
        head_tokens : the ids of the head's tokens; None if the checkpoint has them, or if the head scores all
        """
        self._builder = builder
        self._config = config
        self._weights = weights
        self._target = target
        self._module = Module(builder, config, weights)
        # Both models call their table model.embed_tokens.weight.
        self._table, self._target_head = (
            dataclasses.replace(each, name=f"target.{each.name}") for each in (shared.table, shared.head)
        )
        self._mtp = None if shared.mtp is None else shared.mtp.renamed("target.")
        self._head_tokens = head_tokens
        inputs = builder.inputs
        masks = {kind: inputs[graph_io.mask(kind)] for kind in config.kinds}
        self._rows = TokenRows(builder, inputs[graph_io.POSITION], masks, config)
        self._caches = {
            index: KeyValue(*(inputs[graph_io.past(index, part)] for part in graph_io.PARTS))
            for index in config.kv_layers()
        }

    def build(self) -> None:
        """`h = pre_projection(concat(embed(token), hidden))`, the layers, the norm, then head and post_projection."""
        builder, config, target, module = self._builder, self._config, self._target, self._module
        embedded = embed(builder, target, self._table, builder.inputs[graph_io.TOKEN_ID])
        if target.mtp is not None and self._mtp is not None:
            following = self._behind_mtp_layer(embedded, target.mtp, self._mtp)
            candidates, logits = self._listed(module.norm(following, "model.norm"))
            builder.output(graph_io.CANDIDATES, candidates)
            builder.output(graph_io.LOGITS, logits)
            builder.output(graph_io.NEXT_HIDDEN, following)
            return
        joined = builder.op("Concat", embedded, builder.inputs[graph_io.HIDDEN], axis=-1)
        hidden = module.linear(joined, "pre_projection")
        for index in range(len(config.layers)):
            hidden = self._layer(index, hidden)
        hidden = module.norm(hidden, "model.norm")
        following = module.linear(hidden, "post_projection")
        with builder.scope("head"):
            if config.target_head:
                candidates, logits = self._listed(following)
            elif config.shortlist is None:
                candidates, logits = self._whole_head(hidden)
            else:
                candidates, logits = self._centroid_head(hidden, config.shortlist)
        builder.output(graph_io.CANDIDATES, candidates)
        builder.output(graph_io.LOGITS, logits)
        builder.output(graph_io.NEXT_HIDDEN, following)

    def _behind_mtp_layer(self, embedded: ir.Value, own: Attention, weights: MtpWeights) -> ir.Value:
        """Write the row's keys and values to the cache, and run the layer: the next hidden state, [1, H]."""
        builder, number = self._builder, self._target.mtp_cache
        inputs, rotary = MtpNodes(self._module, own, weights), self._config.attention[0].rotary
        x = inputs.inputs(embedded, inputs.projected(builder.inputs[graph_io.HIDDEN]))
        new, index = inputs.new_rows(x, self._rows, rotary), builder.inputs[graph_io.write_index("full")]
        self._caches[number] = written = self._caches[number].write(builder, new, index)
        builder.output(graph_io.present(number, "key"), written.key)
        builder.output(graph_io.present(number, "value"), written.value)
        return self._layer(0, x)

    def _layer(self, index: int, hidden: ir.Value) -> ir.Value:
        module = self._module.at(f"model.layers.{index}.")
        with self._builder.scope(f"layers.{index}"):
            attend = partial(self._attend, self._config.kv_source(index))
            return decoder_layer(module, self._config.layers[index], hidden, attend)

    def _attend(self, source: int, module: Module, body: Mixer, x: ir.Value) -> ir.Value:
        assert isinstance(body, Attention)  # as `check_drafter` has found
        return SelfAttention(module.at("self_attn."), body, alone=True).attend(x, self._rows, self._caches[source])

    def _listed(self, state: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Score the C tokens of the list, or all, with the target's rows: candidates [C], logits [C]."""
        builder, count, size = self._builder, self._config.candidates, self._target.vocab_size
        if count == size:
            ids = builder.indices(size)
            logits = builder.reshape(linear(builder, state, self._target_head), -1)
        else:
            listed = self._head_tokens
            if listed is None:
                listed = self._weights.token_ids(DRAFTER_TOKENS, count, size)
            ids = self._module.array(DRAFTER_TOKENS, listed)
            rows = gather(builder, self._target_head, ids)
            logits = builder.reshape(builder.op("MatMul", rows, builder.reshape(state, -1, 1)), -1)
        if self._target.softcap is not None:
            logits = softcap(builder, logits, self._target.softcap)
        return builder.reshape(ids, -1), logits

    def _whole_head(self, hidden: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Score all V tokens: candidates [V], logits [V]."""
        builder, head = self._builder, self._weights.matrix(DRAFTER_EMBEDDING, self._weights.formats.head)
        return builder.indices(self._target.vocab_size), builder.reshape(linear(builder, hidden, head), -1)

    def _centroid_head(self, hidden: ir.Value, shortlist: ShortlistEntry) -> tuple[ir.Value, ir.Value]:
        """Score the C tokens of the best clusters: candidates [C], logits [C] (Gemma4AssistantMaskedEmbedder).

        The head's rows are stored in cluster order, so a cluster is one entry of a table of V / per_cluster entries.
        """
        builder, module, weights = self._builder, self._module, self._weights
        size = self._target.vocab_size
        per_cluster, ordering = size // shortlist.clusters, weights.token_ids(DRAFTER_ORDERING, size, size)

        def ordered_rows(start: int, stop: int) -> npt.NDArray[np.float32]:
            return weights.checkpoint.picked_rows(DRAFTER_EMBEDDING, ordering[start:stop])

        scores = builder.op("Gemm", hidden, module.vector(DRAFTER_CENTROIDS), transB=1)
        clusters = builder.ops("TopK", scores, builder.integers(shortlist.top), axis=-1, outputs=2)[1]
        clusters = builder.reshape(clusters, -1)
        head = weights.matrix(DRAFTER_EMBEDDING, weights.formats.head, rows=ordered_rows)
        rows = builder.reshape(gather(builder, head, clusters, group=per_cluster), -1, head.width)
        logits = builder.op("MatMul", rows, builder.reshape(hidden, -1, 1))
        ids = module.array(DRAFTER_ORDERING, ordering, (shortlist.clusters, per_cluster))
        return builder.reshape(builder.op("Gather", ids, clusters, axis=0), -1), builder.reshape(logits, -1)
