"""The graph of heads of one kind, from a hidden state to candidates and their logits; see `ondevice.contract`."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from ondevice import contract
from ondevice.errors import CheckpointError
from ondevice_export.checkpoint import Checkpoint
from ondevice_export.config import TextConfig
from ondevice_export.graph.graph_builder import GraphBuilder
from ondevice_export.graph.matrix import gather, linear
from ondevice_export.graph.module_builder import ModuleBuilder
from ondevice_export.graph.target import softcap
from ondevice_export.graph.weights import Weights
from ondevice_export.heads import CENTROIDS, ORDERING, HeadsConfig, Shortlist
from ondevice_export.matrices import StoredMatrix


class HeadsGraph:
    """Builds it around the target's token table, which is its vocabulary projection."""

    def __init__(
        self,
        builder: GraphBuilder,
        heads: HeadsConfig,
        target: TextConfig,
        weights: Weights,
        *,
        checkpoint: Checkpoint,
        table: StoredMatrix,
    ) -> None:
        self._builder = builder
        self._heads = heads
        self._target = target
        self._weights = weights
        self._module = ModuleBuilder(builder, target, weights)
        self._checkpoint = checkpoint
        self._table = dataclasses.replace(table, name=f"target.{table.name}")
        self._hidden = builder.input(contract.HIDDEN, ir.DataType.FLOAT, [1, target.hidden_size])

    def build(self) -> None:
        """The kind's own layers, then the projection of their k rows."""
        builder, heads = self._builder, self._heads
        states = {"medusa": self._medusa, "blockwise": self._blockwise, "exit": self._exit}[heads.kind]()
        size = [heads.offsets, heads.candidates(self._target.vocab_size)]
        with builder.scope("head"):
            shortlist = heads.shortlist
            candidates, logits = self._whole(states) if shortlist is None else self._shortlisted(states, shortlist)
            if self._target.softcap is not None:
                logits = softcap(builder, logits, self._target.softcap)
        builder.output(candidates, contract.CANDIDATES, ir.DataType.INT64, size)
        builder.output(logits, contract.LOGITS, ir.DataType.FLOAT, size)

    def _medusa(self) -> ir.Value:
        """`x + silu(W[j] x)` (Medusa's ResBlock): [1, H] -> [k, H]."""
        return self._residual(self._hidden, self._silu(self._rows(self._module.linear(self._hidden, "medusa.blocks"))))

    def _blockwise(self) -> ir.Value:
        """`norm(x + V[j] relu(U x))`: [1, H] -> [k, H]."""
        inner = self._builder.op("Relu", self._module.linear(self._hidden, "blockwise.inner"))
        steps = self._rows(self._module.linear(inner, "blockwise.outer"))
        return self._module.norm(self._residual(self._hidden, steps), "blockwise.norm")

    def _exit(self) -> ir.Value:
        """`x + silu(W x)` of `x = norm(hidden)`: [1, H] -> [1, H]."""
        entry = self._module.norm(self._hidden, "exit.norm")
        return self._residual(entry, self._silu(self._module.linear(entry, "exit.block")))

    def _rows(self, steps: ir.Value) -> ir.Value:
        return self._builder.reshape(steps, self._heads.offsets, self._target.hidden_size)

    def _silu(self, x: ir.Value) -> ir.Value:
        return self._builder.op("Mul", x, self._builder.op("Sigmoid", x))

    def _residual(self, x: ir.Value, steps: ir.Value) -> ir.Value:
        return self._builder.op("Add", x, steps)

    def _whole(self, states: ir.Value) -> tuple[ir.Value, ir.Value]:
        """All V tokens: candidates [k, V], logits [k, V]."""
        builder, size = self._builder, self._target.vocab_size
        zero, end, one = (builder.constant(np.array(value, np.int64)) for value in (0, size, 1))
        ids = builder.op("Expand", builder.op("Range", zero, end, one), builder.integers(self._heads.offsets, size))
        return ids, linear(builder, states, self._table)

    def _shortlisted(self, states: ir.Value, shortlist: Shortlist) -> tuple[ir.Value, ir.Value]:
        """The tokens of the best clusters: candidates [k, C], logits [k, C].

        Rows of the projection are gathered where the target has them, one by one: a copy in the order of the clusters
        would be read faster, and take as much disk as the head itself.
        """
        builder, size = self._builder, self._target.vocab_size
        per_cluster, count = size // shortlist.clusters, self._heads.candidates(size)
        scores = linear(builder, states, self._weights.matrix(CENTROIDS, self._weights.formats.layers))
        best = builder.ops("TopK", scores, builder.integers(shortlist.top), axis=-1, outputs=2)[1]
        ids = self._weights.array(ORDERING, self._ordering().reshape(shortlist.clusters, per_cluster))
        candidates = builder.reshape(builder.op("Gather", ids, best, axis=0), self._heads.offsets, count)
        rows = gather(builder, self._table, candidates)
        column = builder.op("Unsqueeze", states, builder.integers(2))
        return candidates, builder.reshape(builder.op("MatMul", rows, column), self._heads.offsets, count)

    def _ordering(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Token ids in cluster order, [V]: each once, or a candidate would count twice."""
        ordering = self._checkpoint.integers(ORDERING)
        if not np.array_equal(np.sort(ordering), np.arange(self._target.vocab_size)):
            raise CheckpointError(f"{ORDERING} does not name each of the {self._target.vocab_size} tokens once")
        return ordering
