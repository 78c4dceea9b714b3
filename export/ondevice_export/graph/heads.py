"""The graph of one kind of heads: hidden state in, candidates and their logits out; see `graph_io`."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from ondevice.bundle_format import graph_io
from ondevice.bundle_format.model_config import HeadsEntry, ShortlistEntry, Target
from ondevice.bundle_format.tensor_table import CENTROIDS, ORDERING
from ondevice_export.graph.graph_builder import GraphBuilder
from ondevice_export.graph.matrix import gather, linear
from ondevice_export.graph.target import softcap
from ondevice_export.graph.weights import Module, Weights
from ondevice_export.matrices import StoredMatrix


class HeadsGraph:
    """Builds the graph of one kind of heads, with the target's token table as vocabulary projection."""

    def __init__(
        self,
        builder: GraphBuilder,
        heads: HeadsEntry,
        target: Target,
        weights: Weights,
        table: StoredMatrix,
    ) -> None:
        self._builder = builder
        self._heads = heads
        self._target = target
        self._weights = weights
        self._module = Module(builder, target, weights)
        self._table = dataclasses.replace(table, name=f"target.{table.name}")
        self._hidden = builder.inputs[graph_io.HIDDEN]

    def build(self) -> None:
        """Add the layers of this kind of heads, then the vocabulary projection of their k rows."""
        builder, heads = self._builder, self._heads
        states = {"medusa": self._medusa, "blockwise": self._blockwise, "exit": self._exit}[heads.kind]()
        with builder.scope("head"):
            shortlist = heads.shortlist
            candidates, logits = self._whole(states) if shortlist is None else self._shortlisted(states, shortlist)
            if self._target.softcap is not None:
                logits = softcap(builder, logits, self._target.softcap)
        builder.output(graph_io.CANDIDATES, candidates)
        builder.output(graph_io.LOGITS, logits)

    def _medusa(self) -> ir.Value:
        """`x + silu(W[j] x)` (Medusa's ResBlock): [1, H] -> [k, H]."""
        steps = self._rows(self._module.linear(self._hidden, "medusa.blocks"))
        return self._builder.op("Add", self._hidden, self._builder.silu(steps))

    def _blockwise(self) -> ir.Value:
        """`norm(x + V[j] relu(U x))`: [1, H] -> [k, H]."""
        inner = self._builder.op("Relu", self._module.linear(self._hidden, "blockwise.inner"))
        steps = self._rows(self._module.linear(inner, "blockwise.outer"))
        return self._module.norm(self._builder.op("Add", self._hidden, steps), "blockwise.norm")

    def _exit(self) -> ir.Value:
        """`x + silu(W x)` of `x = norm(hidden)`: [1, H] -> [1, H]."""
        entry = self._module.norm(self._hidden, "exit.norm")
        return self._builder.op("Add", entry, self._builder.silu(self._module.linear(entry, "exit.block")))

    def _rows(self, steps: ir.Value) -> ir.Value:
        return self._builder.reshape(steps, self._heads.offsets, self._target.hidden_size)

    def _whole(self, states: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Score all V tokens: candidates [k, V], logits [k, V]."""
        builder, size = self._builder, self._target.vocab_size
        ids = builder.op("Expand", builder.indices(size), builder.integers(self._heads.offsets, size))
        return ids, linear(builder, states, self._table)

    def _shortlisted(self, states: ir.Value, shortlist: ShortlistEntry) -> tuple[ir.Value, ir.Value]:
        """Score the C tokens of the best clusters: candidates [k, C], logits [k, C].

        Rows of the projection are gathered one by one from the target's table. A copy in cluster order would be faster
        to read, but take as much disk space as the head itself.
        """
        builder, size = self._builder, self._target.vocab_size
        per_cluster, count = size // shortlist.clusters, self._heads.candidates
        scores = linear(builder, states, self._module.matrix(CENTROIDS))
        best = builder.ops("TopK", scores, builder.integers(shortlist.top), axis=-1, outputs=2)[1]
        ordering = self._weights.token_ids(ORDERING, size, size)
        ids = self._module.array(ORDERING, ordering, (shortlist.clusters, per_cluster))
        candidates = builder.reshape(builder.op("Gather", ids, best, axis=0), self._heads.offsets, count)
        rows = gather(builder, self._table, candidates)
        column = builder.op("Unsqueeze", states, builder.integers(2))
        return candidates, builder.reshape(builder.op("MatMul", rows, column), self._heads.offsets, count)
